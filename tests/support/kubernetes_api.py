"""API server of Kubernetes with an Etcd of its own, and calls of it.

It has no kubelet and no controllers: objects are validated, admitted and kept, and nothing runs.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import ssl
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

from gazette_sdk.cluster.child_process import reserve_port
from gazette_sdk.cluster.etcd_server import EtcdServer
from support.certificates import Authority
from support.services import Service, running

TIMEOUT_S = 60.0

FIELD_MANAGER = "gazette"
"""Name under which objects are applied: fields that a later version leaves out are removed."""

Object = dict[str, Any]


class RefusedError(Exception):
    """Object that the server refused. The text has its reasons."""


@dataclass(frozen=True)
class Answer:
    """Outcome of a call.

    Attributes:
        content: object that the server has now.
        warnings: texts of its warnings, for example of an API that a later version removes.
    """

    content: Object
    warnings: list[str]


class KubernetesApi:
    """Calls of an API server, as an administrator.

    Args:
        port: of the server, on loopback.
        ca_file: authority of its certificate.
        token: of the administrator.
    """

    def __init__(self, port: int, ca_file: Path, token: str) -> None:
        self._url = f"https://localhost:{port}"
        self._tls = ssl.create_default_context(cafile=ca_file)
        self._token = token
        self._collections: dict[tuple[str, str], tuple[str, bool]] = {}

    def wait_until_ready(self, server: Service, log: Path) -> None:
        """Wait until the server has begun all its parts.

        Raises:
            RuntimeError: it has ended.
            TimeoutError: it has not within a minute.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                self._call("GET", "/readyz?verbose")
            except (RefusedError, OSError) as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the API server is not ready: {error}") from error
                with contextlib.suppress(subprocess.TimeoutExpired):
                    server.process.wait(0.1)
                    raise RuntimeError(f"kube-apiserver ended: {log.read_text()[-1000:]}") from None
            else:
                return

    def apply(self, item: Object, namespace: str) -> Answer:
        """Create or change an object, as the manager of the fields that it has.

        Raises:
            RefusedError: it has a field that is unknown or cannot change, or a bad value.
        """
        name = item["metadata"]["name"]
        options = urlencode(
            {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict", "force": "true"}
        )
        path = f"{self._collection(item, namespace)}/{name}?{options}"
        return self._call("PATCH", path, item, "application/apply-patch+yaml")

    def try_to_create(self, item: Object, namespace: str) -> Answer:
        """Validate and admit a new object, and do not keep it.

        Raises:
            RefusedError: it is not valid, or not admitted.
        """
        options = urlencode({"fieldValidation": "Strict", "dryRun": "All"})
        return self._call("POST", f"{self._collection(item, namespace)}?{options}", item)

    def _collection(self, item: Object, namespace: str) -> str:
        """Return the path of the objects of a kind."""
        version, kind = item["apiVersion"], item["kind"]
        base = f"/apis/{version}" if "/" in version else f"/api/{version}"
        if (version, kind) not in self._collections:
            for each in self._call("GET", base).content["resources"]:
                if "/" not in each["name"]:  # else a part of another one, such as its status
                    self._collections[version, each["kind"]] = each["name"], each["namespaced"]
        name, is_namespaced = self._collections[version, kind]
        return f"{base}/namespaces/{namespace}/{name}" if is_namespaced else f"{base}/{name}"

    def _call(
        self, method: str, path: str, item: Object | None = None, kind: str = "application/json"
    ) -> Answer:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": kind}
        data = None if item is None else json.dumps(item).encode()
        request = Request(self._url + path, data, headers, method=method)
        try:
            with urlopen(request, timeout=TIMEOUT_S, context=self._tls) as answer:
                text = answer.read()
                is_json = answer.headers.get_content_type() == "application/json"
                content = json.loads(text) if is_json else {}
                return Answer(content, answer.headers.get_all("Warning") or [])
        except HTTPError as error:
            with error:
                raise RefusedError(error.read().decode()) from None


@contextlib.contextmanager
def running_api(program: str, directory: Path) -> Iterator[KubernetesApi]:
    """Start kube-apiserver with an Etcd, and stop both at the end.

    Args:
        program: path of kube-apiserver.
        directory: of its files, and of Etcd's.
    """
    authority = Authority(directory)
    served = authority.issue()
    port, token = reserve_port(), secrets.token_hex(16)
    tokens = directory / "tokens.csv"
    tokens.write_text(f"{token},tests,tests,system:masters\n")
    etcd = EtcdServer(directory / "etcd", sync_writes=False)
    etcd.start_blocking()
    try:
        command = (
            *(program, f"--etcd-servers={etcd.endpoint}", f"--secure-port={port}"),
            *("--bind-address=127.0.0.1", "--advertise-address=127.0.0.1"),
            *(f"--tls-cert-file={served.cert_file}", f"--tls-private-key-file={served.key_file}"),
            *(f"--token-auth-file={tokens}", "--authorization-mode=RBAC"),
            f"--service-account-signing-key-file={served.key_file}",
            f"--service-account-key-file={served.cert_file}",
            "--service-account-issuer=https://localhost",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--endpoint-reconciler-type=none",
            # A controller, which does not run, makes the accounts that this one asks for.
            "--disable-admission-plugins=ServiceAccount",
        )
        log = directory / "kube-apiserver.log"
        with running(command, port, log) as server:
            api = KubernetesApi(port, authority.ca_file, token)
            api.wait_until_ready(server, log)
            yield api
    finally:
        etcd.stop_blocking()

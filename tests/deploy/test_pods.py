"""Pods of the rendered sets as processes on loopback: they drain in time, and lose nothing."""

from __future__ import annotations

import base64
import contextlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.request import urlopen

import pytest

from gazette_sdk import Journals, connect
from gazette_sdk.cluster.child_process import reserve_port
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.wire import Tls
from support.certificates import Authority
from support.deployments import Workload, objects_of, script, workloads_of
from support.etcd import etcd, etcd_server
from support.numbered_load import Load, numbers_of
from support.services import wait_until_it_serves

__all__ = ["etcd", "etcd_server"]

RENDER = script("render-manifests")
TIMEOUT_S = 90.0
KEYS = base64.b64encode(b"a secret of the pods").decode()

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def brokers_of(name: str) -> list[tuple[Workload, str]]:
    """Return the workload and the name of each broker's pod of a set."""
    found = workloads_of(objects_of((RENDER.TARGET / name / "gazette.yaml").read_text()))
    return [
        (each, f"{each.source['metadata']['name']}-{number}")
        for each in found
        if each.component == "broker"
        for number in range(each.source["spec"]["replicas"])
    ]


class Pod:
    """The container of a pod, as a process: with its arguments, and places of this machine.

    Args:
        workload: the object that makes the pod.
        name: of the pod.
        zone: that its node has, where the pod asks for it.
        etcd: URL of the Etcd.
        directory: of the volumes of all pods.
    """

    def __init__(
        self, workload: Workload, name: str, zone: str, etcd: str, directory: Path
    ) -> None:
        self.name = name
        self.grace_s = workload.pod["terminationGracePeriodSeconds"]
        self.port = reserve_port()
        data = directory / name
        (data / "fragments").mkdir(parents=True, exist_ok=True)
        places = {
            "$(POD_NAME)": name,
            "$(POD_IP)": "127.0.0.1",
            "$(NAMESPACE)": "gazette",
            "$(ZONE)": zone,
            "/var/lib/gazette/fragments": str(directory / "fragments"),
            "/var/lib/gazette": str(data),
            "/etc/gazette": str(directory),
        }
        own = {
            "--broker.host": "localhost",
            "--broker.port": str(self.port),
            "--debug.port": str(reserve_port()),
            "--etcd.address": etcd,
        }
        [container] = workload.pod["containers"]
        ports = {"gazette": str(self.port), "debug": own["--debug.port"]}
        probes = [
            container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")
        ]
        self.probes = [f"http://localhost:{ports[each['port']]}{each['path']}" for each in probes]
        self._arguments = []
        for argument in container["args"]:
            flag, equals, value = argument.partition("=")
            for place, text in places.items():
                value = value.replace(place, text)
            if flag.startswith("--etcd.") and flag not in {"--etcd.address", "--etcd.prefix"}:
                continue  # the Etcd of the test has neither TLS nor users
            self._arguments.append(f"{flag}{equals}{own.get(flag, value)}")
        if not any(each.startswith("--broker.file-root") for each in self._arguments):
            self._arguments.append(f"--broker.file-root={directory / 'fragments'}")
        self.is_tls = any(each.startswith("--broker.server-cert-file") for each in self._arguments)
        self.has_keys = any(each.startswith("--broker.auth-keys") for each in self._arguments)
        self.log = directory / f"{name}.log"
        self._ca_file = directory / "tls" / "ca.crt"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, and wait until it serves."""
        self.log.unlink(missing_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gazette_sdk.cli.gazette", *self._arguments],
                cwd=self.log.parent,
                stdout=log,
                stderr=log,
            )
        wait_until_it_serves(self._process, self.port, self.log, '"serving"')
        for probe in self.probes:
            with urlopen(probe, timeout=TIMEOUT_S) as answer:
                assert answer.status == 200, probe

    def terminate(self) -> float:
        """End the process as Kubernetes does; return the seconds that it took."""
        assert self._process is not None
        begin = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(min(self.grace_s, TIMEOUT_S)) == 0, self.log.read_text()[-2000:]
        return time.monotonic() - begin

    def kill(self) -> None:
        """End the process at once, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def connect(self):
        """Return a transport, as a client with the Secrets of the set has."""
        return connect(
            f"{'https' if self.is_tls else 'http'}://localhost:{self.port}",
            tls=Tls(trusted_ca_file=str(self._ca_file)) if self.is_tls else None,
            auth_keys=KEYS if self.has_keys else "",
        )


@contextlib.contextmanager
def running(name: str, count: int, etcd: str, directory: Path) -> Iterator[list[Pod]]:
    """Yield brokers of a set that run, of as many zones as it has."""
    authority = Authority(directory)
    certificate = authority.issue()
    (directory / "tls").mkdir()
    for source, target in (
        (certificate.cert_file, "tls.crt"),
        (certificate.key_file, "tls.key"),
        (authority.ca_file, "ca.crt"),
    ):
        shutil.copy(source, directory / "tls" / target)
    (directory / "keys").mkdir()
    (directory / "keys" / "keys").write_text(KEYS)
    (directory / "fragments").mkdir()
    in_zones: dict[str, list[tuple[Workload, str]]] = {}
    for workload, pod in brokers_of(name):
        in_zones.setdefault(workload.labels.get("gazette-zone", pod), []).append((workload, pod))
    pods = [
        Pod(*in_zone[0], zone, etcd, directory)
        for zone, in_zone in zip("abc", in_zones.values(), strict=False)
    ]
    assert len(pods) == count
    with ExitStack() as ending:
        for pod in pods:
            ending.callback(pod.kill)
            pod.start()
        yield pods


def made(transport, replication: int) -> None:
    Journals(transport=transport).create("load", partitions=4, replication=replication)


def test_a_lone_broker_stores_everything_within_its_grace(etcd, tmp_path):
    with running("minimal", 1, etcd.address, tmp_path) as [pod]:
        transport = pod.connect()
        made(transport, 1)
        with Load(transport) as load:
            load.wait_for(3000)
        assert load.error is None
        print(f"minimal: {load}; drained in {pod.terminate():.1f} s of {pod.grace_s}")
        sdk_loop.run(transport.aclose(), TIMEOUT_S)
        pod.start()
        transport = pod.connect()
        assert numbers_of(transport, load.published) == list(range(load.published))
        sdk_loop.run(transport.aclose(), TIMEOUT_S)


@pytest.mark.parametrize("name", ["external-etcd", "production"])
def test_a_broker_drains_within_its_grace_under_load(name, etcd, tmp_path):
    with running(name, 3, etcd.address, tmp_path) as pods:
        transport = pods[1].connect()
        made(transport, 2)
        with Load(transport) as load:
            load.wait_for(1000)
            took_s = pods[0].terminate()
            load.wait_for(500)
        assert load.error is None
        print(f"{name}: {load}; drained in {took_s:.1f} s of {pods[0].grace_s}")
        assert numbers_of(transport, load.published) == list(range(load.published))
        sdk_loop.run(transport.aclose(), TIMEOUT_S)


def test_three_brokers_are_restarted_in_turn_and_publishers_see_no_error(etcd, tmp_path):
    with running("pod-labels", 3, etcd.address, tmp_path) as pods:
        transport = pods[0].connect()
        made(transport, 2)
        with Load(transport) as load:
            load.wait_for(500)
            for pod in pods:
                took_s = pod.terminate()
                pod.start()
                load.wait_for(500)
                print(f"{pod.name} drained in {took_s:.1f} s of {pod.grace_s}")
        assert load.error is None
        print(load)
        assert numbers_of(transport, load.published) == list(range(load.published))
        sdk_loop.run(transport.aclose(), TIMEOUT_S)

"""Requests for other members, `/v1/at/ZONE/ID/…`, between processes with TLS and tokens."""

from __future__ import annotations

import base64
import contextlib
import json
import ssl
import time
import urllib.error
import urllib.request

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authority, Capability
from integration.cli.test_processes import TIMEOUT_S, serve, served_at
from support import certificates

KEY = base64.b64encode(b"a secret of this cluster, long enough").decode()


@contextlib.contextmanager
def members(etcd, directory, issued):
    """Brokers by id: two that demand certificates of clients, a plain one, one of a stranger."""
    authority, stranger = issued
    trusted = ("--broker.peer-ca-file", str(authority.ca_file))
    own = authority.issue()
    certified = (
        *("--broker.server-cert-file", str(own.cert_file)),
        *("--broker.server-cert-key-file", str(own.key_file)),
        *("--broker.server-ca-file", str(authority.ca_file)),
        *("--broker.peer-cert-file", str(own.cert_file)),
        *("--broker.peer-cert-key-file", str(own.key_file)),
    )
    strange = stranger.issue()
    options = {
        "tls-1": (*trusted, *certified),
        "tls-2": (*trusted, *certified),
        "plain-1": (*trusted, "--broker.host=plain.example"),  # no one must dial it
        "strange-1": (
            *("--broker.server-cert-file", str(strange.cert_file)),
            *("--broker.server-cert-key-file", str(strange.key_file)),
        ),
    }
    with contextlib.ExitStack() as stack:
        found = {}
        for name, given in options.items():
            process = stack.enter_context(
                serve(
                    directory,
                    *("--etcd.address", etcd.address, "--broker.auth-keys", KEY),
                    *("--broker.id", name, "--broker.zone=z", f"--broker.spool-dir={name}"),
                    *given,
                )
            )
            stack.callback(process.kill)
            found[name] = served_at(process)[0]
        yield found


def test_requests_for_members_and_their_tokens_go_by_tls_alone(etcd, tmp_path, gazctl):
    for name in ("ours", "strange"):
        (tmp_path / name).mkdir()
    issued = [certificates.Authority(tmp_path / name, name) for name in ("ours", "strange")]
    client = issued[0].issue("client")
    context = ssl.create_default_context(cafile=str(issued[0].ca_file))
    context.load_cert_chain(client.cert_file, client.key_file)
    token = Authority(KEY).sign(
        Capability.LIST | Capability.READ, pb.LabelSelector(), 600, time.time()
    )

    def ask(address, path, *, given=token):
        headers = {"Authorization": f"Bearer {given}"} if given else {}
        request = urllib.request.Request(address + path, headers=headers)
        tls = context if address.startswith("https") else None
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=tls) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    with members(etcd, tmp_path, issued) as served:
        first = served["tls-1"]
        assert first.startswith("https://localhost:")
        query = "cluster/members?local=true"
        for target in ("tls-2", "tls-1"):
            status, text = ask(first, f"/v1/at/z/{target}/{query}")
            assert status == 200, text
            [member] = json.loads(text)["members"]
            assert (member["id"]["suffix"], member["endpoint"]) == (target, served[target])
        status, text = ask(first, "/v1/at/z/tls-2/debug/metrics")
        assert (status, "grpc_server_handling_seconds" in text) == (200, True)
        assert ask(first, f"/v1/at/z/tls-2/{query}", given="")[0] == 401

        # Where the hop has no TLS the token is not sent, and the member is not dialled.
        status, text = ask(first, f"/v1/at/z/plain-1/{query}")
        assert (status, "the token is not sent to z/plain-1" in text) == (400, True), text
        assert token not in text
        # A token that came without TLS may go on by TLS.
        plain = served["plain-1"].replace("plain.example", "127.0.0.1")
        status, text = ask(plain, f"/v1/at/z/tls-2/{query}")
        assert status == 503, "it has no certificate that the member demands"

        # A member whose certificate no trusted authority has signed gets nothing.
        status, text = ask(first, f"/v1/at/z/strange-1/{query}")
        assert (status, "Certificate" in text) == (503, True), text

        # The same holds for calls that one member makes of all others.
        status, text = ask(first, "/v1/cluster/members")
        found = {each["id"]["suffix"]: each for each in json.loads(text)["members"]}
        assert found["tls-2"].get("error", "") == ""
        assert found["tls-2"]["version"]
        assert "the token is not sent" in found["plain-1"]["error"]
        assert found["strange-1"]["error"]

        # A drain is such a call, too.
        options = [
            *("--broker.address", first, "--broker.auth-keys", KEY),
            *("--broker.trusted-ca-file", str(issued[0].ca_file)),
            *("--broker.cert-file", str(client.cert_file)),
            *("--broker.cert-key-file", str(client.key_file)),
        ]
        refused = gazctl("brokers", "drain", "--broker", "z/plain-1", *options)
        assert "z/plain-1 cannot be asked to drain: the token is not sent" in refused.stderr
        drained = gazctl.ok("brokers", "drain", "--broker", "z/tls-2", *options)
        assert drained.text == "z/tls-2: drains 0 replicas, and ends then\n"
        ends_at = time.monotonic() + TIMEOUT_S
        while "tls-2" in gazctl.ok("brokers", "list", *options).text:
            assert time.monotonic() < ends_at

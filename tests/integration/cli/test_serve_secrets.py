"""Keys and certificates of `gazette serve`: from files, read again without a restart."""

from __future__ import annotations

import base64
import signal
import socket
import ssl
import time
import urllib.error
import urllib.request

import pytest

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authority, Capability
from integration.cli.test_processes import TIMEOUT_S, serve, served_at
from support import certificates

OLD, NEW = (base64.b64encode(text * 4).decode() for text in (b"old-key ", b"new-key "))


def status_with(endpoint, key):
    """The HTTP status of a read, with a token that a key signed. Without a journal it is 404."""
    token = Authority(key).sign(Capability.READ, pb.LabelSelector(), 60, time.time())
    request = urllib.request.Request(
        f"{endpoint}/no/journal", headers={"Authorization": f"Bearer {token}"}
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=TIMEOUT_S)
    caught.value.close()
    return caught.value.code


def wait_for_log(process, text):
    while text not in (line := process.stderr.readline().decode()):
        assert line, f"the broker ended without {text!r}"


def test_keys_of_a_file_are_read_again_at_sighup(etcd, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(OLD + "\n")
    arguments = ["--etcd.address", etcd.address, "--broker.spool-dir=s"]
    with serve(tmp_path, *arguments, "--broker.auth-keys-file", str(keys)) as process:
        endpoint, log = served_at(process)
        assert OLD not in log
        assert (status_with(endpoint, OLD), status_with(endpoint, NEW)) == (404, 401)
        keys.write_text(NEW + "\n")
        process.send_signal(signal.SIGHUP)
        wait_for_log(process, "were read again")
        assert (status_with(endpoint, OLD), status_with(endpoint, NEW)) == (401, 404)
        keys.write_text("")
        process.send_signal(signal.SIGHUP)
        wait_for_log(process, "cannot be read again")
        assert status_with(endpoint, NEW) == 404, "the earlier keys stay in use"
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0


def test_certificates_are_read_again_at_sighup(etcd, tmp_path):
    authority = certificates.Authority(tmp_path)
    issued = authority.issue()
    arguments = ["--etcd.address", etcd.address, "--broker.spool-dir=s"]
    with serve(
        tmp_path,
        *arguments,
        *("--broker.server-cert-file", str(issued.cert_file)),
        *("--broker.server-cert-key-file", str(issued.key_file)),
    ) as process:
        port = int(served_at(process)[0].rsplit(":", 1)[1])
        first = served_certificate(port)
        authority.issue()  # into the same files
        process.send_signal(signal.SIGHUP)
        wait_for_log(process, "certificates were read again")
        assert served_certificate(port) != first
        issued.key_file.write_text("no key")
        process.send_signal(signal.SIGHUP)
        wait_for_log(process, "certificates cannot be read again")
        assert served_certificate(port) != first
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0


def served_certificate(port):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        return connection.getpeercert(binary_form=True)


@pytest.mark.parametrize(
    ("arguments", "warnings"), [(["--broker.host=h.example"], 2), (["--broker.host=localhost"], 0)]
)
def test_serving_other_machines_without_keys_and_tls_is_warned_of(
    etcd, tmp_path, arguments, warnings
):
    with serve(
        tmp_path, "--etcd.address", etcd.address, "--broker.spool-dir=s", *arguments
    ) as process:
        _, log = served_at(process)
        assert log.count("this broker serves other machines without") == warnings
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0

from __future__ import annotations

import grpc
import pytest

from gazette_sdk.cluster.etcd_connections import (
    EtcdNoLeaderError,
    dial_target,
    error_of_status,
    error_of_text,
    is_of_connection,
)
from gazette_sdk.errors import (
    EtcdCompactedError,
    EtcdError,
    EtcdUnavailableError,
    LeaseLostError,
)


@pytest.mark.parametrize(
    ("address", "target", "is_tls"),
    [
        ("http://localhost:2379", "localhost:2379", False),
        ("http://localhost", "localhost:2379", False),
        ("https://etcd.example:1234", "etcd.example:1234", True),
        ("http://[::1]:2379", "[::1]:2379", False),
        ("unix:///run/etcd.sock", "unix:/run/etcd.sock", False),
    ],
)
def test_addresses(address, target, is_tls):
    assert dial_target(address) == (target, is_tls)


@pytest.mark.parametrize(
    ("code", "details", "error"),
    [
        ("UNAVAILABLE", "etcdserver: no leader", EtcdNoLeaderError),
        ("DEADLINE_EXCEEDED", "", EtcdUnavailableError),
        ("UNKNOWN", "Stream removed", EtcdUnavailableError),
        ("OUT_OF_RANGE", "mvcc: required revision has been compacted", EtcdCompactedError),
        ("NOT_FOUND", "etcdserver: requested lease not found", LeaseLostError),
        ("PERMISSION_DENIED", "etcdserver: permission denied", EtcdError),
        ("INVALID_ARGUMENT", "etcdserver: duplicate key given in txn request", EtcdError),
    ],
)
def test_statuses(code, details, error):
    found = error_of_status(grpc.StatusCode[code], details, "txn")
    assert type(found) is error
    assert str(found) == f"txn: {details or code}"


@pytest.mark.parametrize(
    ("code", "details", "expected"),
    [
        ("UNAVAILABLE", "Stream removed (recvmsg:Connection reset by peer (104))", True),
        ("UNKNOWN", "Stream removed", True),
        ("UNAVAILABLE", "", True),
        ("UNAVAILABLE", "etcdserver: request timed out", False),
        ("UNKNOWN", "etcdserver: leader changed", False),
        ("DEADLINE_EXCEEDED", "", False),
        ("PERMISSION_DENIED", "etcdserver: permission denied", False),
    ],
)
def test_statuses_of_broken_connections(code, details, expected):
    assert is_of_connection(grpc.StatusCode[code], details) is expected


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        ("etcdserver: no leader", EtcdNoLeaderError),
        ("mvcc: required revision has been compacted", EtcdCompactedError),
        ("permission denied", EtcdError),
    ],
)
def test_reasons_of_cancelled_watches(reason, error):
    assert type(error_of_text(reason)) is error

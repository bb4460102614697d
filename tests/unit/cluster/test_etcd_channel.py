from __future__ import annotations

import grpc
import pytest

from gazette_sdk.cluster.etcd_channel import (
    EtcdNoLeaderError,
    _dial_target,
    error_of_status,
    error_of_text,
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
    assert _dial_target(address) == (target, is_tls)


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
    ("reason", "error"),
    [
        ("etcdserver: no leader", EtcdNoLeaderError),
        ("mvcc: required revision has been compacted", EtcdCompactedError),
        ("permission denied", EtcdError),
    ],
)
def test_reasons_of_cancelled_watches(reason, error):
    assert type(error_of_text(reason)) is error

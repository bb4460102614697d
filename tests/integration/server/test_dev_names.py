"""A cluster of `gazette dev` answers for the names of this machine only (DNS rebinding)."""

from __future__ import annotations

import pytest

from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.transport.loop import run
from support.raw_http import exchange


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with EmbeddedCluster(tmp_path_factory.mktemp("dev"), sync_etcd=False) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("method", "target", "body"),
    [
        ("GET", "/a/journal", None),
        ("PUT", "/a/journal", b"content"),
        ("POST", "/v1/journals/list", b"{}"),
        ("GET", "/debug/metrics", None),
    ],
)
def test_a_page_that_rebinds_its_name_is_refused(cluster, method, target, body):
    def ask(host):
        return run(exchange(cluster.address, method, target, body=body, host=host), 30)

    port = cluster.address.rpartition(":")[2]
    refused = ask(f"evil.example:{port}")
    assert refused.status == 403
    assert b"use localhost, 127.0.0.1 or [::1] in the URL" in refused.body
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
        assert ask(host).status != 403

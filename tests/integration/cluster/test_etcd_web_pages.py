"""A web page cannot change the Etcd of a cluster on this machine."""

from __future__ import annotations

import base64

import pytest

from support.etcd import run
from support.raw_http import exchange

KEY = base64.b64encode(b"/gazette/cluster/items/a").decode()
PUT = f'{{"key": "{KEY}", "value": "{KEY}"}}'.encode()


@pytest.mark.parametrize("host", ["", "evil.example"])
@pytest.mark.parametrize("target", ["/v3/kv/put", "/v3/kv/range"])
def test_the_json_gateway_of_etcd_is_off(etcd, host, target):
    answer = run(exchange(etcd.address, "POST", target, body=PUT, host=host))
    assert answer.status in {404, 421}


def test_etcd_answers_http_for_names_of_loopback_only(etcd):
    assert run(exchange(etcd.address, "GET", "/version")).status == 200
    assert run(exchange(etcd.address, "GET", "/version", host="evil.example")).status == 421

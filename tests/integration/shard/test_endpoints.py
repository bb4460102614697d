"""Endpoints of an application, asked at processes that are the primary and that are not."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request

import grpc
from google.protobuf.wrappers_pb2 import StringValue, UInt64Value

from gazette_sdk.server.http import CONTENT_HEADERS
from gazette_sdk.shard import EmbeddedConsumer
from support import order_totals
from support.order_totals import CUSTOMERS, create_journals, publish

TIMEOUT_S = 60


def ask(process, path, body=None):
    """The status and the body of an answer."""
    request = urllib.request.Request(process.address + path, data=body)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def call(process, name, value, response=UInt64Value):
    """The value of a gRPC method's response; the code and the text of a failure."""
    with grpc.insecure_channel(process.address.removeprefix("http://")) as channel:
        method = channel.unary_unary(
            f"/orders.Totals/{name}", StringValue.SerializeToString, response.FromString
        )
        try:
            return method(StringValue(value=value), timeout=TIMEOUT_S).value
        except grpc.RpcError as error:
            return error.code(), error.details()


def leaders(shards):
    return {
        each.route.members[each.route.primary].suffix for each in shards if each.route.primary >= 0
    }


def test_every_process_answers_for_every_shard(gazette):
    create_journals(gazette.transport)
    options = {"transport": gazette.transport, "etcd": gazette.etcd_endpoint}
    with (
        EmbeddedConsumer(order_totals.totals, **options) as one,
        EmbeddedConsumer(order_totals.totals, **options) as two,
    ):
        deadline = time.monotonic() + TIMEOUT_S
        while len(leaders(one.list_shards())) < 2:
            assert time.monotonic() < deadline, one.list_shards()
            time.sleep(0.02)
        publish(gazette.transport, 100)
        one.wait_caught_up(TIMEOUT_S)
        ids = [each.spec.id for each in one.list_shards()]
        check_endpoints((one, two), ids)
        check_methods((one, two), ids)


def check_endpoints(processes, ids):
    answers = set()
    for number in range(CUSTOMERS):
        path = f"/api/customers/customer-{number}"
        for process in processes:
            status, body = ask(process, path)
            assert status == 200
            found = json.loads(body)
            assert found.pop("shard") in ids
            assert found == {"customer": f"customer-{number}", "cents": 20}
            answers.add(body)
    assert len(answers) == CUSTOMERS
    for process in processes:
        counts = [int(ask(process, f"/api/count?shard={shard}")[1]) for shard in ids]
        assert sum(counts) == CUSTOMERS
        assert ask(process, "/api/echo", b"{ }") == (200, b"{ }")
        assert ask(process, f"/api/broken?shard={ids[0]}") == (
            500,
            b'{"error":"ValueError: a mistake of the application"}',
        )
        with urllib.request.urlopen(process.address + path, timeout=TIMEOUT_S) as answer:
            for name, value in CONTENT_HEADERS.items():
                assert answer.headers[name] == value
        found = {}
        for shard in ids:
            body = json.dumps({"shard": shard}).encode()
            status, answer = ask(process, "/v1/shards/state", body)
            assert status == 200
            found |= {e["key"]: e["value"] for e in json.loads(answer)["entries"]}
        assert found == {f'"customer-{number}"': "20" for number in range(CUSTOMERS)}
        for request, status in (
            ({}, 400),
            ({"shard": "another"}, 404),
            ({"shard": ids[0], "what": "secrets"}, 400),
            ({"shard": ids[0], "limit": 1 << 30}, 400),
        ):
            assert ask(process, "/v1/shards/state", json.dumps(request).encode())[0] == status
        assert ask(process, "/api/count")[0] == 400
        assert ask(process, "/api/count?shard=another")[0] == 404
        assert ask(process, "/api/unknown")[0] == 404


def check_methods(processes, ids):
    """gRPC methods answer as HTTP endpoints do."""
    for process in processes:
        totals = [call(process, "Total", f"customer-{number}") for number in range(CUSTOMERS)]
        assert totals == [20] * CUSTOMERS
        assert sum(call(process, "Count", shard) for shard in ids) == CUSTOMERS
        assert call(process, "Echo", "here", StringValue) == "here"
        for number in range(CUSTOMERS):
            code, text = call(process, "Broken", f"customer-{number}")
            assert code is grpc.StatusCode.UNKNOWN
            assert "/orders.Totals/Broken returned UInt64Value, and not StringValue" in text
        code, text = call(process, "Broken", "refused")
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "this name is refused" in text
        assert call(process, "Count", "another")[0] is grpc.StatusCode.NOT_FOUND
        code, text = call(process, "Count", "")
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "name the shard in the request of /orders.Totals/Count" in text
        assert call(process, "Unknown", "")[0] is grpc.StatusCode.UNIMPLEMENTED

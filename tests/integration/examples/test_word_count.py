"""The example that counts n-grams, with two processes that answer for each other's shards."""

from __future__ import annotations

import json
import time
import urllib.parse
import urllib.request
from contextlib import ExitStack, closing
from pathlib import Path

import grpc
import pytest

from examples.word_count.client import NGramClient
from examples.word_count.counter import Counter
from examples.word_count.grams import grams_of
from examples.word_count.word_count_pb2 import QueryRequest, QueryResponse
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.shard import EmbeddedConsumer
from gazette_sdk.shard.consumer.client import ShardClient
from gazette_sdk.transport import loop as sdk_loop
from support.vectors import group

JOURNALS = Path("examples/word_count/journals.yaml")
TIMEOUT_S = 60.0
PREFIX = "examples/word-count/deltas/part-"


def shard(number):
    return f"word-count/{PREFIX}{number:03}"


def leaders(shards):
    return {
        each.route.members[each.route.primary].suffix for each in shards if each.route.primary >= 0
    }


def check_forwarded_requests(processes):
    """A request with a header, as other implementations forward it, is answered or refused."""

    async def headers():
        async with ShardClient(processes[0].address) as client:
            return [(await client.stat(cpb.StatRequest(shard=shard(n)))).header for n in range(4)]

    for number, header in enumerate(sdk_loop.run(headers(), TIMEOUT_S)):
        primary = header.route.endpoints[header.route.primary]
        for process in processes:
            with grpc.insecure_channel(process.address.removeprefix("http://")) as channel:
                query = channel.unary_unary(
                    "/word_count.NGram/Query",
                    QueryRequest.SerializeToString,
                    QueryResponse.FromString,
                )
                request = QueryRequest(header=header, shard=shard(number))
                if process.address == primary:
                    assert query(request, timeout=TIMEOUT_S).grams
                else:
                    with pytest.raises(grpc.RpcError, match="process"):
                        query(request, timeout=TIMEOUT_S)


def test_a_text_is_counted_and_every_process_answers_for_every_shard(gazette):
    vectors = group("message", "word_count")
    gazette.apply(JOURNALS.read_text())
    options = {"transport": gazette.transport, "etcd": gazette.etcd_endpoint}
    with ExitStack() as stack:
        processes = [stack.enter_context(EmbeddedConsumer(Counter(2), **options)) for _ in "12"]
        clients = [
            stack.enter_context(closing(NGramClient(each.address.removeprefix("http://"))))
            for each in processes
        ]
        deadline = time.monotonic() + TIMEOUT_S
        while len(leaders(processes[0].list_shards())) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        clients[0].publish(vectors["text"])
        processes[0].wait_caught_up(TIMEOUT_S)
        for client in clients:
            for gram, count in vectors["expect_counts"].items():
                assert client.query(gram)[gram] == count
            for each in vectors["per_shard"]:
                assert client.query(each["prefix"], shard(each["shard"])) == each["expect"]
            all_grams = [client.query("", shard(number)) for number in range(4)]
            assert sum(sum(grams.values()) for grams in all_grams) == 17
            with pytest.raises(grpc.RpcError) as caught:
                client.query("wood", "no-such-shard")
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        check_forwarded_requests(processes)
        for process in processes:
            path = f"/api/grams/{urllib.parse.quote('wood chuck')}"
            with urllib.request.urlopen(process.address + path, timeout=TIMEOUT_S) as answer:
                assert json.load(answer) == {"wood chuck": 2}


def test_grams_of_a_text_begin_with_start_and_end_with_end():
    assert list(grams_of("One, two!", 2)) == ["START one", "one two", "two END", "END END"]
    assert list(grams_of("", 2)) == ["START END", "END END"]
    assert list(grams_of("Eins zwei-3", 1)) == ["eins", "zwei", "END"]
    assert list(grams_of("Größe", 3)) == [
        "START START größe",
        "START größe END",
        "größe END END",
        "END END END",
    ]

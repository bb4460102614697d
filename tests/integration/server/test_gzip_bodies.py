"""PUTs with compressed bodies: complete ones are appended, others leave nothing behind."""

from __future__ import annotations

import gzip
import os
import random
import zlib

import pytest

from gazette_sdk.transport.loop import run
from support.raw_http import exchange
from support.served import local, served

JOURNAL = "gzip/bodies"
CONTENT = random.Random(1).randbytes(300_000) + bytes(3_000_000)
MEMBERS = gzip.compress(CONTENT[:100_000]) + gzip.compress(CONTENT[100_000:])


def put(etcd, directory, body, encoding="gzip"):
    async def scenario():
        async with served(etcd, directory) as (broker, client):
            await client.apply(local(JOURNAL))
            await client.append_when_ready(JOURNAL, b"before")
            answers = [
                await exchange(
                    broker.endpoint,
                    "PUT",
                    f"/{JOURNAL}",
                    headers=(f"Content-Encoding: {encoding}", *chunked),
                    body=body,
                )
                for chunked in ((), ("Transfer-Encoding: chunked",))
            ]
            return answers, await client.read(JOURNAL)

    return run(scenario(), 40)


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(CONTENT)),
        ("gzip", MEMBERS),
        ("x-gzip", MEMBERS),
        ("deflate", zlib.compress(CONTENT)),
        ("identity", CONTENT),
    ],
)
def test_a_complete_body_is_decoded_and_appended(etcd, tmp_path, encoding, body):
    answers, content = put(etcd, tmp_path, body, encoding)
    assert [answer.status for answer in answers] == [204, 204]
    assert content == b"before" + CONTENT + CONTENT


@pytest.mark.parametrize(
    ("encoding", "body", "reason"),
    [
        ("gzip", gzip.compress(CONTENT)[:-1], b"truncated"),
        ("gzip", gzip.compress(CONTENT)[:100_000], b"truncated"),
        ("gzip", MEMBERS[:-9], b"truncated"),
        ("gzip", b"", b"truncated"),
        ("gzip", gzip.compress(CONTENT) + b"\x00", b"truncated"),
        ("gzip", gzip.compress(CONTENT) + b"more", b"damaged"),
        ("gzip", b"no gzip at all", b"damaged"),
        ("gzip", gzip.compress(CONTENT)[:-8] + bytes(8), b"damaged"),
        ("deflate", zlib.compress(CONTENT)[:-1], b"truncated"),
        ("zstd", os.urandom(100), b"not supported"),
    ],
    ids=lambda value: value if isinstance(value, str) else len(value),
)
def test_a_body_that_is_not_whole_is_refused_and_rolled_back(
    etcd, tmp_path, encoding, body, reason
):
    answers, content = put(etcd, tmp_path, body, encoding)
    assert [answer.status for answer in answers] == [400, 400]
    assert all(reason in answer.body for answer in answers)
    assert content == b"before"

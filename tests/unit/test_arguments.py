"""An argument of another type is one clear error, before anything is sent."""

from __future__ import annotations

import pytest

from gazette_sdk import Journals, Publisher, Reader, connect, mapping, shard
from gazette_sdk.errors import ConfigurationError, GazetteError, check_number

NOWHERE = "http://127.0.0.1:1"


def reader(**options):
    return Reader(dict, "topic=orders", transport=connect(NOWHERE), **options)


def publisher(**options):
    return Publisher(transport=connect(NOWHERE), **options)


def journals(**options):
    return Journals(connect(NOWHERE), **options)


def handler(**options):
    return shard.handler(**{"message": dict, "store": shard.JsonStore, **options})(
        lambda _, __: None
    )


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: connect(5), "5 is no address"),
        (lambda: connect(b"http://x:1"), "is no address"),
        (lambda: connect(NOWHERE, connect_timeout_s="x"), "connect_timeout_s='x'"),
        (lambda: reader(ring_size="x"), "ring_size='x'"),
        (lambda: reader(end_offsets=5), "end_offsets=5"),
        (lambda: reader().poll("x"), "timeout_s='x'"),
        (lambda: reader().poll(1, limit="x"), "limit='x'"),
        (lambda: reader().poll(1, limit=True), "limit=True"),
        (lambda: reader().lag("x"), "timeout_s='x'"),
        (lambda: reader().arrow([("n", "int64")], batch_rows=1.5), "batch_rows=1.5"),
        (lambda: publisher(delivery_timeout_s="x"), "delivery_timeout_s='x'"),
        (lambda: publisher(mapping_timeout_s="x"), "mapping_timeout_s='x'"),
        (lambda: publisher(pending_bytes_max="x"), "pending_bytes_max='x'"),
        (lambda: publisher(pending_bytes_max=0), "pending_bytes_max=0: use .* at least 1"),
        (lambda: publisher(clock=5), "clock=5 is no clock"),
        (lambda: publisher().transaction(timeout="x"), "timeout='x'"),
        (lambda: publisher().transaction(save=5), "save=5 is no function"),
        (lambda: mapping.random(None), "not None"),
        (lambda: mapping.direct(5), "not 5"),
        (lambda: journals(timeout_s="x"), "timeout_s='x'"),
        (lambda: journals().create(5), "not 5"),
        (lambda: journals().create("rides", partitions="3"), "partitions='3'"),
        (lambda: journals().create("rides", labels=5), "labels=5"),
        (lambda: journals().create("rides", labels=[1]), r"labels=\[1\]"),
        (lambda: journals().create("rides", replication="x"), "replication='x'"),
        (lambda: journals().create("rides", stores=5), "stores=5"),
        (lambda: journals().create("rides", codec=5), "codec 5"),
        (lambda: journals().update("topic=rides", length="x"), "length='x'"),
        (lambda: journals().list(5), "5 is no journal"),
        (lambda: journals().delete([5]), "5 is no journal"),
        (lambda: handler(sources=5), "sources=5"),
    ],
)
def test_it_is_refused_by_name(call, named):
    with pytest.raises(GazetteError, match=named):
        call()


@pytest.mark.parametrize("value", [0, 0.5, 7])
def test_numbers_in_range_are_taken(value):
    check_number("value", value)


@pytest.mark.parametrize("value", [-1, float("nan"), True, None, "1"])
def test_others_are_refused(value):
    with pytest.raises(ConfigurationError, match=r"value=.*: use a number, at least 0"):
        check_number("value", value)

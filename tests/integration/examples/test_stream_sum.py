"""stream_sum as an application: its processes, its programs, and its README."""

from __future__ import annotations

import base64
import json

from examples.stream_sum.chunker import main
from examples.stream_sum.messages import SUMS, Sum
from examples.stream_sum.summer import RocksSums, summer
from gazette_sdk import Reader
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.testing import run_shards
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.append.append import append
from support import stream_sum
from support.recovery_logs import content
from support.vectors import golden

TIMEOUT_S = 60.0
CHUNKS = "examples/stream-sum/chunks/part-000"
LOG = "examples/stream-sum/recovery-logs/chunks-part-000"


def committed_sums(transport):
    """Return the published sums, each as (id, number of chunks, value)."""
    reader = Reader(Sum, name=SUMS, block=False, transport=transport)
    return [row(each.message) for each in reader]


def stored_sums(store):
    """Return the sums in a store, each as (id, number of chunks, value)."""
    with store.committed() as view:
        if isinstance(store, RocksSums):
            return [row(found) for _, found in view.items()]
        found = view.execute("SELECT id, seq_no, val FROM sums").fetchall()
        return [(key, seq_no, int.from_bytes(value, "big")) for key, seq_no, value in found]


def row(found):
    return bytes(found.id), found.seq_no, found.value


def test_every_sum_is_verified_over_both_stores(gazette, capsys):
    gazette.apply(stream_sum.journals(replication=1))
    with run_shards(summer, cluster=gazette, lease_ttl_s=3) as shards:
        stream_sum.create_shards(shards)
        assert main(["--chunker.streams", "10", "--chunker.chunks", "10"]) == 0
        assert capsys.readouterr().out.startswith("40 sums were verified in ")
        shards.wait_caught_up()
        stores = [shards.store(journal) for journal in stream_sum.sources()]
        stored = [found for store in stores for found in stored_sums(store)]
        published = committed_sums(gazette.transport)
    assert len(published) == len({key for key, _, _ in published}) == 40
    assert sorted(published) == sorted(stored)


def test_the_log_of_a_recorded_shard_goes_on(gazette):
    recorded = {
        each["journal"]: base64.b64decode(each["bytes_b64"])
        for each in golden("consumer/messages/journals.json")
    }
    gazette.apply(stream_sum.journals(replication=1))

    async def fill():
        for journal, recording in ((CHUNKS, recorded[CHUNKS]), (LOG, content("rocksdb-summer"))):
            await append(gazette.transport, pb.AppendRequest(journal=journal), [recording])

    sdk_loop.run(fill(), TIMEOUT_S)
    [shard] = [
        change
        for change in stream_sum.shard_specs().changes
        if change.upsert.id == "chunks-part-000"
    ]
    with run_shards(summer, cluster=gazette, lease_ttl_s=3) as shards:
        stream_sum.create_shards(shards, cpb.ApplyRequest(changes=[shard]))
        shards.wait_caught_up()
        stored = stored_sums(shards.store(CHUNKS))
    # The log ends before the last stream, whose sum was published after it.
    ids = [bytes(json.loads(line)["ID"]) for line in recorded[CHUNKS].splitlines()]
    sums = {
        bytes(each["ID"]): (each["SeqNo"], each["Value"])
        for each in map(json.loads, recorded[SUMS].splitlines())
        if each["SeqNo"]
    }
    assert sorted(stored) == sorted((key, *sums[key]) for key in set(ids))
    assert committed_sums(gazette.transport) == [(ids[-1], *sums[ids[-1]])]

"""Memory of a consumer process with many idle shards, its start, and what it costs to be idle.

    python benchmarks/idle_shards.py [--shards 1000] [--seconds 30] [--json] [--check]

Each shard has a source journal, a `RocksStore` and a recovery log, at one broker in another
process. Every source has one message, which its shard has counted: so each shard has committed. The
process has started when all shards have consumed their message. Its memory is its resident size,
with the interpreter and all libraries.
"""

from __future__ import annotations

import time

from idle import processor_s, resident_mib
from measure import Figure, arguments, report
from word_counter import Word, counter

from gazette_sdk import Publisher
from gazette_sdk.errors import UnavailableError
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.shard.application.generator import shard_id
from gazette_sdk.shard.consumer.client import ShardClient
from gazette_sdk.testing import gazette_cluster, run_shards
from gazette_sdk.testing.shards import RunningShards
from gazette_sdk.transport import loop as sdk_loop

MEMORY_MIB_MAX = 1536.0
START_S_MAX = 120.0
CORE_PERCENT_MAX = 5.0
SETTLE_S = 15.0
LIMIT_S = 900.0
POLL_S = 0.2
LEASE_TTL_S = 20.0


def sources(count: int) -> list[str]:
    """Return names of journals."""
    return [f"words/part-{number:04d}" for number in range(count)]


def specs(names: list[str]) -> str:
    """Return specs of journals."""
    children = "".join(f"  - name: {name}\n" for name in names)
    return f"""
name: words/
replication: 1
labels:
  - {{name: content-type, value: application/x-ndjson}}
  - {{name: topic, value: words}}
fragment: {{length: 16777216, compression_codec: NONE, stores: ["file:///"], refresh_interval: 5m}}
children:
{children}"""


def wait_until_counted(shards: RunningShards, names: list[str]) -> None:
    """Wait until each shard has counted the message of its source."""
    client = ShardClient(shards.processes[0].address)
    deadline = time.monotonic() + LIMIT_S
    for name in names:
        request = cpb.StatRequest(shard=shard_id(counter.full_name, name), read_through={name: 1})
        while (status := sdk_loop.run(answer(client, request), LIMIT_S).status) != cpb.OK:
            assert status != cpb.SHARD_STOPPED, f"the shard of {name} has failed"
            assert time.monotonic() < deadline, f"the shard of {name} has not started"
            time.sleep(POLL_S)
    sdk_loop.run(client.aclose(), LIMIT_S)


async def answer(client: ShardClient, request: cpb.StatRequest) -> cpb.StatResponse:
    """Return the answer to a request; not found while the process starts."""
    try:
        return await client.stat(request)
    except UnavailableError:
        return cpb.StatResponse(status=cpb.SHARD_NOT_FOUND)


def main() -> None:
    """Measure, and print the figures."""
    options = arguments(__doc__ or "", shards=1000, seconds=30)
    names = sources(options.shards)
    limit = str(2 * options.shards + 1)
    with gazette_cluster(
        1, lease_ttl_s=LEASE_TTL_S, arguments=("--broker.limit", limit)
    ) as cluster:
        cluster.apply(specs(names))
        with Publisher(transport=cluster.connect()) as publisher:
            for name in names:
                publisher.publish(Word("once"), mapping=lambda _, name=name: name)
        arguments_ = ("--consumer.limit", limit)
        begun = time.monotonic()
        with run_shards(
            counter, cluster=cluster, lease_ttl_s=LEASE_TTL_S, arguments=arguments_
        ) as shards:
            wait_until_counted(shards, names)
            start_s = time.monotonic() - begun
            pid = shards.processes[0].pid
            start_processor_s = processor_s(pid)
            time.sleep(SETTLE_S)
            before, begun = processor_s(pid), time.monotonic()
            time.sleep(options.seconds)
            percent = 100 * (processor_s(pid) - before) / (time.monotonic() - begun)
            memory = resident_mib(pid)
            failed = sum(
                status.code == cpb.ReplicaStatus.FAILED
                for shard in shards.list_shards()
                for status in shard.status
            )
    assert not failed, f"{failed} shards have failed"
    report(
        [
            Figure("start", start_s, START_S_MAX, "s", 1.0, more_is_better=False),
            Figure("of which processor time", start_processor_s, start_s, "s", None),
            Figure("resident memory", memory, MEMORY_MIB_MAX, "MiB", 1.0, more_is_better=False),
            Figure("one core", percent, CORE_PERCENT_MAX, "%", 1.0, more_is_better=False),
        ],
        options,
    )


if __name__ == "__main__":
    main()

"""Read, as recorded of another broker: stored and local content, jumps, ends, damage."""

from __future__ import annotations

import base64
import gzip
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gazette_sdk.protocol import broker_pb2 as pb
from support.golden import (
    PATTERN,
    GoldenBroker,
    Outcome,
    Stream,
    names,
    recorded,
    running,
    spec_of,
)
from support.golden_compare import Replay

CODECS = {
    "none": pb.NONE,
    "gzip": pb.GZIP,
    "snappy": pb.SNAPPY,
    "zstandard": pb.ZSTANDARD,
}
STEP = 1100
"""Bytes of each fragment of the journals that are to have holes and damage."""

DEADLINE_S = 1.0


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replay]:
    with running(tmp_path_factory.mktemp("read")) as broker, ThreadPoolExecutor() as threads:
        make_journals(broker)
        replay = Replay(broker)
        waiting: dict[str, Future[Outcome]] = {}
        for case in recorded("grpc_read"):
            name = case["name"]
            BEFORE.get(name, lambda _broker: None)(broker)
            if name in STREAMS:
                STREAMS[name](replay, case)
            elif name == "stored content has another sum":
                # Of the recorded answer, OK with content, ours gives the metadata, and an error.
                ours = {"code": "UNKNOWN", "responses": case["responses"][:1]}
                replay.run("Read", case | ours)
            elif case["code"] == "DEADLINE_EXCEEDED":
                requests = replay.requests("Read", case)
                waiting[name] = threads.submit(
                    broker.client.call, "Read", requests, timeout_s=DEADLINE_S
                )
            else:
                replay.run("Read", case)
        for case in recorded("grpc_read"):
            if case["name"] in waiting:
                replay.judge("Read", case, waiting[case["name"]].result())
        yield replay


@pytest.mark.parametrize("name", names("grpc_read"))
def test_read_answers_as_recorded(replay: Replay, name: str) -> None:
    replay.check(name)


def test_content_of_another_sum_is_an_error_with_a_remedy(replay: Replay) -> None:
    """The recorded broker gives such content away; a fragment's name promises its sum."""
    outcome = replay.verdicts["stored content has another sum"].outcome
    assert outcome.code == "UNKNOWN"
    for part in ("read/broken", "SHA-1", "put a good copy in its place"):
        assert part in outcome.message


# ------------------------------------------------------------------ journals


def make_journals(broker: GoldenBroker) -> None:
    stored = {"stores": ["file:///"]}
    small = stored | {"length": 1024}
    broker.apply(
        *(
            spec_of(
                f"codec/{name}",
                fragment=stored | {"length": 4096, "compression_codec": codec},
                labels=pb.LabelSet(labels=[pb.Label(name="codec", value=name)]),
            )
            for name, codec in CODECS.items()
        ),
        spec_of("append/wo", flags=pb.JournalSpec.O_WRONLY),
        spec_of("read/new"),
        spec_of("read/local"),
        spec_of("read/big", fragment=stored | {"compression_codec": pb.GZIP}),
        spec_of("read/holes", fragment=small | {"compression_codec": pb.NONE}),
        spec_of("read/broken", fragment=small | {"compression_codec": pb.GZIP}),
    )
    journals = [f"codec/{name}" for name in CODECS]
    for journal in journals:
        broker.append_all(
            journal, b"first fragment\n", PATTERN[:2000], PATTERN[2000:5000], b"", b""
        )
        broker.append_all(journal, b"local tail\n")
    for number in range(5):
        content = PATTERN[number * STEP : (number + 1) * STEP]
        broker.append_all("read/holes", content)
        if number < 2:
            broker.append_all("read/broken", content)
    broker.append_all("read/holes", b"")
    broker.append_all("read/broken", b"")
    broker.wait_until_stored("read/broken", 2)
    age(broker, dict.fromkeys(journals, 2) | {"read/holes": 5})


def age(broker: GoldenBroker, counts: dict[str, int]) -> None:
    """Give so many stored files the modification times of the recordings.

    It waits until the broker has seen the files, and then the times.
    """
    times = {
        journal: [1_700_000_000 + 100 * number for number in range(count)]
        for journal, count in counts.items()
    }
    for journal, count in counts.items():
        files = broker.wait_until_stored(journal, count)
        for path, mod_time in zip(files, times[journal], strict=True):
            os.utime(path, (mod_time, mod_time))
    for journal in counts:
        broker.wait_for_index(
            journal,
            lambda found, journal=journal: (
                [f.mod_time for f in found if f.mod_time] == times[journal]
            ),
        )


def begins(found: list[pb.Fragment]) -> list[int]:
    return [fragment.begin for fragment in found]


def big_is_local(broker: GoldenBroker) -> None:
    chunks = [PATTERN[at : min(at + 30_000, 100_000)] for at in range(0, 100_000, 30_000)]
    assert broker.append("read/big", *chunks).commit.end == 100_000


def big_is_stored(broker: GoldenBroker) -> None:
    broker.append_all("read/big", b"")
    broker.wait_until_stored("read/big", 1)


def first_is_gone(broker: GoldenBroker) -> None:
    broker.file_of(broker.fragments("read/holes")[0]).unlink()
    broker.wait_for_index("read/holes", lambda found: begins(found)[0] == STEP)


def third_is_gone(broker: GoldenBroker) -> None:
    fragment = broker.fragments("read/holes")[1]
    assert fragment.begin == 2 * STEP
    broker.file_of(fragment).unlink()
    broker.wait_for_index("read/holes", lambda found: begins(found) == [STEP, 3 * STEP, 4 * STEP])


def next_is_recent(broker: GoldenBroker) -> None:
    for fragment in broker.fragments("read/holes")[1:]:
        os.utime(broker.file_of(fragment))
    recent = time.time() - 600
    broker.wait_for_index("read/holes", lambda found: found[1].mod_time > recent)


def broken_file(broker: GoldenBroker) -> Path:
    fragment = broker.fragments("read/broken")[0]
    assert (fragment.begin, fragment.end) == (0, STEP)
    return broker.file_of(fragment)


def damage(broker: GoldenBroker, content: bytes) -> None:
    broken_file(broker).write_bytes(content)


def vanish(broker: GoldenBroker) -> None:
    """Just after a listing, so that the next one is due only in a second."""
    path = broken_file(broker)
    broker.wait_for_refresh("read/broken")
    path.unlink()


BEFORE: dict[str, Callable[[GoldenBroker], None]] = {
    "chunks of a large local fragment": big_is_local,
    "chunks of a large stored GZIP fragment": big_is_stored,
    "offset jump at the beginning": first_is_gone,
    "offset jump over a hole": third_is_gone,
    "no jump over a hole when the next fragment is recent": next_is_recent,
    "stored file is truncated": lambda broker: damage(
        broker, broken_file(broker).read_bytes()[:-10]
    ),
    "stored content too short": lambda broker: damage(broker, gzip.compress(PATTERN[:1000])),
    "stored content too long": lambda broker: damage(broker, gzip.compress(PATTERN[:1200])),
    "stored content has another sum": lambda broker: damage(broker, gzip.compress(b"x" * STEP)),
    "stored file is not GZIP": lambda broker: damage(broker, b"this is text\n"),
    "stored file vanished, index not refreshed": vanish,
}


# ------------------------------------------------------------------ reads that go on


def cancelled(replay: Replay, case: dict[str, Any]) -> None:
    """The client leaves a read which waits for content."""
    broker = replay.broker
    stream = Stream(broker.client, "Read", replay.requests("Read", case))
    # Answered behind it, on the same connection: the read waits by now.
    broker.client.call("Read", [pb.ReadRequest(journal="read/new").SerializeToString()])
    replay.judge("Read", case, stream.cancel())


def blocking_read_of_appends(replay: Replay, case: dict[str, Any]) -> None:
    """It is given each append as it is committed."""
    broker = replay.broker
    stream = Stream(broker.client, "Read", replay.requests("Read", case))
    for what, count in case["messages_received_so_far"]:
        if what.startswith("after append of "):
            word = what.removeprefix("after append of ")
            broker.append_all("read/local", f"{word}\n".encode())
        stream.wait_for(count)
        assert len(stream.outcome.responses) == count, what
    replay.judge("Read", case, stream.cancel())


def blocking_read_from_the_head(replay: Replay, case: dict[str, Any]) -> None:
    """Head 14; then an append."""
    broker = replay.broker
    stream = Stream(broker.client, "Read", replay.requests("Read", case))
    broker.client.call("Read", [pb.ReadRequest(journal="read/new").SerializeToString()])
    broker.append_all("read/local", b"four\n")
    stream.wait_for(2)
    replay.judge("Read", case, stream.cancel())


def truncated(replay: Replay, case: dict[str, Any]) -> None:
    """What can be read is given, then it fails. How much that is depends on who compressed it."""
    outcome = replay.broker.client.call("Read", replay.requests("Read", case))
    given = b"".join(pb.ReadResponse.FromString(wire).content for wire in outcome.responses)
    assert STEP - 50 < len(given) < STEP
    assert PATTERN.startswith(given)
    content = {"json": {"content": base64.b64encode(given).decode()}}
    replay.judge("Read", case | {"responses": [case["responses"][0], content]}, outcome)


STREAMS: dict[str, Callable[[Replay, dict[str, Any]], None]] = {
    "offset at head, blocking, client cancels": cancelled,
    "blocking read from 0 of a new journal": blocking_read_of_appends,
    "blocking read from -1": blocking_read_from_the_head,
    "stored file is truncated": truncated,
}

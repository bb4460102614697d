"""Append, as recorded of another broker: offsets, registers, refusals, suspension."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.rules import RPCS_BY_NAME
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

STORE = {"stores": ["file:///"], "compression_codec": pb.NONE}
DAY_S = 24 * 3600

UNFINISHED = {
    "client stalls after a chunk",
    "client stalls after the opening message",
    "client commits but does not half-close",
}
"""Their clients neither go on nor half-close."""

DEADLINE_S = 1.0
HAVE_DEADLINE = {"proxied header with a future revision", "future min_etcd_revision"}

ROUTE_WAS_STILL_THERE = {
    "(list) state after content with IF_FLUSHED",
    "mode IF_FLUSHED again",
}
"""Recorded before the allocator had taken a suspended journal from its broker, which it does at
any moment: ours may have no route any more."""

OURS: dict[str, dict[str, Any]] = {
    # The recorded client gave up after 201 s. Ours is answered within 5 s: broker section 20.
    "store is unhealthy": {"code": "OK", "message": "", "responses": []},
}
RPC_OF = {"(list)": "List", "(read)": "Read", "(fragments)": "ListFragments"}


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replay]:
    with running(tmp_path_factory.mktemp("append")) as broker:
        broker.apply(
            spec_of("append/reg"),
            spec_of("append/ro", flags=pb.JournalSpec.O_RDONLY),
            spec_of("append/wo", flags=pb.JournalSpec.O_WRONLY),
            spec_of("append/slow", max_append_rate=2000),
            spec_of("append/index", fragment=STORE),
            spec_of("suspend/empty"),
            spec_of("suspend/data", fragment=STORE),
            spec_of("suspend/data2", fragment=STORE),
            spec_of("store/missing", fragment={"stores": ["file:///missing/"]}),
        )
        replay = Replay(broker)
        unhealthy = begin_append_to_a_missing_store(replay)
        for recording in recorded("grpc_append"):
            name = recording["name"]
            case = recording | OURS.get(name, {})
            rpc = RPC_OF.get(name.split(" ")[0], "Append")
            BEFORE.get(name, lambda _broker: None)(broker)
            if name == "store is unhealthy":
                finish_append_to_a_missing_store(replay, case, unhealthy)
            elif name == "client cancels mid-append":
                cancelled_append(replay, case)
            elif name in ROUTE_WAS_STILL_THERE:
                outcome = broker.client.call(rpc, replay.requests(rpc, case))
                with_the_route(replay, outcome, RPCS_BY_NAME[rpc].response_type)
                replay.judge(rpc, case, outcome)
            else:
                replay.run(
                    rpc,
                    case,
                    half_close=name not in UNFINISHED,
                    timeout_s=DEADLINE_S if name in HAVE_DEADLINE else 20.0,
                )
        yield replay


@pytest.mark.parametrize("name", names("grpc_append"))
def test_append_answers_as_recorded(replay: Replay, name: str) -> None:
    replay.check(name)


@pytest.mark.parametrize("name", sorted(UNFINISHED))
def test_a_client_which_stalls_is_given_up_soon(replay: Replay, name: str) -> None:
    """1.1 s were recorded of each; that of ours has a busy machine's time on top."""
    assert 0.9 <= replay.verdicts[name].outcome.seconds < 4.0


def test_a_rate_limited_append_takes_its_time(replay: Replay) -> None:
    """4500 bytes at 2000 bytes per second, of which those of one second were saved up."""
    assert 1.0 <= replay.verdicts["rate limited journal"].outcome.seconds < 5.0


def test_an_append_to_an_unhealthy_store_is_told_so(replay: Replay) -> None:
    outcome = replay.verdicts["store is unhealthy"].outcome
    response = pb.AppendResponse.FromString(outcome.responses[0])
    assert response.status == pb.FRAGMENT_STORE_UNHEALTHY
    assert "file:///missing/" in response.store_health_error
    assert response.header.process_id == pb.ProcessSpec.ID(zone="zone-a", suffix="broker-1")
    assert outcome.seconds < 5.0


# ------------------------------------------------------------------ states


def index_ahead(broker: GoldenBroker) -> None:
    """Head 10; a file for [10, 110) appears in the store."""
    broker.append_all("append/index", b"0123456789")
    content = PATTERN[:100]
    digest = hashlib.sha1(content).hexdigest()
    path = broker.root / "append/index" / f"{10:016x}-{110:016x}-{digest}.raw"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    broker.wait_for_index("append/index", lambda found: found[-1].end == 110)


def unpersisted_content(broker: GoldenBroker) -> None:
    broker.append_all("suspend/data", b"some content\n", b"more content\n")


def both_stored(broker: GoldenBroker) -> None:
    broker.wait_until_stored("suspend/data", 2)


def stored_long_ago(broker: GoldenBroker) -> None:
    broker.append_all("suspend/data2", b"some content\n", b"")
    for path in broker.wait_until_stored("suspend/data2", 1):
        set_mod_time(path, time.time() - 2 * DAY_S)
    yesterday = time.time() - DAY_S
    broker.wait_for_index("suspend/data2", lambda found: found[-1].mod_time < yesterday)


def fragments_are_gone(broker: GoldenBroker) -> None:
    shutil.rmtree(broker.root / "suspend/data2")
    broker.wait_for_index("suspend/data2", lambda found: not found)


def set_mod_time(path: Path, mod_time: float) -> None:
    os.utime(path, (mod_time, mod_time))


BEFORE: dict[str, Callable[[GoldenBroker], None]] = {
    "index ahead, no offset": index_ahead,
    "mode NO_RESUME on a FULL journal": lambda broker: broker.wait_until_unassigned(
        "suspend/empty"
    ),
    "append after resume": lambda broker: broker.wait_until_served("suspend/empty"),
    "mode IF_FLUSHED with unpersisted content": unpersisted_content,
    "(read) of a PARTIAL journal": both_stored,
    "mode IF_FLUSHED, all persisted more than 24 h ago": stored_long_ago,
    "mode IF_FLUSHED on a PARTIAL journal whose fragments are gone": fragments_are_gone,
    "(list) FULL at an offset": lambda broker: broker.wait_until_unassigned("suspend/data2"),
    "append after resume at an offset": lambda broker: broker.wait_until_served("suspend/data2"),
}


# ------------------------------------------------------------------ cases of their own kind


def cancelled_append(replay: Replay, case: dict[str, Any]) -> None:
    """The client leaves while its append holds the journal."""
    broker = replay.broker
    stream = Stream(broker.client, "Append", replay.requests("Append", case), half_close=False)
    # A second append is taken up behind the first one, so that the first has begun by then.
    assert broker.append("append/wo").status == pb.OK
    replay.judge("Append", case, stream.cancel())
    assert broker.append("append/reg").commit.end == 27, "nothing of it was kept"


def with_the_route(replay: Replay, outcome: Outcome, kind: type[Message]) -> None:
    """Put the route back which the allocator has just taken away, if it has."""
    response: Any = kind.FromString(outcome.responses[0])
    is_list = isinstance(response, pb.ListResponse)
    route = response.journals[-1].route if is_list else response.header.route
    if route == pb.Route(primary=-1):
        members = [pb.ProcessSpec.ID(zone="zone-a", suffix="broker-1")]
        route.CopyFrom(pb.Route(members=members, endpoints=[replay.broker.endpoint]))
    outcome.responses[0] = response.SerializeToString()


def begin_append_to_a_missing_store(replay: Replay) -> Stream:
    """It takes seconds, and is begun before all others."""
    case = recorded("grpc_append")[-1]
    assert case["name"] == "store is unhealthy"
    return Stream(replay.broker.client, "Append", replay.requests("Append", case))


def finish_append_to_a_missing_store(
    replay: Replay, case: dict[str, Any], unhealthy: Stream
) -> None:
    outcome = unhealthy.finish()
    replay.judge("Append", case, Outcome([], outcome.code, outcome.message, outcome.seconds))
    replay.verdicts[case["name"]].outcome.responses = outcome.responses

"""List and its watches, as recorded of another broker."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest
from google.protobuf import json_format

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.loop import run
from support.golden import TIMEOUT_S, GoldenBroker, Stream, names, recorded, running, spec_of
from support.golden_compare import Replay

SNAPSHOT = 2
"""Responses of a snapshot of few journals in a watch: the journals, and the empty one."""


OURS = {
    # The recorded errors name the label too.
    "prefix without slash": {"message": "Selector.Include: "},
    "exclude prefix without slash": {"message": "Selector.Exclude: "},
}


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replay]:
    with running(tmp_path_factory.mktemp("list")) as broker:
        replay = Replay(broker)
        cases = recorded("grpc_list")
        for case in cases:
            name = case["name"]
            if name == "all, 38 journals: messages of at most 25":
                make_recorded_journals(broker, case)
            if name == "watch":
                watch(replay, case)
            elif name == "watch resumed at an older revision":
                watch_of_the_past(replay, case)
            elif name == "watch resumed at the current revision":
                watch_of_now(replay, case)
            elif name == "watch with a client deadline of 1 s":
                replay.run("List", case, timeout_s=1.0)
            elif name == "client does not half-close":
                unfinished_request(replay, case)
            else:
                replay.run("List", case | OURS.get(name, {}))
        yield replay


@pytest.mark.parametrize("name", names("grpc_list"))
def test_list_answers_as_recorded(replay: Replay, name: str) -> None:
    replay.check(name)


def make_recorded_journals(broker: GoldenBroker, case: dict[str, Any]) -> None:
    """Create and update journals in the order of the revisions that were recorded."""
    writes: list[tuple[int, pb.JournalSpec]] = []
    for response in case["responses"]:
        for journal in response["json"]["journals"]:
            spec = json_format.ParseDict(journal["spec"], pb.JournalSpec())
            revisions = {journal["create_revision"], journal["mod_revision"]}
            writes += [(int(revision), spec) for revision in revisions]
    writes.sort(key=lambda write: write[0])
    for _, together in groupby(writes, key=lambda write: write[0]):
        broker.apply(*(spec for _, spec in together))


def watched(**changes: Any) -> pb.JournalSpec:
    return spec_of("watched/a", labels=pb.LabelSet(labels=[TOPIC]), **changes)


TOPIC = pb.Label(name="topic", value="watched")


def watch(replay: Replay, case: dict[str, Any]) -> None:
    """What a watch tells of, and what it does not tell of."""
    broker = replay.broker
    stream = Stream(broker.client, "List", replay.requests("List", case))
    recorded_marks = iter(case["messages_received_so_far"])

    def mark(what: str, broker: GoldenBroker) -> None:
        assert_told(stream, broker, next(recorded_marks), what)

    mark("snapshot of nothing", broker)
    broker.apply(watched())
    mark("after create of watched/a", broker)
    broker.wait_until_served("watched/a")
    mark("after assignment value was written (route became consistent; spec unchanged)", broker)
    broker.apply(watched(max_append_rate=1 << 20))
    mark("after update of watched/a", broker)
    broker.apply(spec_of("unwatched/a"))
    mark("after create of an unmatched journal", broker)
    broker.apply(delete=["watched/a"])
    mark("after delete of watched/a", broker)
    replay.judge("List", case, stream.cancel())


def watch_of_the_past(replay: Replay, case: dict[str, Any]) -> None:
    """It tells at once how things are."""
    stream = Stream(replay.broker.client, "List", replay.requests("List", case))
    assert_told(stream, replay.broker, case["messages_received_so_far"][0], "0.7 s")
    replay.judge("List", case, stream.cancel())


def watch_of_now(replay: Replay, case: dict[str, Any]) -> None:
    """It waits for the next change, whatever it is, and then tells how things are."""
    broker = replay.broker
    broker.apply(spec_of("unwatched/b"))
    # The recorded header was the newest; so is this one.
    resumed_at = 71
    replay.revisions.known[resumed_at] = broker.keyspace.revision
    stream = Stream(broker.client, "List", replay.requests("List", case))
    assert_told(stream, broker, case["messages_received_so_far"][0], "0.7 s")
    broker.apply(spec_of("unwatched/c"))
    assert_told(stream, broker, case["messages_received_so_far"][1], "after unrelated change")
    replay.judge("List", case, stream.cancel())


def assert_told(stream: Stream, broker: GoldenBroker, mark: list[Any], what: str) -> None:
    """So many responses have come, and none is under way."""
    recorded_what, count = mark
    assert recorded_what == what
    stream.wait_for(count)
    # Whoever is to be told of a revision is told in the turn of the loop that learns of it. An
    # answer to a later call, on the same connection, comes behind that.
    run(settle(broker), TIMEOUT_S)
    broker.client.call("List", [pb.ListRequest().SerializeToString()])
    assert len(stream.outcome.responses) == count, what


async def settle(broker: GoldenBroker) -> None:
    """Until our mirror of Etcd is as Etcd is."""
    etcd = broker.served.broker._etcd
    assert etcd is not None
    while True:
        found = await etcd.range(b"/gazette/cluster/", b"/gazette/cluster0")
        newest = max(kv.mod_revision for kv in found.entries)
        await broker.keyspace.wait_for_revision(newest)
        journals = [item.id for item in broker.keyspace.items()]
        if all(broker._is_served(journal) for journal in journals):
            return
        await broker.keyspace.wait_for_update()


def unfinished_request(replay: Replay, case: dict[str, Any]) -> None:
    """The recorded broker waits for the half-close, for ever. Ours answers: it has the request.

    What it answers is what ``by name`` shows of another journal: one response, of this journal.
    """
    requests = replay.requests("List", case)
    stream = Stream(replay.broker.client, "List", requests, half_close=False)
    stream.wait_for(1)
    outcome = stream.finish()
    response = pb.ListResponse.FromString(outcome.responses[0])
    assert [journal.spec.name for journal in response.journals] == ["orders/part-000"]
    outcome.responses.clear()
    replay.judge("List", case | {"code": "OK", "message": ""}, outcome)

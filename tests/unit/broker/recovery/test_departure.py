from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gazette_sdk.broker.recovery import custody
from gazette_sdk.broker.recovery.custody import Departure
from gazette_sdk.cluster.broker_keys import withdrawn_route
from gazette_sdk.protocol import broker_pb2 as pb
from support.etcd import run

JOURNAL = "a/journal"


class Etcd:
    """Etcd, as far as a departure writes to it."""

    def __init__(self) -> None:
        self.routes: list[pb.Route] = []

    async def txn(self, _compares: Any, changes: Any) -> None:
        self.routes += [pb.Route.FromString(change.value) for change in changes]


def leader_of(*, kept_end: int, listed_end: int) -> Any:
    """Return the replica of a primary whose head is 8."""
    return SimpleNamespace(
        journal=JOURNAL,
        is_primary=True,
        kept_end=kept_end,
        storage=SimpleNamespace(head=SimpleNamespace(end=8)),
        index=SimpleNamespace(listed_end=listed_end),
    )


@pytest.mark.parametrize(
    ("kept_end", "listed_end", "asked", "end"),
    [(0, 8, {}, 8), (0, 5, {JOURNAL: 8}, 8), (22, 8, {JOURNAL: 22}, 22), (0, 9, {}, 9)],
)
def test_a_withdrawn_route_ends_where_the_stored_content_ends(
    monkeypatch: pytest.MonkeyPatch,
    kept_end: int,
    listed_end: int,
    asked: dict[str, int],
    end: int,
) -> None:
    """Content is stored, too, that the primary kept though not all replicas acknowledged it."""
    waited_for: dict[str, int] = {}

    async def listed_journals(ends: dict[str, int], *_: object) -> set[str]:
        waited_for.update(ends)
        return set(ends)

    monkeypatch.setattr(custody, "listed_journals", listed_journals)
    etcd = Etcd()
    assignment = SimpleNamespace(
        item=JOURNAL,
        slot=0,
        value=pb.Route(members=[pb.ProcessSpec.ID(zone="a", suffix="b")]),
        key=b"key",
        mod_revision=7,
    )
    keyspace = SimpleNamespace(
        local_assignments=lambda *_: [assignment],
        assignments=lambda _: [assignment],
        item=lambda _: SimpleNamespace(create_revision=5),
    )
    leaving = Departure(
        etcd,  # type: ignore[arg-type]
        keyspace,  # type: ignore[arg-type]
        pb.ProcessSpec.ID(zone="a", suffix="b"),
        stores=None,  # type: ignore[arg-type]
        persister=SimpleNamespace(storeless=()),  # type: ignore[arg-type]
        record_route=lambda *_: [],
        is_undecided=lambda *_: False,
    )
    run(leaving.withdraw_routes([leader_of(kept_end=kept_end, listed_end=listed_end)]))
    assert waited_for == asked
    assert etcd.routes == [withdrawn_route(end)]

"""Changes of journals, compared with what exists; over a scripted transport."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from gazette_sdk.errors import EtcdTransactionFailedError
from gazette_sdk.journals.changes import SELECTED_NAMES_MAX, apply_changes, list_named
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.fragment_store import FragmentStoreTransport
from support.brokers import journal_spec
from support.etcd import run


class Listed(FragmentStoreTransport):
    """A transport whose listings are given, and which keeps its requests."""

    def __init__(self, *journals: pb.ListResponse.Journal, status: int = pb.OK) -> None:
        super().__init__("memory://listed/")
        self.journals, self.status = list(journals), status
        self.selectors: list[pb.LabelSelector] = []
        self.applied: list[list[str]] = []

    async def list(self, request: pb.ListRequest) -> AsyncGenerator[pb.ListResponse]:
        self.selectors.append(request.selector)
        yield pb.ListResponse(journals=self.journals)

    async def apply(self, request: pb.ApplyRequest) -> pb.ApplyResponse:
        if self.status != pb.OK:
            self.journals[0].mod_revision += 1  # another process was faster
        self.applied.append([change.delete or change.upsert.name for change in request.changes])
        return pb.ApplyResponse(status=self.status)


def listed(name, revision=7, level=None, **changes):
    journal = pb.ListResponse.Journal(spec=journal_spec(name, **changes), mod_revision=revision)
    if level is not None:
        journal.spec.suspend.level = level
        journal.spec.suspend.offset = 100
    return journal


def upsert(name, expect=0, **changes):
    return pb.ApplyRequest.Change(upsert=journal_spec(name, **changes), expect_mod_revision=expect)


def outcomes(transport, *changes, size=128):
    async def collect() -> list[tuple[str, str]]:
        return [
            (each.name, each.outcome)
            async for applied in apply_changes(transport, changes, size)
            for each in applied
        ]

    return run(collect())


def test_a_journal_that_brokers_suspended_is_unchanged():
    transport = Listed(listed("a/suspended", level=pb.JournalSpec.Suspend.FULL))
    assert outcomes(transport, upsert("a/suspended")) == [("a/suspended", "unchanged")]
    assert transport.applied == []


def test_a_given_suspension_is_compared():
    transport = Listed(listed("a/suspended", level=pb.JournalSpec.Suspend.FULL))
    change = upsert("a/suspended", expect=-1)
    change.upsert.suspend.SetInParent()
    assert outcomes(transport, change) == [("a/suspended", "updated")]


def test_unchanged_journals_are_in_no_transaction():
    transport = Listed(*(listed(f"a/{number}") for number in range(3)))
    changes = [upsert(f"a/{number}") for number in range(6)]
    found = outcomes(transport, *changes, size=2)
    assert [outcome for _, outcome in found] == ["unchanged"] * 3 + ["created"] * 3
    assert transport.applied == [["a/3", "a/4"], ["a/5"]]


def test_a_conflict_is_found_before_anything_is_applied():
    transport = Listed(listed("b/last"))
    with pytest.raises(EtcdTransactionFailedError, match=r"b/last: .*revision 3 .* revision 7"):
        outcomes(transport, upsert("a/new"), upsert("b/last", 3, replication=2), size=1)
    assert transport.applied == []


def test_a_conflict_after_the_listing_is_named_too():
    transport = Listed(listed("a/raced"), status=pb.ETCD_TRANSACTION_FAILED)
    with pytest.raises(EtcdTransactionFailedError, match=r"a/raced: .*revision 7 .* revision 8"):
        outcomes(transport, upsert("a/raced", 7, replication=2))


def test_many_names_are_listed_by_their_directory():
    names = [f"a/b/part-{number}" for number in range(SELECTED_NAMES_MAX + 1)]
    transport = Listed(listed(names[0]), listed("a/b/other"))
    assert list(run(list_named(transport, names))) == names[:1]
    (selector,) = transport.selectors
    assert [(label.name, label.value) for label in selector.include.labels] == [("prefix", "a/b/")]
    assert list(run(list_named(transport, [*names, "z/z"]))) == names[:1]
    assert not transport.selectors[-1].include.labels
    assert run(list_named(transport, [])) == {}

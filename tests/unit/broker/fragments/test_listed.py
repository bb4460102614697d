"""Journals whose stores list all of their content."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from gazette_sdk.broker.fragments import refresh as listed
from gazette_sdk.broker.fragments.refresh import listed_journals
from gazette_sdk.errors import StoreError
from gazette_sdk.fragment.listing import StoredFragment
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb

JOURNAL = "a/journal"
ENTRY = SimpleNamespace(value=pb.JournalSpec(name=JOURNAL))


def found(monkeypatch, *listings, end=20, journal_of=lambda _: ENTRY):
    """What is found by these listings; the last one is repeated."""
    monkeypatch.setattr(listed, "PAUSE_S", 0.001)
    rest = list(listings)

    async def list_stores(journal, urls, stores):
        listing = rest.pop(0) if len(rest) > 1 else rest[0]
        if isinstance(listing, Exception):
            raise listing
        fragments = (pb.Fragment(journal=journal, begin=begin, end=end) for begin, end in listing)
        return [StoredFragment(fragment, -1) for fragment in fragments]

    monkeypatch.setattr(listed, "list_stores", list_stores)
    return asyncio.run(listed_journals({JOURNAL: end}, StoreRegistry(None), journal_of, 0.2))


@pytest.mark.parametrize(
    "listings",
    [
        [[(0, 10), (10, 20)]],
        [[(0, 10), (10, 30)]],
        [[], [(0, 10)], [(0, 10), (10, 20)]],
        [StoreError("it fails now"), OSError("and again"), [(0, 20)]],
    ],
)
def test_a_journal_is_listed_once_a_listing_reaches_its_end(listings, monkeypatch):
    assert found(monkeypatch, *listings) == {JOURNAL}


@pytest.mark.parametrize("listing", [[], [(0, 10)], StoreError("it fails")])
def test_a_journal_is_not_listed_while_its_last_fragment_is_missing(listing, monkeypatch):
    assert found(monkeypatch, listing) == set()


def test_a_deleted_journal_is_not_waited_for(monkeypatch):
    assert found(monkeypatch, [], journal_of=lambda _: None) == set()


def test_other_journals_are_not_held_up(monkeypatch):
    async def list_stores(journal, urls, stores):
        if journal == "late":
            await asyncio.sleep(60)
        return [StoredFragment(pb.Fragment(journal=journal, end=10), 10)]

    monkeypatch.setattr(listed, "list_stores", list_stores)
    ends = {"late": 10, JOURNAL: 10}
    assert asyncio.run(listed_journals(ends, StoreRegistry(None), lambda _: ENTRY, 0.05)) == {
        JOURNAL
    }

"""Waiting journals that a broker may take over, by the content of its spool directory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gazette_sdk.broker.recovery.peers import WaitingJournals
from gazette_sdk.broker.spool.directory import SpoolDirectory
from gazette_sdk.broker.spool.files import Head
from support.brokers import Mirror, journal_spec

JOURNAL = "a/journal"


@pytest.mark.parametrize(
    ("head", "membership", "is_quarantined", "has_all"),
    [
        ("known", "is", False, True),
        ("known", "was", False, True),
        # It joined, and the route with it was never written: others continued without it.
        ("known", "", False, False),
        ("none", "was", False, True),  # a journal without content
        ("none", "was", True, False),
        ("none", "is", False, False),  # another directory
        ("forgotten", "was", False, False),
        ("unverified", "was", False, False),
        ("of a deleted journal", "was", False, True),
    ],
)
def test_all_acknowledged_bytes_are_here(tmp_path, head, membership, is_quarantined, has_all):
    mirror = Mirror()
    mirror.put(dict([mirror.item(journal_spec(JOURNAL))]))
    keyspace = mirror.keyspace
    item = keyspace.item(JOURNAL)
    revision = item.create_revision - (head == "of a deleted journal")
    with SpoolDirectory(tmp_path) as directory:
        if head != "none":
            directory.note_head(Head(JOURNAL, 7, b"", revision, keyspace.header.cluster_id))
        if head == "forgotten":
            directory.forget_head(JOURNAL)
    with SpoolDirectory(tmp_path) as directory:
        directory.recover(keyspace.header.cluster_id)
        if head == "unverified":
            directory.journal(
                JOURNAL, create_revision=revision, cluster_id=keyspace.header.cluster_id
            ).doubt_head()
        history = SimpleNamespace(
            is_or_was_member=lambda _: bool(membership), was_member=lambda _: membership == "was"
        )
        waiting = WaitingJournals(
            None,
            keyspace,
            local_id=None,
            lease=0,
            directory=directory,
            last_routes=None,
            history=history,
            records=None,
            max_replication=3,
            is_quarantined=lambda *_: is_quarantined,
        )
        assert waiting.has_all_of(JOURNAL) == has_all


def test_a_head_that_is_known_again_was_not_lost(tmp_path):
    with SpoolDirectory(tmp_path) as directory:
        directory.note_head(Head(JOURNAL, 7, b"", 5, 77))
        directory.forget_head(JOURNAL)
        assert directory.has_former_head(JOURNAL, 5)
        directory.note_head(Head(JOURNAL, 9, b"", 5, 77))
        assert not directory.has_former_head(JOURNAL, 5)
    with SpoolDirectory(tmp_path) as directory:
        directory.recover(77)
        assert directory.head(JOURNAL, create_revision=5, cluster_id=77).end == 9
        assert not directory.has_former_head(JOURNAL, 5)

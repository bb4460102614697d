from __future__ import annotations

import pytest

from gazette_sdk.cli.backup.archive import SavedJournal, SavedShard
from gazette_sdk.cli.backup.capture import Stored, hints_problem, stored_of
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol import recoverylog_pb2 as rpb
from gazette_sdk.shard.recovery import hints as fsm_hints

LOG = "logs/shard-1"
KEY = "/hints/shard-1.primary"


def fragments(*spans):
    return [pb.Fragment(journal="a", begin=begin, end=end) for begin, end in spans]


@pytest.mark.parametrize(
    ("spans", "end", "expected"),
    [
        ([], 0, Stored(journal="a")),
        ([(0, 5), (5, 9)], 9, Stored(journal="a", end=9, bytes=9)),
        ([(3, 5), (4, 9)], 9, Stored(journal="a", begin=3, end=9, bytes=6)),
        ([(0, 5), (7, 9)], 9, Stored(journal="a", end=9, bytes=7, gaps=((5, 7),))),
        # The last fragment is torn: it has no content, and its offsets were given.
        ([(0, 5)], 9, Stored(journal="a", end=9, bytes=5, gaps=((5, 9),))),
    ],
)
def test_content_of_a_journal_is_found_with_its_gaps(spans, end, expected):
    assert stored_of("a", fragments(*spans), end) == expected


def test_what_lies_before_the_saved_head_and_is_not_stored_is_missing():
    def missing(head, begin=None, **stored):
        journal = SavedJournal(name="a", spec_bytes=b"", head=head, begin=begin)
        return list(Stored(journal="a", **stored).missing(journal))

    assert missing(9, end=9) == []
    assert missing(None, end=9) == []
    assert missing(12, end=9) == [(9, 12)]
    assert missing(9, end=9, gaps=[(3, 4)]) == [(3, 4)]
    assert missing(9, begin=4, end=9, gaps=[(3, 4)]) == []
    assert missing(12, begin=11) == [(11, 12)]


def a_shard(**hints):
    spec = cpb.ShardSpec(
        id="shard-1", recovery_log_prefix="logs", hint_prefix="/hints", hint_backups=2
    )
    return SavedShard(
        application="/app", id="shard-1", spec_bytes=spec.SerializeToString(), hints=hints
    )


def hints_from(*offsets):
    segments = [rpb.Segment(author=1, first_seq_no=1, first_offset=each) for each in offsets]
    node = rpb.FnodeSegments(fnode=1, segments=segments)
    return fsm_hints.to_json(rpb.FSMHints(log=LOG, live_nodes=[node]))


def test_hints_that_need_what_was_pruned_are_found():
    assert not hints_problem(a_shard(**{KEY: hints_from(100, 200)}), Stored(journal=LOG, begin=100))
    text = hints_problem(a_shard(**{KEY: hints_from(100, 200)}), Stored(journal=LOG, begin=101))
    assert text == "its hints need logs/shard-1 from 100 on, and it begins at 101"
    backup = {"/hints/shard-1.backup.0": hints_from(50)}
    assert "from 50 on" in hints_problem(a_shard(**backup), Stored(journal=LOG, begin=60))
    newest = backup | {KEY: hints_from(70)}
    assert not hints_problem(a_shard(**newest), Stored(journal=LOG, begin=60))


def test_a_shard_without_hints_needs_its_whole_log():
    assert not hints_problem(a_shard(), Stored(journal=LOG))
    assert "it has no hints" in hints_problem(a_shard(), Stored(journal=LOG, begin=1))
    assert not hints_problem(a_shard(), None)


def test_hints_that_cannot_be_read_are_named():
    text = hints_problem(a_shard(**{KEY: b"{nonsense"}), Stored(journal=LOG, begin=1))
    assert text.startswith(KEY)

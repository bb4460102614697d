"""What a sequencer tells of its work: its metrics, and the warnings in its log."""

from __future__ import annotations

import logging

from prometheus_client import REGISTRY

from gazette_sdk.message import sequencer as sequencer_module
from gazette_sdk.message.sequencer import Outcome, RareLog, Sequencer
from support.sequencing import (
    UNKNOWN,
    A,
    C,
    J,
    O,
    P,
    at,
    feed,
    history,
    items,
    run_of,
)


def _queued(journal: str, flag: str, outcome: str) -> float:
    labels = {"journal": journal, "flag": flag, "outcome": outcome}
    return REGISTRY.get_sample_value("gazette_sequencer_queued_total", labels) or 0.0


def test_metrics_count_messages_by_flags_and_outcome():
    journal = "metrics/of/sequencer"
    stamps = [(1, C), (2, C), (3, A), (4, O), (5, 0x5), (0, A, 0), (5, 0x5)]
    messages = [
        at(index, *stamp, *([P] if len(stamp) == 2 else []), journal=journal + ";a/reader")
        for index, stamp in enumerate(stamps)
    ]
    sequencer: Sequencer[str] = Sequencer(1)
    list(feed(sequencer, {messages[0].journal: messages}, messages))
    sequencer.flush_metrics()
    sequencer.flush_metrics()
    assert _queued(journal, "CONTINUE_TXN", "continueBeginSpan") == 1
    assert _queued(journal, "CONTINUE_TXN", "continueExtendSpan") == 1
    assert _queued(journal, "ACK_TXN", "ackCommitReplay") == 1
    assert _queued(journal, "OUTSIDE_TXN", "outsideCommit") == 2
    assert _queued(journal, "Flags(5)", "outsideCommit") == 1
    assert _queued(journal, "Flags(5)", "outsideAlreadyAcked") == 1
    replayed = REGISTRY.get_sample_value("gazette_sequencer_replay_total", {"journal": journal})
    assert replayed == 2


def test_metrics_are_told_now_and_then_without_being_asked():
    journal = "metrics/of/many"
    sequencer: Sequencer[str] = Sequencer()
    messages = [at(index, index + 1, O, journal=journal) for index in range(5000)]
    list(feed(sequencer, {}, messages))
    assert 4000 <= _queued(journal, "OUTSIDE_TXN", "outsideCommit") <= 5000


def test_metrics_are_told_of_plain_runs():
    journal = "metrics/of/runs"
    run = run_of([at(index, index + 1, O, journal=journal) for index in range(5000)])
    sequencer: Sequencer[str] = Sequencer()
    sequencer.commit_run(run, 0, 4095)
    assert _queued(journal, "OUTSIDE_TXN", "outsideCommit") == 0
    sequencer.commit_run(run, 4095, 5000)
    assert _queued(journal, "OUTSIDE_TXN", "outsideCommit") == 5000


def test_unknown_flags_have_a_bounded_number_of_labels(monkeypatch):
    monkeypatch.setattr(sequencer_module, "_unknown_flags", set())
    journal = "metrics/of/unknown"
    sequencer: Sequencer[str] = Sequencer()
    messages = [at(index, index + 1, index + 3, journal=journal) for index in range(100)]
    list(feed(sequencer, {}, messages))
    sequencer.flush_metrics()
    assert _queued(journal, "Flags(3)", "outsideCommit") == 1
    assert _queued(journal, "Flags(other)", "outsideCommit") == 84


def test_a_sequence_that_is_discarded_is_told(caplog):
    sequencer: Sequencer[str] = Sequencer()
    list(feed(sequencer, {}, history((10, C), (20, O), (30, O))))
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert f"{J}: producer 010000000001 mixes messages" in caplog.text


def test_a_message_outside_of_transactions_that_is_read_again_discards_nothing(caplog):
    sequencer: Sequencer[str] = Sequencer()
    sequencer.queue(at(1, 10, O))
    sequencer.step()
    restored: Sequencer[str] = Sequencer(checkpoint=sequencer.checkpoint())
    assert items(feed(restored, {}, [at(1, 10, O)])) == ["1"]
    assert not caplog.records


def test_an_older_acknowledgement_is_told_but_not_a_repeated_one(caplog):
    sequencer: Sequencer[str] = Sequencer()
    list(feed(sequencer, {}, history((10, A), (10, A))))
    assert not caplog.records
    list(feed(sequencer, {}, [at(3, 5, A)]))
    assert "gone back to an earlier checkpoint" in caplog.text


def test_a_roll_back_of_a_sequence_in_which_reading_began_is_not_reported(caplog):
    sequencer: Sequencer[str] = Sequencer()
    list(feed(sequencer, {}, [at(1, 10, C), at(2, 12, C), at(3, 5, A)]))
    assert not caplog.records
    assert items(feed(sequencer, {}, [at(4, 20, O)])) == ["4"]
    list(feed(sequencer, {}, [at(5, 5, A)]))
    assert "gone back to an earlier checkpoint" in caplog.text


def test_warnings_are_rare(caplog):
    sequencer: Sequencer[str] = Sequencer()
    messages = [at(index, index + 1, UNKNOWN) for index in range(1000)]
    list(feed(sequencer, {}, messages))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_rare_log_says_how_many_lines_it_stands_for(caplog, monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(sequencer_module.time, "monotonic", lambda: now_s)
    log = RareLog(logging.getLogger("rare"), interval_s=10)
    for _ in range(4):
        log(logging.ERROR, "met %s", "a")
    log(logging.ERROR, "saw %s", "b")
    now_s = 10.0
    log(logging.ERROR, "met %s", "c")
    assert caplog.messages == ["met a", "saw b", "met c (and 3 more like this)"]


def test_outcomes_read_as_their_labels():
    assert Outcome.ACK_COMMIT_RING == "ackCommitRing"
    assert f"{Outcome.OUTSIDE_COMMIT}" == "outsideCommit"

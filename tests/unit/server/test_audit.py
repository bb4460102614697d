import logging

import pytest

from gazette_sdk.server.authorization import RECORDS_PER_SECOND_MAX, REPEAT_S, AuditEvent, AuditLog


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def records(caplog):
    caplog.set_level(logging.INFO, "gazette.audit")
    found = []
    handler = logging.Handler()
    handler.emit = found.append
    logger = logging.getLogger("gazette.audit")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


REFUSED = AuditEvent("Append", "token lacks APPEND", "192.0.2.1", subject="ada", is_refusal=True)


def test_a_record_has_the_fields_of_the_event_that_are_known(clock, records):
    AuditLog(now=clock).record(REFUSED)
    (record,) = records
    assert (record.name, record.levelname) == ("gazette.audit", "WARNING")
    assert record.getMessage() == "Append refused"
    assert (record.outcome, record.peer, record.subject) == (
        "token lacks APPEND",
        "192.0.2.1",
        "ada",
    )
    assert not hasattr(record, "journal")


def test_equal_events_of_a_minute_are_one_record_and_a_count(clock, records):
    log = AuditLog(now=clock)
    for _ in range(1000):
        log.record(REFUSED)
    assert len(records) == 1
    clock.now += REPEAT_S
    log.record(REFUSED._replace(peer="192.0.2.2"))
    assert [getattr(record, "repeated", 0) for record in records] == [0, 999, 0]
    assert [record.peer for record in records] == ["192.0.2.1", "192.0.2.1", "192.0.2.2"]


def test_different_events_are_bounded_in_a_second_and_counted(clock, records):
    log = AuditLog(now=clock)
    for number in range(RECORDS_PER_SECOND_MAX + 70):
        log.record(REFUSED._replace(journal=f"a/{number}"))
    assert len(records) == RECORDS_PER_SECOND_MAX
    clock.now += 1
    log.record(REFUSED._replace(journal="later"))
    assert records[-2].getMessage() == "70 events were left out: there were too many"
    assert records[-1].journal == "later"
    assert len(log._repeated) <= RECORDS_PER_SECOND_MAX * (REPEAT_S + 1)


def test_the_end_logs_what_was_counted(clock, records):
    log = AuditLog(now=clock)
    write = AuditEvent("Append", "OK", "192.0.2.1", "a/journal")
    log.record(write)
    log.record(write)
    log.close()
    assert [(record.levelname, getattr(record, "repeated", 0)) for record in records] == [
        ("INFO", 0),
        ("INFO", 1),
    ]


def test_long_texts_are_cut(clock, records):
    AuditLog(now=clock).record(REFUSED._replace(journal="x" * 100_000))
    assert len(records[0].journal) < 1000

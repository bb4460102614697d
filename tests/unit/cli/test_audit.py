"""Queue of the audit journal: bounded, and no record of its own appends."""

from __future__ import annotations

import json
import logging

from gazette_sdk.broker.metrics import AUDIT_DROPPED, AUDIT_FAILING_SECONDS
from gazette_sdk.cli.audit import AuditJournal
from gazette_sdk.server.authorization import RECORDS_PER_SECOND_MAX, AuditEvent, AuditLog
from support.etcd import run

REFUSED = AuditEvent("List", "token lacks LIST", "192.0.2.1", subject="ada", is_refusal=True)
OWN = AuditEvent("Append", "OK", "192.0.2.2", "ops/audit")


def journal(**options):
    return AuditJournal("ops/audit", "/test/b-1", now=lambda: 1_700_000_000.5, **options)


def test_the_queue_is_bounded_and_what_it_does_not_take_is_counted(caplog):
    audit, before = journal(records_max=3), AUDIT_DROPPED.value
    for number in range(5):
        audit.put(REFUSED._replace(peer=f"192.0.2.{number}"), 0)
    assert (audit.dropped, AUDIT_DROPPED.value - before) == (2, 2)
    [check] = run(audit.checks(None))
    assert "3 records wait; 2 records are in the log only" in check.detail
    with caplog.at_level(logging.WARNING):
        run(audit.aclose())
    assert AUDIT_DROPPED.value - before == 5, "none was written"
    assert "3 audit records are in the log, and may not be in the journal ops/audit" in caplog.text
    audit.put(REFUSED, 0)
    assert AUDIT_DROPPED.value - before == 6


def test_records_that_an_unexpected_error_leaves_are_late_in_the_metrics(caplog):
    class Broken:
        async def aclose(self):
            """Do nothing."""

    async def scenario():
        audit = journal()
        audit.begin(Broken())
        audit.put(REFUSED, 0)
        await audit._task
        [metric] = AUDIT_FAILING_SECONDS.collect()
        await audit.aclose()
        return metric.samples[0].value

    assert run(scenario()) > 0
    assert "audit records are in the log only, and not in ops/audit" in caplog.text


def test_an_append_to_the_journal_is_no_record_and_a_refused_one_is():
    audit = journal()
    audit.put(OWN, 0)
    audit.put(OWN._replace(outcome="FRAGMENT_STORE_UNHEALTHY"), 0)
    assert not audit._waiting
    audit.put(OWN._replace(is_refusal=True), 0)
    audit.put(OWN._replace(journal="ops/audits"), 0)
    audit.put(OWN._replace(method="Apply"), 0)
    assert [each["data"]["method"] for each in audit._waiting] == ["Append", "Append", "Apply"]


def test_an_audit_log_puts_its_records_into_the_journal_as_cloud_events():
    audit, log = journal(), AuditLog(now=lambda: 1000.0)
    log.put = audit.put
    log.record(REFUSED)
    log.record(REFUSED)
    log.record(AuditEvent("Apply", "OK", "192.0.2.1", "a/b", "ada", "7"))
    for number in range(RECORDS_PER_SECOND_MAX):
        log.record(AuditEvent("Append", "OK", "192.0.2.1", f"a/{number}"))
    log.close()
    refused, applied, *_, repeated, left_out = audit._waiting
    assert refused == {
        "specversion": "1.0",
        "id": "1700000000500000-1",
        "source": "/test/b-1",
        "type": "dev.gazette.audit.refused",
        "time": "2023-11-14T22:13:20.500000Z",
        "datacontenttype": "application/json",
        "data": {
            "method": "List",
            "outcome": "token lacks LIST",
            "peer": "192.0.2.1",
            "subject": "ada",
        },
    }
    assert (applied["type"], applied["subject"]) == ("dev.gazette.audit.answered", "a/b")
    assert applied["data"]["token_id"] == "7"
    assert repeated["data"]["repeated"] == 1
    assert (left_out["type"], left_out["data"]) == ("dev.gazette.audit.left-out", {"left_out": 2})


def test_names_that_no_text_of_json_can_hold_are_escaped():
    audit = journal()
    audit.put(REFUSED._replace(journal="a/\udc80", outcome="x" * 1000), 0)
    [event] = audit._waiting
    assert json.loads(json.dumps(event, ensure_ascii=False).encode())["subject"] == "a/\\udc80"
    assert len(event["data"]["outcome"]) == 256

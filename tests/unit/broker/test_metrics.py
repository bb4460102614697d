from __future__ import annotations

import pytest
from prometheus_client import REGISTRY, generate_latest

from gazette_sdk.broker import metrics


def test_names_are_exactly_those_that_dashboards_know():
    metrics.SERVER_STARTED.inc("Append")
    metrics.SERVER_COMPLETED.inc("Append", "WRONG_ROUTE")
    metrics.WRITE_HEAD.cell("a/journal").value = 12
    text = generate_latest(REGISTRY).decode()
    for sample in [
        'gazette_journal_server_started_totals{operation="Append"}',
        'gazette_journal_server_completed_totals{operation="Append",status="WRONG_ROUTE"}',
        'gazette_write_head{journal="a/journal"} 12.0',
        "gazette_spool_commits_total ",
        "gazette_spool_commit_bytes_total ",
        "gazette_spool_rollbacks_total ",
        "gazette_spool_rollback_bytes_total ",
        "gazette_spool_completed_total ",
        "gazette_spool_persisted_total ",
    ]:
        assert f"\n{sample}" in text
    assert "totals_total" not in text


@pytest.fixture
def journals_hidden():
    metrics.show_journals(each=False)
    yield
    metrics.show_journals(each=True)


def test_series_of_each_journal_are_left_out_if_wanted(journals_hidden):
    metrics.WRITE_HEAD.cell("a/hidden").value = 12
    metrics.TOPIC_APPEND_BYTES.inc("hidden-topic", by=3)
    text = generate_latest(REGISTRY).decode()
    assert "a/hidden" not in text
    assert '\ngazette_topic_append_bytes_total{topic="hidden-topic"} 3.0' in text

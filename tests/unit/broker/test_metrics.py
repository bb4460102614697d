from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from gazette_sdk.broker import metrics
from gazette_sdk.broker.metrics import PlainMetric, Tally


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


def test_a_plain_counter_counts():
    registry = CollectorRegistry()
    counter = PlainMetric("things_totals", "Things.", ("kind",), registry)
    counter.inc("a")
    counter.inc("a", by=2)
    assert (counter.value("a"), counter.value("b")) == (3, 0)
    assert registry.get_sample_value("things_totals", {"kind": "a"}) == 3


def test_a_cell_is_the_number_of_its_labels():
    registry = CollectorRegistry()
    counter = PlainMetric("things_totals", "Things.", ("kind",), registry)
    cell = counter.cell("a")
    cell.value += 2
    counter.inc("a")
    assert counter.cell("a") is cell
    assert registry.get_sample_value("things_totals", {"kind": "a"}) == 3


def test_a_gauge_is_exposed_until_it_is_removed():
    registry = CollectorRegistry()
    gauge = PlainMetric("head", "Head.", ("journal",), registry, kind="gauge")
    gauge.cell("a").value = 7
    assert b"# TYPE head gauge" in generate_latest(registry)
    assert registry.get_sample_value("head", {"journal": "a"}) == 7
    gauge.remove("a")
    gauge.remove("a")
    assert registry.get_sample_value("head", {"journal": "a"}) is None


def test_a_tally_is_exposed_as_a_counter():
    registry = CollectorRegistry()
    tally = Tally("things", "Things.", registry)
    tally.value += 5
    assert registry.get_sample_value("things_total") == 5
    assert b"# TYPE things_total counter" in generate_latest(registry)

"""Each alert fires when it has to and ends afterwards, as Prometheus' own tool evaluates it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from gazette_sdk.cli.monitoring import written_files
from support.monitoring import alerts, checked_by_promtool, recorded

BROKER = '{cluster="prod",zone="a",job="gazette",instance="broker-1:8080"}'
AT_BROKER = {"cluster": "prod", "zone": "a", "job": "gazette", "instance": "broker-1:8080"}
SUMMED = {"cluster": "prod", "instance": "broker-1:8080"}


class Case(NamedTuple):
    """Series of values, and what an alert is then.

    Attributes:
        alert: its name.
        series: values each minute, by series.
        minute: when it is looked at.
        fires: labels of the alerts that fire; one empty dict for an alert without labels, nothing
            if none fires.
    """

    alert: str
    series: dict[str, str]
    minute: int
    fires: tuple[dict[str, str], ...] = ()


def named(name: str, **labels: str) -> str:
    """A series of broker-1."""
    more = "".join(f',{label}="{value}"' for label, value in labels.items())
    return f"{name}{BROKER[:-1]}{more}}}"


def up(values: str, component: str = "broker", build: str = "1x20 _x100") -> dict[str, str]:
    """A process that is scraped, or not."""
    return {
        named("up"): values,
        named("gazette_build_info", component=component, version="1.0"): build,
    }


def builds(first: str, second: str) -> dict[str, str]:
    """Two processes with versions, for as long as values say."""
    return {
        'gazette_build_info{cluster="prod",instance="a",version="1.0"}': first,
        'gazette_build_info{cluster="prod",instance="b",version="1.1"}': second,
    }


def cumulated(name: str, seconds: float, per_minute: int, **labels: str) -> dict[str, str]:
    """A histogram of values of so many seconds."""
    return {
        named(f"{name}_bucket", le=le, **labels): f"0+{per_minute if bound >= seconds else 0}x60"
        for le, bound in (("0.1", 0.1), ("0.5", 0.5), ("1", 1), ("2.5", 2.5), ("+Inf", 1e9))
    }


def appends(
    errors: int, status: str = "FRAGMENT_STORE_UNHEALTHY", later: str = ""
) -> dict[str, str]:
    """A thousand appends a minute, and some that end otherwise."""
    name = "gazette_journal_server_completed_totals"
    return {
        named(name, operation="Append", status="ok"): "0+1000x1000",
        named(name, operation="Append", status=status): later or f"0+{errors}x1000",
        named(name, operation="Read", status="<error>"): "0+1000x1000",
    }


def spool(oldest: str, completed: str, persisted: str) -> dict[str, str]:
    """Spools of a broker."""
    return {
        named("gazette_spool_oldest_seconds"): oldest,
        named("gazette_spool_completed_total"): completed,
        named("gazette_spool_persisted_total"): persisted,
    }


SHARD = "/gazette/consumers/totals/items/totals/part-000"
LAG = named("gazette_shard_read_lag_seconds", shard=SHARD)
OF_SHARD = {"cluster": "prod", "shard": SHARD}
STORE = named("gazette_store_healthy", store="s3://bucket/")
UP = named("gazette_shard_up", shard="totals/part-000", status="FAILED")
MIXED = {"cluster": "prod"}
DOWN = AT_BROKER

CASES = (
    Case("GazetteBrokerDown", up("1x20 0x100"), 25, (DOWN,)),
    Case("GazetteBrokerDown", up("1x20 0x4 1x100"), 30),
    Case("GazetteBrokerDown", up("1x20 0x100", component="totals"), 25),
    Case("GazetteBrokerDown", up("1x20 _x100"), 25),  # it is gone from the list of targets
    Case("GazetteLeaseNearlyLost", {named("gazette_lease_remaining_seconds"): "18x10 3 18x20"}, 12,
         (AT_BROKER,)),
    Case("GazetteLeaseNearlyLost", {named("gazette_lease_remaining_seconds"): "18x10 3 18x20"}, 20),
    Case("GazetteLeaseNearlyLost", {named("gazette_lease_remaining_seconds"): "14x30"}, 20),
    Case("GazetteLeaseNearlyLost", {named("gazette_etcd_watch_age_seconds"): "0x10 20 80 0x20"}, 12,
         (AT_BROKER,)),
    Case("GazetteLeaseNearlyLost", {named("gazette_etcd_watch_age_seconds"): "0x10 5 0x20"}, 12),
    Case("GazetteLoopLag", cumulated("gazette_event_loop_lag_seconds", 0.9, 60), 20, (SUMMED,)),
    Case("GazetteLoopLag", cumulated("gazette_event_loop_lag_seconds", 0.05, 60), 20),
    Case("GazetteLoopLag", cumulated("gazette_event_loop_lag_seconds", 0.9, 60), 3),
    Case("GazetteVersionsMixed", builds("1x3000", "1x3000"), 1500, (MIXED,)),
    Case("GazetteVersionsMixed", builds("1x3000", "1x600 _x3000"), 1500),
    Case("GazetteVersionsMixed", builds("1x3000", "_x3000"), 1500),
    Case("GazetteReplicasMissing", {named("gazette_allocator_replicas_missing"): "2x30"}, 8,
         (MIXED,)),
    Case("GazetteReplicasMissing", {named("gazette_allocator_replicas_missing"): "2x9 0x30"}, 12),
    Case("GazetteReplicasMissing", {named("gazette_allocator_replicas_missing"): "2x3 0x30"}, 6),
    Case("GazetteJournalsWaiting", {named("gazette_journals_waiting"): "1x30"}, 4, (MIXED,)),
    Case("GazetteJournalsWaiting", {named("gazette_journals_waiting"): "1x9 0x30"}, 12),
    Case("GazetteJournalsWaiting", {named("gazette_journals_waiting"): "0x30"}, 12),
    Case("GazetteSingleZone", {named("gazette_allocator_journals_single_zone"): "5x60"}, 20,
         (MIXED,)),
    Case("GazetteSingleZone", {named("gazette_allocator_journals_single_zone"): "5x60"}, 10),
    Case("GazetteSingleZone", {named("gazette_allocator_journals_single_zone"): "5x30 0x30"}, 40),
    Case("GazetteStoreUnhealthy", {STORE: "0x60"}, 8, ({"cluster": "prod", "store": "s3://bucket/"},)),
    Case("GazetteStoreUnhealthy", {STORE: "0x10 1x60"}, 14),
    Case("GazetteStoreUnhealthy", {STORE: "1 0 0 1x60"}, 8),
    Case("GazetteUploadBacklog", spool("0+60x60", "5x60", "3x60"), 30, (AT_BROKER,)),
    Case("GazetteUploadBacklog", spool("0+60x60", "5x60", "3x20 4x40"), 30),
    Case("GazetteUploadBacklog", spool("0+60x60", "5x60", "5x60"), 30),
    Case("GazetteUploadBacklog", spool("0+60x10 0x50", "5x60", "3x60"), 30),
    Case("GazetteSpoolDiskFull", {named("gazette_spool_disk_free_bytes"): "10000-60x160"}, 90,
         (AT_BROKER,)),
    Case("GazetteSpoolDiskFull", {named("gazette_spool_disk_free_bytes"): "10000-1x160"}, 90),
    Case("GazetteSpoolDiskFull", {named("gazette_spool_disk_free_bytes"): "10000-60x90 10000x90"},
         175),
    Case("GazetteAppendErrors", appends(20), 20, (MIXED | {"status": "FRAGMENT_STORE_UNHEALTHY"},)),
    Case("GazetteAppendErrors", appends(5), 20),
    Case("GazetteAppendErrors", appends(500, "WRONG_APPEND_OFFSET"), 20),
    Case("GazetteAppendErrors", appends(0, later="0+50x10 500x60"), 20),
    Case("GazetteAppendSlow", cumulated("gazette_append_seconds", 2, 100, stage="total"), 30,
         (SUMMED,)),
    Case("GazetteAppendSlow", cumulated("gazette_append_seconds", 0.4, 100, stage="total"), 30),
    Case("GazetteAppendSlow", cumulated("gazette_append_seconds", 2, 100, stage="wait"), 30),
    Case("GazetteAppendSlow", cumulated("gazette_append_seconds", 2, 100, stage="total"), 8),
    Case("GazetteShardFailed", {UP: "_x5 1x30"}, 10,
         ({"cluster": "prod", "shard": "totals/part-000"},)),
    Case("GazetteShardFailed", {UP: "1x10 _x30"}, 20),
    Case("GazetteShardFailed", {UP.replace("FAILED", "PRIMARY"): "1x30"}, 20),
    Case("GazetteShardLagGrowing", {LAG: "0+30x60"}, 30, (OF_SHARD,)),
    Case("GazetteShardLagGrowing", {LAG: "300x60"}, 30),  # late, and not later
    Case("GazetteShardLagGrowing", {LAG: "0+1x60"}, 30),  # not late yet
    Case("GazetteShardLagGrowing", {LAG: "0+30x30 900-60x20"}, 45),
    Case("GazetteShardNoPrimary",
         {named("gazette_shards_without_primary", application="totals"): "1x9"}, 5,
         (MIXED | {"application": "totals"},)),
    Case("GazetteShardNoPrimary",
         {named("gazette_shards_without_primary", application="totals"): "1x9 0x9"}, 14),
    Case("GazetteShardNoPrimary",
         {named("gazette_shards_without_primary", application="totals"): "1 0x9"}, 5),
    Case("GazetteAuditJournalFailing", {named("gazette_audit_journal_failing_seconds"): "0+60x20"},
         7, (AT_BROKER,)),
    Case("GazetteAuditJournalFailing", {named("gazette_audit_journal_failing_seconds"): "0+60x20"},
         4),
    Case("GazetteAuditJournalFailing",
         {named("gazette_audit_journal_failing_seconds"): "0+60x9 0x20"}, 12),
    Case("GazetteAuditRecordsDropped",
         {named("gazette_audit_dropped_records_total"): "0x9 7x40"}, 12, (AT_BROKER,)),
    Case("GazetteAuditRecordsDropped",
         {named("gazette_audit_dropped_records_total"): "0x9 7x40"}, 30),
    Case("GazetteAuditRecordsDropped", {named("gazette_audit_dropped_records_total"): "7x40"}, 30),
    Case("GazetteAppendBudgetBurnsFast", appends(50), 70, (MIXED,)),
    Case("GazetteAppendBudgetBurnsFast", appends(5), 70),
    Case("GazetteAppendBudgetBurnsFast", appends(0, later="0+50x40 2000x60"), 70),
    Case("GazetteAppendBudgetBurnsSlowly", appends(10), 400, (MIXED,)),
    Case("GazetteAppendBudgetBurnsSlowly", appends(1), 400),
    Case("GazetteAppendBudgetBurnsSlowly", appends(0, later="0+10x350 3500x100"), 420),
)  # fmt: skip


def expected(alert: str, labels: dict[str, str]) -> dict[str, Any]:
    """An alert that fires, as promtool describes it."""
    rule = alerts()[alert]
    annotations = {
        name: re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels.get(found[1], ""), text)
        for name, text in rule["annotations"].items()
    }
    return {"exp_labels": labels | rule["labels"], "exp_annotations": annotations}


def test_each_alert_is_tested_while_it_fires_and_while_it_does_not():
    assert len([name for name in alerts() if "Budget" not in name]) == 17
    for name in alerts():
        outcomes = [bool(case.fires) for case in CASES if case.alert == name]
        assert len(outcomes) >= 2, name
        assert set(outcomes) == {True, False}, name


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("rules")
    for name, text in written_files().items():
        if name.endswith(".yml"):
            (made / name).write_text(text)
    return made


@pytest.mark.parametrize("alert", alerts())
def test_an_alert_fires_and_ends(directory: Path, alert: str):
    tests = [
        {
            "interval": "1m",
            "name": f"{alert} {number}",
            "input_series": [
                {"series": each, "values": values} for each, values in case.series.items()
            ],
            "alert_rule_test": [
                {
                    "eval_time": f"{case.minute}m",
                    "alertname": alert,
                    "exp_alerts": [expected(alert, labels) for labels in case.fires],
                }
            ],
        }
        for number, case in enumerate(case for case in CASES if case.alert == alert)
    ]
    described = {
        "rule_files": ["alerts.yml", "rules.yml", "slo.yml"],
        "evaluation_interval": "1m",
        "tests": tests,
    }
    (directory / f"{alert}.test.yml").write_text(yaml.safe_dump(described))
    checked_by_promtool(directory, "test", "rules", f"{alert}.test.yml")


OF_TOTALS = {"cluster": "prod", "application": "totals"}
IN_ZONE = OF_TOTALS | {"zone": "a"}

RECORDED = (
    (
        "topic:gazette_append_bytes:rate5m",
        {named("gazette_topic_append_bytes_total", topic="orders"): "0+600x20"},
        {"cluster": "prod", "zone": "a", "topic": "orders"},
        10,
    ),
    *(
        (
            f"application:gazette_{what}:rate5m",
            {named(f"gazette_shard_{what}_total", shard=SHARD): "0+120x20"},
            IN_ZONE,
            2,
        )
        for what in ("read_bytes", "read_messages", "transactions")
    ),
    (
        "application:gazette_read_lag_seconds:max",
        {LAG: "7x20", LAG.replace("part-000", "part-001"): "9x20"},
        OF_TOTALS,
        9,
    ),
    (
        "application:gazette_read_lag_bytes:sum",
        {
            named("gazette_shard_read_lag_bytes", shard=SHARD, journal=journal): "5x20"
            for journal in ("orders/part-000", "orders/part-001")
        },
        OF_TOTALS,
        10,
    ),
    (
        "application:gazette_shards:count",
        {
            UP: "1x20",
            UP.replace("part-000", "part-001"): "1x20",
            named("gazette_build_info", component="totals", version="1.0"): "1x20",
        },
        OF_TOTALS | {"status": "FAILED"},
        2,
    ),
    ("cluster:gazette_append_errors:ratio_rate5m", appends(1000), {"cluster": "prod"}, 0.5),
    ("cluster:gazette_append_errors:ratio_rate30m", appends(1000), {"cluster": "prod"}, 0.5),
    ("cluster:gazette_append_errors:ratio_rate1h", appends(0), {"cluster": "prod"}, 0),
    ("cluster:gazette_append_errors:ratio_rate6h", appends(0), {"cluster": "prod"}, 0),
)  # fmt: skip


def test_recorded_series_have_their_labels_and_values(directory: Path):
    assert [name for name, *_ in RECORDED] == list(dict.fromkeys(name for name, *_ in RECORDED))
    assert {name for name, *_ in RECORDED} == recorded()
    described = {
        "rule_files": ["rules.yml", "slo.yml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "name": name,
                "input_series": [
                    {"series": each, "values": values} for each, values in series.items()
                ],
                "promql_expr_test": [
                    {
                        "expr": name,
                        "eval_time": "15m",
                        "exp_samples": [{"labels": f"{name}{_written(labels)}", "value": value}],
                    }
                ],
            }
            for name, series, labels, value in RECORDED
        ],
    }
    (directory / "recorded.test.yml").write_text(yaml.safe_dump(described))
    checked_by_promtool(directory, "test", "rules", "recorded.test.yml")


def _written(labels: dict[str, str]) -> str:
    pairs = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"{{{pairs}}}"

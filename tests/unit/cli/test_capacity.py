"""``gazette capacity``: the sheet, its units, and the unit costs that the benchmarks measure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.cli.capacity import UNIT_COSTS, CapacitySettings, sheet
from gazette_sdk.server.options import parse_size

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def values(**plan):
    return {line.name: line.value for line in sheet(CapacitySettings(**plan))}


def test_the_sheet_is_a_table_with_the_reason_of_each_line(gazette):
    arguments = ["--rate", "50MB/s", "--journals", "400", "--replication", "3", "--codec", "zstd"]
    outcome = gazette("capacity", *arguments)
    assert (outcome.status, outcome.stderr) == (0, "")
    rows = {line.split("  ")[0]: line for line in outcome.text.splitlines()}
    assert rows["WHAT"].split() == ["WHAT", "ESTIMATE", "WHY"]
    assert "by replication, and one to spare" in rows["brokers"]
    assert " 150 MB/s " in rows["received"]
    assert " 621 GB " in rows["spool disk"]
    assert " 1.93 M/month " in rows["fragments"]
    assert " 32.4 TB/month " in rows["stored"]
    assert "processes" not in rows, "no shards are asked for"


def test_json_has_the_plan_the_sheet_and_the_unit_costs(gazette):
    outcome = gazette("capacity", "--rate=5MB/s", "--shards=64", "--state=1GB", "-o", "json")
    found = json.loads(outcome.text)
    assert found["plan"]["rate"] == 5e6
    assert found["unit_costs"]["idle_us"]["program"] == "idle.py"
    lines = {line["name"]: line for line in found["sheet"]}
    assert lines["recovery_log"]["value"] == 2.5e9
    assert lines["recovery"]["unit"] == "s"
    assert lines["shards_per_process"]["value"] * lines["processes"]["value"] == 64


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--rate", "fast"], "50MB/s"),
        (["--replication", "0"], "replication"),
        (["--codec", "lzma"], "codec"),
        (["--usage", "0"], "usage"),
    ],
)
def test_a_load_that_cannot_be_meant_is_refused(gazette, arguments, named):
    outcome = gazette("capacity", *arguments)
    assert outcome.status != 0
    assert named in outcome.stderr


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("200", 200),
        ("200B", 200),
        ("50MB/s", 50e6),
        ("1.5 GB", 1.5e9),
        ("64MiB", 2**26),
        ("64Mi", 2**26),
        ("10k", 10_000),
        ("2TiB", 2**41),
    ],
)
def test_sizes_have_the_usual_units(text, found):
    assert parse_size(text) == found


@pytest.mark.parametrize("text", ["", "MB", "5 parsecs", "-1", "1e5", "5MB/min"])
def test_other_texts_are_no_sizes(text):
    with pytest.raises(ValueError, match="write it as"):
        parse_size(text)


@given(
    rate=st.floats(0, 1e10),
    journals=st.integers(1, 10**6),
    replication=st.integers(1, 9),
    shards=st.integers(0, 1000),
    flush_s=st.sampled_from([0.0, 60.0, 86_400.0]),
)
def test_more_of_anything_never_needs_less(rate, journals, replication, shards, flush_s):
    plan = {
        "rate": rate,
        "journals": journals,
        "replication": replication,
        "shards": shards,
        "flush_s": flush_s,
    }
    before = values(**plan)
    more = values(**plan | {"rate": 2 * rate + 1, "journals": 2 * journals})
    assert all(value >= 0 for value in before.values())
    for name in ("brokers", "cores", "received", "spool_disk", "stored", "etcd_keys", "fragments"):
        assert more[name] >= before[name], name


def test_each_need_of_brokers_may_decide():
    few = {"rate": 1000, "journals": 1, "replication": 1}
    assert values(**few)["brokers"] == 1
    assert values(**few | {"replication": 3})["brokers"] == 4
    assert values(**few | {"journals": 10_240})["brokers"] == 10
    assert values(**few | {"rate": 1e9})["brokers"] >= 7, "by processor time"
    assert values(**few | {"rate": 1e6, "network": 1e5})["brokers"] == 25


def test_a_flush_interval_bounds_spools_and_adds_fragments():
    plan = {"rate": 1e6, "journals": 1000, "replication": 1, "outage_s": 0}
    assert values(**plan)["spool_disk"] == 1000 * 2**26
    flushed = values(**plan | {"flush_s": 600.0})
    assert flushed["spool_disk"] == pytest.approx(1e6 * 600)
    assert flushed["fragments"] == pytest.approx(1000 * 30 * 24 * 6)


def test_a_program_measures_each_unit_cost():
    for name, cost in UNIT_COSTS.items():
        assert (BENCHMARKS / cost.program).is_file(), name
        assert cost.value >= 0
        assert cost.what

import json
import subprocess
import sys
from pathlib import Path

import memory
import messages
import orjson
import pytest
from peers import contender, gazette

from gazette_sdk.embedded import EmbeddedCluster

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster"), sync_etcd=False) as running:
        yield running.address


def round_of(name, published, consumed, *, single_s=(0.001,)):
    return contender.Round(published, consumed, list(single_s), [0.002])


def test_ours_does_the_whole_round_in_every_way(address):
    ours = gazette.Gazette(address)
    found = contender.measure(ours, "tiny", messages=300, singles=20)
    ours.close()
    assert tuple(found.published_per_s) == gazette.PUBLISHERS
    assert tuple(found.consumed_per_s) == gazette.CONSUMERS
    assert all(
        rate > 0 for rate in [*found.published_per_s.values(), *found.consumed_per_s.values()]
    )
    assert len(found.single_s) == len(found.tail_s) == 20
    assert min(found.single_s + found.tail_s) > 0


def test_ours_counts_what_it_reads(address):
    ours = gazette.Gazette(address, gazette.CONSUMERS)
    ours.create("short")
    ours.publishers["publish()"]("short", 50)
    for consume in ours.consumers.values():
        with pytest.raises(AssertionError, match=r"50 .* instead of 51"):
            consume("short", 51)
    ours.close()


def test_rows_of_columns_are_the_messages():
    batch = gazette.columns(990, 1010)
    assert batch.schema == gazette.SCHEMA
    assert batch.to_pylist() == [contender.make(i) for i in range(990, 1010)]


def test_messages_are_of_the_size_that_is_told():
    assert 130 < len(orjson.dumps(contender.make(123456))) < 170


def test_a_rate_is_compared_with_the_best_way_of_the_best_other():
    systems = [
        messages.System(
            "Gazette", "memory", [round_of("a", {"publish()": 300}, {"Reader(dict)": 90})]
        ),
        messages.System("Redis", "file", [round_of("b", {"x": 100, "y": 200}, {"z": 100})]),
        messages.System("Kafka", "page", [round_of("c", {"x": 150}, {"z": 50})]),
    ]
    found = messages.summary(systems)
    published = found["rates"][0]
    assert (published["ratio"], published["bar"], published["holds"]) == (1.5, 1.2, True)
    consumed = next(row for row in found["rates"] if row["way"] == "Reader(dict)")
    assert (consumed["ratio"], consumed["holds"]) == (0.9, False)
    table = messages.markdown(found)
    assert "| published | Gazette: `publish()` | 1.50 | ≥ 1.2 | 300 |" in table
    assert "≥ 1.0: **not met**" in table
    assert "| Redis | file |" in table


def test_figures_are_medians_of_rounds_and_percentiles_of_all():
    rounds = [round_of("a", {"x": rate}, {"z": 1}, single_s=[rate / 1e6]) for rate in (10, 50, 30)]
    system = messages.System("Redis", "file", rounds)
    assert system.median("published") == {"x": 30}
    assert system.percentile_us("single", 50) == pytest.approx(30)
    assert system.percentile_us("single", 99) == pytest.approx(50)


def test_the_program_runs_a_cluster_and_prints_figures(tmp_path):
    out = tmp_path / "figures.json"
    command = [
        sys.executable,
        "messages.py",
        "--rounds",
        "0",
        "--messages",
        "200",
        "--singles",
        "0",
    ]
    command += ["--ways", "publish(),Reader(dict)", "--json", "--out", str(out)]
    done = subprocess.run(
        command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert [row["way"] for row in printed["rates"]] == ["publish()", "Reader(dict)"]
    kept = json.loads(out.read_text())
    assert kept["rates"] == printed["rates"]
    assert len(kept["rounds"]["Gazette"]) == 1


def test_the_program_names_ways_that_there_are_not():
    command = [sys.executable, "messages.py", "--ways", "shout()"]
    done = subprocess.run(
        command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "shout()" in done.stderr
    assert "Traceback" not in done.stderr


def test_peak_memory_is_this_process_own():
    assert 10 < memory.peak_mib() < 4096

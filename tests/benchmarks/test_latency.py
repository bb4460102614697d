import argparse
import json
import selectors
import subprocess
import sys
from pathlib import Path

import latency
import latency_profile
import pytest
import tailing_readers
from measure import Spent, cluster
from peers import contender

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_frames import Frame, Kind

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def program(*arguments):
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def system(name, *us, synced=False):
    """One whose latencies of a round are all the same."""
    rounds = [contender.Round({}, {}, [each / 1e6] * 9, [each / 1e6 * 3] * 9) for each in us]
    return latency.System(name, synced=synced, durability=f"{name} keeps it", rounds=rounds)


# ------------------------------------------------------------- side by side


def test_latencies_are_compared_with_the_best_other_that_does_not_sync_either():
    systems = [
        system("Gazette", 90, 60, 80),
        system("Redis", 100, 100, 70),
        system("Kafka", 700),
        system("Gazette", 1, synced=True),
        system("Redis", 2, synced=True),
    ]
    found = latency.figures(systems)
    assert [figure.name for figure in found] == [
        f"{kind} p{percent}, Redis = baseline"
        for kind in ("single", "tail")
        for percent in (50, 99)
    ]
    assert [round(figure.ours) for figure in found] == [80, 80, 240, 240]
    assert [round(figure.baseline) for figure in found] == [100, 100, 300, 300]
    assert [figure.verdict for figure in found] == [
        *["≤ 1 met by 20 %"] * 2,
        *["≤ 0.5 NOT MET by 60 %"] * 2,
    ]


def test_each_percentile_has_its_own_best():
    rounds = [contender.Round({}, {}, [1e-6] * 50 + [1e-3] * 50, [1e-6])]
    systems = [system("Gazette", 10), latency.System("Redis", rounds=rounds), system("Kafka", 20)]
    assert [figure.name.split(",")[1] for figure in latency.figures(systems)[:2]] == [
        " Kafka = baseline",
        " Kafka = baseline",
    ]
    rounds[0].single_s = [1e-6] * 90 + [1e-3] * 10
    assert [figure.name.split(",")[1] for figure in latency.figures(systems)[:2]] == [
        " Redis = baseline",
        " Kafka = baseline",
    ]


def test_a_system_alone_is_compared_with_nothing():
    assert latency.figures([system("Gazette", 10)]) == []
    assert latency.figures([system("Redis", 10)]) == []


def test_durability_stands_beside_each_figure():
    systems = [system("Gazette", 90), system("Redis", 100), system("Redis", 250, synced=True)]
    table = latency.markdown(latency.summary(systems))
    assert "| published one by one | Gazette | 90 µs | 90 µs | Gazette keeps it |" in table
    assert (
        "| read at the end, 1,000/s | Redis, synced | 750 µs | 750 µs | Redis keeps it |" in table
    )


def test_what_cannot_sync_is_not_asked_to():
    options = argparse.Namespace(peers=True, only="", synced=True)
    found = [(each.name, each.synced) for each in latency.systems_of(options)]
    assert ("NATS JetStream", False) in found
    assert ("NATS JetStream", True) not in found
    assert ("Gazette", True) in found
    with pytest.raises(SystemExit, match="unknown or not measured: Redix"):
        latency.systems_of(argparse.Namespace(peers=True, only="Redix", synced=True))


def test_the_program_measures_us_in_both_settings(tmp_path):
    out = tmp_path / "figures.json"
    found = program("latency.py", "--rounds", "0", "--singles", "30", "--json", "--out", str(out))
    assert [(row["what"], row["synced"]) for row in found["latencies"]] == [
        ("single", False),
        ("tail", False),
        ("single", True),
        ("tail", True),
    ]
    assert all(0 < row["p50_us"] <= row["p99_us"] for row in found["latencies"])
    assert found["bars"] == []
    assert "persisted" in found["latencies"][2]["durability"]
    kept = json.loads(out.read_text())
    assert len(kept["systems"][0]["rounds"][0]["single_s"]) == 30


# -------------------------------------------------------------------- wires


def test_the_program_compares_the_wires():
    found = program("stream_wire.py", "--rounds", "1", "--mib", "2", "--singles", "10", "--json")
    assert {row["name"]: row["bar"] for row in found if row["bar"]} == {
        "append, stream, gRPC = baseline": 1.5,
        "read, stream, gRPC = baseline": 3.0,
        "single p50, stream, gRPC = baseline": 1.0,
        "single p99, stream, gRPC = baseline": 1.0,
    }
    assert sum("raw socket" in row["name"] for row in found) == 4
    assert all(row["ours"] > 0 and row["baseline"] > 0 for row in found)


# -------------------------------------------------------------- the profile


def test_the_program_says_what_time_is_spent_on():
    found = program("latency_profile.py", "--rounds", "1", "--singles", "20", "--json")
    steps = {step["name"]: step for step in found["steps"]}
    assert (
        steps["echo of a blocking process"]["added"] == steps["echo of a blocking process"]["p50"]
    )
    assert "publish(…).result(), plain code" in steps
    assert sum(module["us"] for module in found["modules"]) == pytest.approx(
        steps["append of 200 bytes"]["there"], rel=0.01, abs=1
    )


def test_time_is_told_by_module_without_waits():
    spent = [
        Spent("<method 'poll' of 'select.epoll' objects>", "", 10, 99.0),
        Spent("Append.run", "/x/gazette_sdk/broker/append.py", 20, 2.0),
        Spent("_judge", "/x/gazette_sdk/broker/append.py", 10, 1.0),
        Spent("<method 'send' of '_socket.socket' objects>", "", 10, 1.0),
    ]
    assert latency_profile.modules_of(spent, 80.0, 10) == [
        latency_profile.Module("broker/append.py", 3.0, 60.0),
        latency_profile.Module("method 'send' of '_socket.socket' objects", 1.0, 20.0),
        latency_profile.Module("all others", 0.0, 0.0),
    ]


# ---------------------------------------------------------- tailing readers


class Received:
    """A connection that has received these pieces."""

    def __init__(self, *pieces):
        self._pieces = list(pieces)

    def receive(self):
        return [self._pieces.pop(0)]


def content(data):
    return Frame(Kind.CONTENT, data)


def test_a_follower_counts_messages_however_they_are_cut():
    lines = b"".join(tailing_readers.line(7, number) for number in range(3))
    first = pb.ReadResponse(content=lines[:250]).SerializeToString()
    stream = Received(Frame(Kind.MESSAGE, first), content(lines[250:399]), content(lines[399:]))
    follower = tailing_readers.Follower(stream, 7)
    counts = []
    for _ in range(3):
        follower.take()
        counts.append(follower.count)
    assert counts == [1, 1, 3]
    assert len(follower.delays_s) == 3


@pytest.mark.parametrize(("journal", "numbers"), [(7, (0, 0)), (7, (0, 2)), (7, (1,)), (8, (0,))])
def test_a_follower_refuses_what_does_not_come_next(journal, numbers):
    data = b"".join(tailing_readers.line(journal, number) for number in numbers)
    follower = tailing_readers.Follower(Received(content(data)), 7)
    with pytest.raises(tailing_readers.MissingMessageError, match="instead of message"):
        follower.take()


@pytest.mark.parametrize("journals", [1, 8])
def test_every_message_arrives_at_every_reader(journals, monkeypatch):
    monkeypatch.setattr(tailing_readers, "SETTLE_S", 0.1)
    monkeypatch.setattr(tailing_readers, "READER_PROCESSES", 2)
    with cluster(tailing_readers.specs(journals)) as running:
        cost = tailing_readers.measure(running, 8, journals, 1.0)
    assert cost.core_percent >= 0
    assert len(cost.delays_s) % 8 == 0
    assert min(cost.delays_s) > 0


def test_a_reader_that_gets_what_nobody_published_fails_the_program(monkeypatch):
    monkeypatch.setattr(tailing_readers, "SETTLE_S", 0.1)
    monkeypatch.setattr(tailing_readers, "READER_PROCESSES", 2)
    stop = tailing_readers.Appends.stop
    # All have the last message but one by now.
    monkeypatch.setattr(tailing_readers.Appends, "stop", lambda self: stop(self) - 2)
    with (
        cluster(tailing_readers.specs(1)) as running,
        pytest.raises(tailing_readers.MissingMessageError, match="got more than"),
    ):
        tailing_readers.measure(running, 4, 1, 0.5)


def test_a_message_that_does_not_come_is_not_waited_for_forever(monkeypatch):
    monkeypatch.setattr(tailing_readers, "ARRIVAL_TIMEOUT_S", 0.0)
    follower = tailing_readers.Follower(Received(), 7)
    with (
        selectors.DefaultSelector() as selector,
        pytest.raises(tailing_readers.MissingMessageError, match="1 readers got less than 3"),
    ):
        tailing_readers._gather(selector, [follower], 3)

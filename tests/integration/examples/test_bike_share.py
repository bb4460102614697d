"""The example that finds cycles of bikes, with SQLite and with PostgreSQL."""

from __future__ import annotations

import json
import urllib.request
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
import sqlalchemy as sa

from examples.bike_share.finder import BY_BIKE, CYCLES, TABLES, CycleFinder
from examples.bike_share.rides import Cycle, Ride, generated
from gazette_sdk import Publisher, Reader
from gazette_sdk.shard import EmbeddedConsumer
from gazette_sdk.testing import run_handler
from support.postgres import running_postgres

JOURNALS = Path("examples/bike_share/journals.yaml")
TIMEOUT_S = 60.0


def rides_of(stations, bike=7, begin=0):
    """Rides from each station to the next one, a minute apart."""
    found = []
    for minute, (here, there) in enumerate(pairwise(stations), begin):
        times = [f"2026-01-01 00:{minute:02}:{second}" for second in ("00", "30")]
        fields = ["", "30", *times, "1", here, "0", "0", "2", there, "0", "0", str(bike)]
        found.append(Ride([*fields, "Subscriber", "1990", "0"]))
    return found


def found_in(rides):
    """Stations of the published cycles, and the number of rides that are kept."""

    def kept(store):
        with store.committed() as view:
            return view.execute("SELECT count(*) FROM rides").fetchone()[0]

    run = run_handler(CycleFinder(), rides, read=kept)
    return [[step.station for step in cycle.steps] for cycle in run.published], run.state


def test_a_cycle_of_eleven_rides_is_published_once():
    stations = [*"abcdefghijk", "a", "z"]
    assert found_in(rides_of(stations)) == ([stations[:12]], 12)
    assert found_in([*rides_of(stations), *rides_of(stations)])[0] == [stations[:12]]


def test_a_cycle_of_ten_rides_is_not_published():
    assert found_in(rides_of([*"abcdefghij", "a"]))[0] == []
    inner = [*"abcdefghij", "x", "j", "a"]  # of twelve rides, with a short one within
    assert found_in(rides_of(inner))[0] == [inner]


def test_a_bike_that_was_moved_closes_no_cycle():
    moved = [*rides_of("abcdef"), *rides_of("ghijklma", begin=6)]
    assert len(moved) > 11
    assert found_in(moved)[0] == []


def test_the_last_twenty_rides_of_a_bike_are_kept():
    stations = [*"abcdefghijklmnopqrst", "a"]
    assert found_in(rides_of(stations)) == ([stations], 20)
    longer = [*"abcdefghijklmnopqrstu", "a"]
    assert found_in(rides_of(longer)) == ([], 20)
    others = rides_of("ab", bike=8)
    assert found_in([*others, *rides_of(longer)]) == ([], 21)


def expected_cycles(rides):
    """By bike, the stations of its cycles, from the paths of its rides."""
    paths, cycles = defaultdict(list), defaultdict(list)
    for ride in rides:
        path = paths[ride.bike]
        if not path or path[-1] != ride.start_station:
            path[:] = [ride.start_station]
        path.append(ride.end_station)
        del path[:-21]
        here = [place for place, station in enumerate(path) if station == path[-1]]
        if len(here) > 1 and here[-1] - here[-2] > 10:
            cycles[ride.bike].append(path[here[-2] :])
    return cycles


@pytest.fixture(params=["sqlite", "postgres"])
def database(request):
    if request.param == "sqlite":
        yield None
        return
    with running_postgres() as url:
        engine = sa.create_engine(url, poolclass=sa.NullPool)
        with engine.begin() as connection:
            for statement in filter(str.strip, TABLES.split(";")):
                connection.execute(sa.text(statement))
        yield url


def test_cycles_of_generated_rides_are_found_and_queried(gazette, database):
    gazette.apply(JOURNALS.read_text())
    rides = [Ride(["", *fields]) for fields in generated(bikes=10, rides=1000)]
    expected = expected_cycles(rides)
    assert sum(map(len, expected.values())) > 10
    options = {"transport": gazette.transport, "etcd": gazette.etcd_endpoint}
    with (
        EmbeddedConsumer(CycleFinder(database), **options) as one,
        EmbeddedConsumer(CycleFinder(database), **options) as two,
        Publisher(mapping=BY_BIKE, transport=gazette.transport) as publisher,
    ):
        publisher.publish_batch(rides).result(TIMEOUT_S)
        one.wait_caught_up(TIMEOUT_S)
        for bike in {ride.bike for ride in rides}:
            for process in (one, two):
                url = f"{process.address}/api/bikes/{bike}"
                with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
                    found = json.load(answer)
                cycles = [[step["station"] for step in steps] for steps in found["cycles"]]
                assert cycles[::-1] == expected[bike]
                last = [ride.start_time for ride in rides if ride.bike == bike][-20:]
                assert [ride["start_time"] for ride in found["rides"]] == last[::-1]
    published = defaultdict(list)
    for envelope in Reader(Cycle, CYCLES, block=False, transport=gazette.transport):
        cycle = envelope.message
        published[cycle.bike].append([step.station for step in cycle.steps])
    assert published == expected

"""The example that counts rides by zone and minute: each of its two handlers, in memory."""

from __future__ import annotations

import ast
import inspect

from examples import taxi_rides
from examples.taxi_rides import (
    Driver,
    EnrichedRide,
    LateRide,
    Ride,
    ZoneMinute,
    count,
    enrich,
    zone_of,
)
from gazette_sdk import shard
from gazette_sdk.testing import Advance, run_handler

BEGIN = 1_700_000_040.0  # of a minute
HANDLER_LINES_MAX = 40
OF_PUBLISHERS = {"to_rides", "to_drivers"}


def ride(number, at, zone="north", cents=100):
    return EnrichedRide(number, zone, BEGIN + at, cents, "red")


def test_a_ride_gets_the_newest_car_of_its_driver():
    run = run_handler(
        enrich,
        [
            Driver("ada", "red"),
            Ride(1, "ada", "north", BEGIN, 250),
            Driver("ada", "blue"),
            Ride(2, "ada", "south", BEGIN + 1, 300),
        ],
        read=lambda _: None,
    )
    assert run.published == [
        EnrichedRide(1, "north", BEGIN, 250, "red"),
        EnrichedRide(2, "south", BEGIN + 1, 300, "blue"),
    ]


def test_bad_rides_become_dead_letters_and_the_others_go_through():
    run = run_handler(
        enrich,
        [
            Driver("ada", "red"),
            Ride(1, "ada", "north", BEGIN, -1),
            Ride(2, "bob", "north", BEGIN, 100),
            Ride(3, "ada", "north", BEGIN, 0),
        ],
        read=lambda _: None,
    )
    negative, unknown, good = run.published
    assert (negative.record["number"], negative.error) == (
        1,
        "ValueError: a ride costs nothing or more",
    )
    assert (unknown.record["number"], unknown.error) == (2, "KeyError: 'bob'")
    assert good == EnrichedRide(3, "north", BEGIN, 0, "red")


def test_rides_of_a_minute_are_added_also_out_of_order():
    rides = [ride(1, 50), ride(2, 61), ride(3, 10), ride(4, 59), ride(5, 15, zone="south")]
    last, published = run_handler(count, [*rides, ride(6, 95)], now=BEGIN)
    assert published == [
        ZoneMinute("north", BEGIN, 3, 300),
        ZoneMinute("south", BEGIN, 1, 100),
    ]
    assert last == {each.zone: each for each in published}


def test_a_ride_of_a_minute_that_is_closed_is_late():
    published = run_handler(count, [ride(1, 50), ride(2, 95), ride(3, 59)], now=BEGIN).published
    assert published == [ZoneMinute("north", BEGIN, 1, 100), LateRide(3, "north", BEGIN)]


def test_a_quiet_zone_gets_its_last_minute():
    closes_at = BEGIN + 60 + 30 + 10 + 5  # its end, the grace, the quiet time and the lateness
    rides = [ride(1, 50)]
    assert run_handler(count, [*rides, Advance(closes_at - 1)], now=BEGIN).published == []
    assert run_handler(count, [*rides, Advance(closes_at + 1)], now=BEGIN).published == [
        ZoneMinute("north", BEGIN, 1, 100)
    ]


def test_a_query_answers_open_minutes_and_the_last_result():
    def asked(store):
        with store.committed() as view:
            query = shard.Query(view, shard=None, declared=count.windows)
            return [zone_of(query, zone) for zone in ("north", "south")]

    answers, _ = run_handler(count, [ride(1, 50), ride(2, 95)], read=asked, now=BEGIN)
    assert answers == [
        {
            "open": [ZoneMinute("north", BEGIN + 60, 1, 100)],
            "last": ZoneMinute("north", BEGIN, 1, 100),
        },
        {"open": [], "last": None},
    ]


def test_the_handlers_are_short():
    """All that is no import, no class of messages, and not for publishers alone."""
    source = inspect.getsource(taxi_rides)
    lines = source.splitlines()
    counted = []
    for node in ast.parse(source).body:
        is_docstring = isinstance(node, ast.Expr)
        if is_docstring or isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef):
            continue
        if isinstance(node, ast.Assign) and node.targets[0].id in OF_PUBLISHERS:
            continue
        decorators = getattr(node, "decorator_list", [])
        first = min(each.lineno for each in (node, *decorators))
        counted += lines[first - 1 : node.end_lineno]
    code = [line for line in counted if line.strip() and not line.strip().startswith("#")]
    assert len(code) <= HANDLER_LINES_MAX, "\n".join(code)
    assert sum(line.startswith("@") for line in code) == 5, "both handlers and the hooks count"

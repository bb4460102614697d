"""Rides as records of CSV, cycles that they close, and a generator of rides.

python -m examples.bike_share.rides --bikes 20 --rides 2000 > rides.csv
"""

import argparse
import csv
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from gazette_sdk.message import CsvRecord, JsonMessage

COLUMNS = (
    "duration",
    "start time",
    "stop time",
    "start station id",
    "start station name",
    "start station latitude",
    "start station longitude",
    "end station id",
    "end station name",
    "end station latitude",
    "end station longitude",
    "bike id",
    "user type",
    "birth year",
    "gender",
)
"""Columns of the data; in a journal, a UUID stands before them."""

CYCLE_RIDES_MIN = 11


class Ride(CsvRecord):
    """Ride of a bike, behind the UUID."""

    @property
    def bike(self) -> int:
        return int(self[12])

    @property
    def start_time(self) -> str:
        return self[2]

    @property
    def end_time(self) -> str:
        return self[3]

    @property
    def start_station(self) -> str:
        return self[5]

    @property
    def end_station(self) -> str:
        return self[9]


class PastRide(NamedTuple):
    """Ride as the database has it."""

    start_time: str
    end_time: str
    start_station: str
    end_station: str


@dataclass
class Step:
    """Stop of a cycle."""

    time: str
    station: str


@dataclass
class Cycle(JsonMessage):
    """Cycle that a bike has closed: its last stop is at the station of its first."""

    bike: int
    steps: list[Step]


def closed_cycle(rides: Sequence[PastRide]) -> list[Step] | None:
    """Return the steps of the cycle that the last ride of a bike closes, if it closes one.

    The cycle goes back to the last time that the bike was at the station where it is now. Each of
    its rides begins where the one before it ended: nobody moved the bike in between.

    Args:
        rides: the last rides of the bike, the newest first.
    """
    last = rides[0]
    steps = [Step(last.end_time, last.end_station)]
    place = last.end_station
    for length, ride in enumerate(rides, 1):
        if ride.end_station != place:
            return None
        steps.append(Step(ride.start_time, ride.start_station))
        if ride.start_station == last.end_station:
            return steps[::-1] if length >= CYCLE_RIDES_MIN else None
        place = ride.start_station
    return None


def generated(bikes: int, rides: int, seed: int = 1) -> Iterator[list[str]]:
    """Yield rides in the order of their times, without a UUID; some bikes are moved in between."""
    chance = random.Random(seed)
    now = datetime.fromisoformat("2026-01-01")
    stations = [f"Station {number:02}" for number in range(15)]
    place = {bike: chance.choice(stations) for bike in range(100, 100 + bikes)}
    free_at = dict.fromkeys(place, now)
    for _ in range(rides):
        bike = min(free_at, key=lambda bike: (free_at[bike], chance.random()))
        now = max(now + timedelta(seconds=1), free_at[bike])
        begin = chance.choice(stations) if chance.random() < 0.02 else place[bike]
        end = place[bike] = chance.choice([each for each in stations if each != begin])
        stop = now + timedelta(minutes=chance.randint(2, 30))
        free_at[bike] = stop + timedelta(seconds=chance.randint(1, 3600))
        where = [[str(stations.index(each)), each, "40.7", "-74.0"] for each in (begin, end)]
        yield [
            str(int((stop - now).total_seconds())),
            *(str(now), str(stop), *where[0], *where[1], str(bike), "Subscriber", "1990", "0"),
        ]


def main() -> None:
    """Write generated rides as CSV."""
    parser = argparse.ArgumentParser(description="Write generated rides of bikes as CSV.")
    parser.add_argument("--bikes", type=int, default=20)
    parser.add_argument("--rides", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(generated(given.bikes, given.rides, given.seed))


if __name__ == "__main__":
    main()

"""Cycles of bikes, found by shards in SQL, and queries of bikes.

    gazette run-consumer examples.bike_share.finder:CycleFinder

Each shard has an SQLite database of its own. With `BIKE_SHARE_DATABASE`, a URL of SQLAlchemy as
postgresql+psycopg://user@host/name, all share that database, which has the tables of `tables.sql`.
"""

import json
import os
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path

from examples.bike_share.rides import Cycle, PastRide, Ride, closed_cycle
from gazette_sdk import mapping, shard

RIDES = "app.gazette.dev/message-type=bike_share.Ride"
CYCLES = "app.gazette.dev/message-type=bike_share.Cycle"
BY_BIKE = mapping.modulo(RIDES, key=attrgetter("bike"))  # of rides, and of a request's path
CYCLES_BY_BIKE = mapping.modulo(CYCLES, key=attrgetter("bike"))

RIDES_KEPT = 20
"""Rides of each bike that are kept, and so the length of the longest cycle that is found."""

INSERT_RIDE = """
INSERT INTO rides (bike, start_time, end_time, start_station, end_station)
VALUES (:bike, :start_time, :end_time, :start_station, :end_station)
ON CONFLICT DO NOTHING
"""
DELETE_OLD_RIDES = """
DELETE FROM rides WHERE bike = :bike AND start_time NOT IN
(SELECT start_time FROM rides WHERE bike = :bike ORDER BY start_time DESC LIMIT :kept)
"""
SELECT_RIDES = """
SELECT start_time, end_time, start_station, end_station FROM rides WHERE bike = :bike
ORDER BY start_time DESC
"""
INSERT_CYCLE = "INSERT INTO cycles (bike, end_time, steps) VALUES (:bike, :end_time, :steps)"
SELECT_CYCLES = "SELECT steps FROM cycles WHERE bike = :bike ORDER BY end_time DESC"

TABLES = (Path(__file__).parent / "tables.sql").read_text()

Store = shard.SqliteStore | shard.SqlStore  # both take these statements


class CycleFinder(shard.Application[Ride, Store]):
    message = Ride
    sources = RIDES
    name = "bike-share"

    def __init__(self, database: str | None = None) -> None:
        database = database or os.environ.get("BIKE_SHARE_DATABASE")
        self.store = (
            shard.SqlStore.of(database) if database else shard.SqliteStore.of(schema=TABLES)
        )
        super().__init__()
        self.get("/api/bikes/{bike}", by=BY_BIKE)(self.bike)

    def consume(self, txn: shard.Transaction[Store], ride: Ride) -> None:
        execute = txn.store.execute
        columns = {
            "bike": ride.bike,
            "start_time": ride.start_time,
            "end_time": ride.end_time,
            "start_station": ride.start_station,
            "end_station": ride.end_station,
        }
        if not execute(INSERT_RIDE, columns).rowcount:
            return  # the data has this ride twice
        execute(DELETE_OLD_RIDES, {"bike": ride.bike, "kept": RIDES_KEPT})
        rides = [PastRide(*row) for row in execute(SELECT_RIDES, {"bike": ride.bike})]
        if rides[0].start_time != ride.start_time:
            return  # it came late: what closed a cycle is another ride
        if steps := closed_cycle(rides):
            txn.publish(Cycle(ride.bike, steps), mapping=CYCLES_BY_BIKE)
            text = json.dumps([asdict(step) for step in steps])
            execute(INSERT_CYCLE, {"bike": ride.bike, "end_time": ride.end_time, "steps": text})

    def bike(self, query: shard.Query[Store], bike: str) -> dict[str, object]:
        """Return the last rides and all cycles of a bike, the newest first."""
        key = {"bike": int(bike)}
        rides = query.store.execute(SELECT_RIDES, key)
        cycles = query.store.execute(SELECT_CYCLES, key)
        return {
            "bike": key["bike"],
            "rides": [PastRide(*row)._asdict() for row in rides],
            "cycles": [json.loads(steps) for (steps,) in cycles],
        }

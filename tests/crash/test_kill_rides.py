"""Processes of two applications, one after the other, are killed: all is as of a plain computation.

The applications are those of ``examples/taxi_rides.py``. What is expected is computed with dicts,
from what was published. Rides of one *round* come to the second stage in an order that is not
known, so the computation has bounds of the watermark, and takes an input for which both give the
same.
"""

from __future__ import annotations

import base64
import json
import math
import random
import time
import urllib.request
from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import asdict, astuple, dataclass, field

import pytest

from crash.appends import append_over_http
from examples import taxi_rides
from examples.taxi_rides import Driver, EnrichedRide, LateRide, Ride, ZoneMinute
from gazette_sdk import Journals, Publisher, Reader
from gazette_sdk.message.mapping import Partitions
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.shard.transaction.failure import DeadLetter
from gazette_sdk.testing import run_shards

SIZE_S, GRACE_S, LATENESS_S, IDLE_S = 5, 30, 5, 10
PROCESSES = 2

STEP_S = 20
"""Event time from one round to the next."""

AHEAD_S = 60
"""Event time of the first round, after the present: rounds may take so much longer than steps."""

QUIET_S = 20
"""Time after which the windows of a quiet partition close, at least. A round is shorter."""

SLICES = 20
"""Parts in which the rides of a round are published."""

DRIVERS = [f"driver-{number}" for number in range(12)]
LETTERS = {
    "negative": "ValueError: a ride costs nothing or more",
    "unknown": "KeyError: 'nobody'",
    "untimed": "ValidationError: the event time of a message is -5.0 seconds",
    "garbage": "DecodeError: ",
}
"""Begins of the errors in dead letters."""


def zones_by_partition(count):
    """Return zones, three of each partition of the topic of enriched rides."""
    names = [f"enriched-rides/part-{number:03}" for number in range(count)]
    partitions = Partitions([pb.JournalSpec(name=name) for name in names])
    found = {name: [] for name in names}
    for number in range(100):
        ride = EnrichedRide(0, f"zone-{number}", 0, 0, "")
        found[taxi_rides.by_zone.pick(ride, partitions)].append(ride.zone)
    return [zones[:3] for zones in found.values()]


PARTITIONS = zones_by_partition(3)
*BUSY, QUIET = PARTITIONS


def begin_of(at):
    """Return the begin of the window of an event time."""
    return at // SIZE_S * SIZE_S


def closes_at(begin):
    """Return the watermark that closes a window."""
    return begin + SIZE_S + GRACE_S


# --------------------------------------------------------------------- the input


@dataclass
class Round:
    """Rides that are published once all rides of the round before are enriched.

    Attributes:
        cars: of all drivers, meanwhile.
        rides: the rides, in the order in which they are published.
        garbage: lines that are no rides.
        begin: Unix time before the first one was published.
        end: Unix time after all were enriched.
    """

    cars: dict[str, str]
    rides: list[Ride]
    garbage: list[bytes] = field(default_factory=list)
    begin: float = 0.0
    end: float = 0.0


class Input:
    """Rounds of rides.

    Attributes:
        rounds: those so far.
        cars: of all drivers, as of now.
        quiet_from: Unix time at which the windows of the quiet partition close.
    """

    def __init__(self, rng):
        self.rounds = []
        self.cars = {driver: f"first car of {driver}" for driver in DRIVERS}
        self.quiet_from = 0.0
        self._begin = math.ceil(time.time()) + AHEAD_S
        self._rng = rng
        self._count = 0

    def new_cars(self):
        """Return the drivers that have another car from the next round on."""
        number = len(self.rounds)
        chosen = self._rng.sample(DRIVERS, 4)
        self.cars |= {driver: f"car {number} of {driver}" for driver in chosen}
        return [Driver(driver, self.cars[driver]) for driver in chosen]

    def new_ride(self, zone, at, *, driver="", cents=None):
        self._count += 1
        cents = self._rng.randrange(1000) if cents is None else cents
        return Ride(self._count, driver or self._rng.choice(DRIVERS), zone, at, cents)

    def new_round(self):
        """Return a round of rides in order and out of order, late ones and bad ones."""
        number, new = len(self.rounds), self.new_ride
        begin = self._begin + number * STEP_S
        rides = []
        for zones in BUSY:
            rides.append(new(zones[0], begin + STEP_S - 6))  # so far the watermark gets in any case
            for _ in range(100):
                zone = self._rng.choice(zones[: 3 if number < 2 else 2])  # the third falls quiet
                rides.append(new(zone, begin + self._rng.uniform(-STEP_S, STEP_S - 5)))
            if number:
                late = [begin - self._rng.uniform(71, 200) for _ in range(50)]
                rides += [new(self._rng.choice(zones), at) for at in late]
            rides.append(new(zones[0], -5.0))  # the second stage refuses it
        if number % 7 == 0:
            after_s = QUIET_S if number == 0 else 2 * QUIET_S  # with kills it takes longer
            window = begin_of(time.time() + after_s - GRACE_S - IDLE_S - LATENESS_S)
            self.quiet_from = closes_at(window) + IDLE_S + LATENESS_S
            rides += [new(zone, window + each) for zone in QUIET[:2] for each in range(SIZE_S)]
        rides += [new(BUSY[0][0], begin, cents=-1), new(BUSY[0][1], begin, driver="nobody")]
        self._rng.shuffle(rides)
        return self.add(rides, [f"no ride {number}/{each}\n".encode() for each in range(2)])

    def add(self, rides, garbage=()):
        """Return a round of given rides."""
        self.rounds.append(Round(dict(self.cars), rides, list(garbage)))
        return self.rounds[-1]


# ------------------------------------------------------------------ what is expected


class Expected:
    """Results that the applications are to give for rounds.

    Attributes:
        enriched: fields of the enriched rides.
        letters: what is refused, a ride's number or a line, with its kind.
        late: fields of the late rides.
        closed: fields of the windows that are closed, once the quiet partition is quiet.
        open: likewise of those that are open.
    """

    def __init__(self, rounds):
        self.enriched, self.letters, self.late = Counter(), Counter(), Counter()
        self.closed, self.open = Counter(), Counter()
        passed_on = [(each, list(self._enrich(each))) for each in rounds]
        for zones in PARTITIONS:
            self._count(
                [(each, [r for r in rides if r.zone in zones]) for each, rides in passed_on]
            )

    def _enrich(self, given):
        """Yield what the first stage passes on."""
        self.letters.update((line, "garbage") for line in given.garbage)
        for ride in given.rides:
            if ride.cents < 0:
                self.letters[ride.number, "negative"] += 1
            elif ride.driver not in given.cars:
                self.letters[ride.number, "unknown"] += 1
            else:
                car = given.cars[ride.driver]
                self.enriched[ride.number, ride.zone, ride.at, ride.cents, car] += 1
                yield ride

    def _count(self, rounds):
        """Count the rides of one partition of the second stage."""
        windows = defaultdict(lambda: [0, 0])
        latest, read_until = -math.inf, math.inf  # in event time, and in that of publication
        for given, rides in rounds:
            if not rides:
                continue
            least = latest - LATENESS_S  # the watermark at the first of them
            if given.begin - read_until > IDLE_S:
                least = max(least, given.begin - IDLE_S - LATENESS_S)
            read_until = given.end
            latest = max([latest, *(ride.at for ride in rides)])
            most = max(latest - LATENESS_S, given.end - IDLE_S - LATENESS_S)
            for ride in rides:
                begin = begin_of(ride.at)
                if ride.at < 0:
                    self.letters[ride.number, "untimed"] += 1
                elif closes_at(begin) <= least:
                    self.late[ride.number, ride.zone, begin] += 1
                else:
                    assert closes_at(begin) > most, f"{ride} is late in some orders"
                    windows[ride.zone, begin][0] += 1
                    windows[ride.zone, begin][1] += ride.cents
        for (zone, begin), numbers in windows.items():
            is_closed = zone in QUIET or closes_at(begin) <= latest - LATENESS_S
            (self.closed if is_closed else self.open)[zone, begin, *numbers] += 1

    def answer(self, zone):
        """Return the answer of a query."""
        closed, opened = (
            [asdict(ZoneMinute(*each)) for each in sorted(windows) if each[0] == zone]
            for windows in (self.closed, self.open)
        )
        return {"open": opened, "last": closed[-1] if closed else None}


# -------------------------------------------------------------------- what is found


def published(transport, message, selector):
    """Return the fields of all messages that are committed."""
    reader = Reader(message, selector, block=False, transport=transport)
    return Counter(astuple(each.message) for each in reader)


def letters(transport):
    """Return the dead letters, as they are expected."""
    found = Counter()
    for each in Reader(DeadLetter, "name=bad-rides", block=False, transport=transport):
        error, record = each.message.error, each.message.record
        kind = next((kind for kind, begin in LETTERS.items() if error.startswith(begin)), error)
        found[base64.b64decode(record) if kind == "garbage" else record["number"], kind] += 1
    return found


def ask(process, zone):
    with urllib.request.urlopen(f"{process.address}/api/zones/{zone}", timeout=30) as answer:
        return json.load(answer)


# ------------------------------------------------------------------------ the kills


class Stage:
    """Processes of one application."""

    def __init__(self, shards, rng):
        self.shards = shards
        self._rng = rng

    def victim(self):
        """Return the process that leads a random shard; any one where none does."""
        names = [
            each.route.members[each.route.primary].suffix
            for each in self.shards.list_shards()
            if each.route.primary >= 0
        ]
        running = [each for each in self.shards.processes if each.is_running]
        return self._rng.choice([each for each in running if each.name in names] or running)

    def start_all(self):
        for process in self.shards.processes:
            if not process.is_running:
                process.start()

    def wait_until_hot(self):
        """Wait until each shard has a primary and a standby."""
        wanted = [cpb.ReplicaStatus.STANDBY, cpb.ReplicaStatus.PRIMARY]

        def is_hot(shards):
            codes = [sorted(status.code for status in each.status) for each in shards]
            return bool(codes) and all(each == wanted for each in codes)

        self.shards.wait_until(is_hot)


def publish(given, cluster, stages, rng, to_kill=()):
    """Publish a round, and kill a process of each of some stages meanwhile."""
    slices = dict(zip(rng.sample(range(1, SLICES), len(to_kill)), to_kill, strict=True))
    size = -(-len(given.rides) // SLICES)
    given.begin = time.time()
    with Publisher(mapping=taxi_rides.to_rides, transport=cluster.transport) as publisher:
        for number in range(SLICES):
            victim = slices[number].victim() if number in slices else None
            publisher.publish_batch(given.rides[number * size : (number + 1) * size]).result(30)
            time.sleep(rng.uniform(0, 0.06))
            if victim is not None:
                victim.crash()
            if number == SLICES // 2:
                for line in given.garbage:
                    append_over_http(f"{cluster.address}/rides/part-{rng.randrange(2):03}", line)
    for stage in stages:
        stage.start_all()
    stages[0].shards.wait_caught_up()
    given.end = time.time()


def create_topics(transport):
    journals = Journals(transport=transport)
    partitions = {"rides": 2, "drivers": 2, "enriched-rides": len(PARTITIONS), "bad-rides": 0}
    for topic, count in {**partitions, "zone-minutes": 2, "late-rides": 1}.items():
        journals.create(topic, partitions=count, replication=1)


@pytest.mark.parametrize(
    "kills", [4, pytest.param(20, marks=[pytest.mark.long, pytest.mark.timeout(600)])]
)
def test_two_stages_give_what_a_plain_computation_gives(gazette_cluster, kills, monkeypatch):
    monkeypatch.setenv("TAXI_WINDOW_S", str(SIZE_S))
    rng = random.Random(seed := random.randrange(1 << 32))
    print(f"seed {seed}")
    cluster = gazette_cluster(2)
    transport = cluster.transport
    create_topics(transport)
    with ExitStack() as stack:
        given = Input(rng)
        drivers = Publisher(mapping=taxi_rides.to_drivers, transport=transport)
        stack.enter_context(drivers)
        drivers.publish_batch([Driver(*each) for each in given.cars.items()]).result(30)
        options = {"processes": PROCESSES, "cluster": cluster, "lease_ttl_s": 2}
        first, second = stages = [
            Stage(stack.enter_context(run_shards(each, **options)), rng)
            for each in (taxi_rides.enrich, taxi_rides.count)
        ]
        first.wait_until_hot()
        second.wait_until_hot()
        publish(given.new_round(), cluster, stages, rng)
        for left in range(kills - 2, -2, -2):
            drivers.publish_batch(given.new_cars()).result(30)
            first.shards.wait_caught_up()
            if left % 4 == 0:  # else a process may be killed while it recovers
                first.wait_until_hot()
                second.wait_until_hot()
            if not left:  # around the time at which the quiet partition is quiet
                time.sleep(max(0.0, given.quiet_from - 1 - time.time()))
            publish(given.new_round(), cluster, stages, rng, to_kill=rng.sample(stages, 2))

        expected = Expected(given.rounds)
        ends_at = time.monotonic() + 60
        while (found := published(transport, ZoneMinute, "topic=zone-minutes")) != expected.closed:
            assert time.monotonic() < ends_at, (expected.closed - found, found - expected.closed)
            time.sleep(0.1)

        # Another ride of a window that was closed because its partition was quiet is late.
        late = [given.new_ride(zone, begin) for zone, begin, *_ in found if zone in QUIET]
        publish(given.add(late), cluster, stages, rng)
        second.shards.wait_caught_up()
        expected = Expected(given.rounds)
        assert expected.late.keys() >= {(each.number, each.zone, each.at) for each in late}
        assert published(transport, EnrichedRide, "topic=enriched-rides") == expected.enriched
        assert published(transport, ZoneMinute, "topic=zone-minutes") == expected.closed
        assert published(transport, LateRide, "topic=late-rides") == expected.late
        assert letters(transport) == expected.letters
        assert {kind for _, kind in expected.letters} == LETTERS.keys()
        second.wait_until_hot()  # both processes answer
        for zone in (zone for zones in PARTITIONS for zone in zones):
            for process in second.shards.processes:
                assert ask(process, zone) == expected.answer(zone)

"""Watermarks: rules, and the law that a replay gives what the live run gave."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette_sdk.errors import ConfigurationError, ValidationError
from gazette_sdk.message.checkpoint import Checkpoint, SourceTimes
from gazette_sdk.shard.transaction.timers import EventTime, check_event_time

S = 1_000_000
BEGIN = 1_700_000_000 * S


@dataclass(frozen=True)
class Event:
    """A message: its publication and event time, in microseconds."""

    published: int
    event: int

    @property
    def at(self) -> float:
        return self.event / S


def seconds(time_us):
    return (time_us - BEGIN) / S if time_us else None


# ------------------------------------------------------------------- the rules


def new(*journals, lateness_s=0, idle_s=10):
    return EventTime(journals or ["a"], attrgetter("at"), lateness_s=lateness_s, idle_s=idle_s)


def consume(times, journal, published_s, event_s):
    """Consume a message; return the watermark before it, and after it."""
    times.read(journal, BEGIN + round(published_s * S))
    before = seconds(times.watermark_us)
    times.consumed(journal, BEGIN + round(event_s * S))
    return before, seconds(times.watermark_us)


def test_the_watermark_follows_event_times_less_the_lateness_and_never_falls():
    times = new(lateness_s=2)
    assert consume(times, "a", 100, 90) == (88, 88)
    assert consume(times, "a", 101, 95) == (88, 93)
    assert consume(times, "a", 102, 80) == (93, 93)


def test_a_quiet_time_between_two_messages_counts_but_for_the_idle_time():
    times = new(lateness_s=2)
    consume(times, "a", 100, 99)
    assert consume(times, "a", 110, 100)[0] == 97, "10 s are not more than idle_s"
    assert consume(times, "a", 121, 100)[0] == 121 - 10 - 2


def test_a_first_message_ends_a_quiet_time_without_begin():
    assert consume(new(), "a", 100, 1) == (90, 90)


def test_without_idle_time_only_event_times_count():
    times = new(idle_s=None)
    assert consume(times, "a", 100, 1) == (None, 1)
    assert consume(times, "a", 1000, 2) == (1, 2)
    times.present("a", BEGIN + 5000 * S)
    assert seconds(times.watermark_us) == 2
    assert times.quiet_at_us(BEGIN + 3 * S) == math.inf


def test_the_present_counts_at_the_write_head():
    times = new()
    consume(times, "a", 100, 99)
    times.present("a", BEGIN + 105 * S)
    assert seconds(times.watermark_us) == 99
    times.present("a", BEGIN + 150 * S)
    assert seconds(times.watermark_us) == 140
    assert consume(times, "a", 151, 99)[0] == 141, "the gap counts from the last message"


def test_the_least_source_decides():
    times = new("a", "b")
    assert consume(times, "a", 100, 99) == (None, None)
    assert consume(times, "b", 100, 95) == (90, 95)
    assert times.quiet_sources(BEGIN + 97 * S) == ["b"]
    assert times.quiet_at_us(BEGIN + 97 * S) == BEGIN + 110 * S + 1
    assert times.quiet_at_us(BEGIN + 150 * S) == BEGIN + 160 * S


def test_the_publication_time_is_the_event_time_where_none_is_declared():
    times = EventTime(["a"])
    times.read("a", BEGIN)
    times.consumed("a", times.event_us("a", object()))
    assert times.watermark_us == BEGIN


def test_times_are_those_of_a_checkpoint():
    times = new("a", "b")
    consume(times, "a", 100, 99)
    consume(times, "b", 90, 80)
    stored = Checkpoint({"a": 1, "b": 2}, times=times.times).to_bytes()
    restored = new()
    restored.restore("abc", Checkpoint.from_bytes(stored))
    assert seconds(restored.watermark_us_of("c")) == 80, "c is new, and the watermark never falls"
    assert seconds(restored.watermark_us) == 80
    restored.restore("b", Checkpoint.from_bytes(stored))
    assert seconds(restored.watermark_us) == 80
    assert Checkpoint.from_bytes(stored).times["a"] == SourceTimes(BEGIN + 99 * S, BEGIN + 100 * S)


def test_a_source_that_was_never_read_from_holds_the_watermark_after_a_restart_as_before():
    times = new("a", "b", idle_s=None)
    consume(times, "a", 100, 99)
    assert times.watermark_us == 0
    stored = Checkpoint({"a": 1, "b": 0}, times=times.times).to_bytes()
    times.restore("ab", Checkpoint.from_bytes(stored))
    assert (times.watermark_us_of("b"), times.watermark_us) == (0, 0)


@pytest.mark.parametrize("at", [math.nan, -1.0, math.inf, 3e11, "now", None, True])
def test_an_event_time_that_is_none_is_an_error(at):
    times = EventTime(["a"], lambda _message: at)
    with pytest.raises(ValidationError, match="the event time of a message"):
        times.event_us("a", object())


def test_a_datetime_needs_a_zone():
    at = [datetime(2023, 11, 14, tzinfo=UTC), datetime(2023, 11, 14)]  # noqa: DTZ001
    times = EventTime(["a"], lambda _message: at[0])
    assert times.event_us("a", None) == int(at[0].timestamp()) * S
    at.reverse()
    with pytest.raises(ValidationError, match="time zone"):
        times.event_us("a", None)


@pytest.mark.parametrize(("lateness_s", "idle_s"), [(-1, 10), (math.nan, 10), (0, -1), (0, "x")])
def test_declared_durations_are_checked(lateness_s, idle_s):
    with pytest.raises(ConfigurationError, match=r"rides: .*use a number of seconds"):
        check_event_time("rides", None, lateness_s, idle_s)
    check_event_time("rides", "published", 0, None)


# --------------------------------------------------------------------- the law

SIZE = 5 * S
"""Size of the windows."""


class Counts:
    """Counts of messages by window: what is closed, and what came too late."""

    def __init__(self, journals, lateness_s, idle_s):
        self.journals, self.options = journals, {"lateness_s": lateness_s, "idle_s": idle_s}
        self.times = EventTime(journals, attrgetter("at"), **self.options)
        self.open = Counter()
        self.output = Counter()

    def consume(self, journal, event):
        self.times.read(journal, event.published)
        self.close()
        window = event.event // SIZE
        own = self.times.times[journal].watermark_us
        if (window + 1) * SIZE <= own:
            self.output["late", window] += 1
        else:
            assert (window + 1) * SIZE > self.times.watermark_us, "its window is open"
            self.open[window] += 1
        self.times.consumed(journal, self.times.event_us(journal, event))
        self.close()

    def close(self):
        for window in sorted(self.open):
            if (window + 1) * SIZE <= self.times.watermark_us:
                self.output["closed", window, self.open.pop(window)] += 1

    def kill(self):
        """Continue as another process, from what is committed."""
        stored = Checkpoint(dict.fromkeys(self.journals, 1), times=self.times.times).to_bytes()
        self.times = EventTime(self.journals, attrgetter("at"), **self.options)
        self.times.restore(self.journals, Checkpoint.from_bytes(stored))

    def ended(self):
        for journal in self.journals:
            self.times.present(journal, BEGIN + 10_000 * S)
        self.close()
        assert not self.open
        return self.output


GAPS = st.sampled_from([0, 1, S // 2, S, 4 * S, 9 * S, 10 * S, 10 * S + 1, 11 * S, 30 * S])
DELAYS = st.sampled_from([0, 0, S, 2 * S, 5 * S, 20 * S])
SOURCE = st.lists(st.tuples(GAPS, DELAYS), max_size=12)


def events_of(source):
    found, published = [], BEGIN
    for gap, delay in source:
        published += gap
        found.append(Event(published, published - delay))
    return found


@settings(max_examples=300, deadline=None)
@given(
    sources=st.lists(SOURCE, min_size=1, max_size=3),
    lateness_s=st.sampled_from([0, 1, 5]),
    data=st.data(),
)
def test_a_replay_gives_what_the_live_run_gave(sources, lateness_s, data):
    """Also paced, interleaved otherwise, and with kills, whatever of the present is seen."""
    journals = [f"journal-{number}" for number in range(len(sources))]
    messages = {name: events_of(source) for name, source in zip(journals, sources, strict=True)}
    straight = Counts(journals, lateness_s, 10)
    for name in journals:
        for event in messages[name]:
            straight.consume(name, event)
    expected = straight.ended()
    left = {name: list(events) for name, events in messages.items()}
    live = Counts(journals, lateness_s, 10)
    while any(left.values()):
        name = data.draw(st.sampled_from([name for name in journals if left[name]]))
        if data.draw(st.booleans()):  # it is quiet: the present is before the next message
            source = data.draw(st.sampled_from(journals))
            bound = left[source][0].published if left[source] else BEGIN + 1000 * S
            live.times.present(source, bound - data.draw(st.sampled_from([0, 1, S, 20 * S])))
            live.close()
        if data.draw(st.integers(0, 3)) == 0:
            live.kill()
        live.consume(name, left[name].pop(0))
    assert live.ended() == expected

"""Kills producers at moments which they cannot know, and says where the kills fell."""

from __future__ import annotations

import multiprocessing
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from crash.appends import append_over_http, read_over_http
from crash.producer_program import Assignment, Decision, Event, Moment, plan, produce
from crash.transactions import History
from gazette_sdk.message.sender import AckIntents

__all__ = ["Kill", "Victim", "phases_of", "warm_processes"]

EVENT_TIMEOUT_S = 60.0
"""A producer that tells nothing for so long hangs."""

ENDLESS = 1 << 30

AIMS = [
    Moment.STARTED,
    Moment.PUBLISHING,
    Moment.PUBLISHED,
    Moment.SAVING,
    Moment.SAVED,
    Moment.SAVED,
    Moment.ACKNOWLEDGED,
]
"""A kill is aimed at what follows one of these."""

USUAL_S = 0.05
"""What a phase is taken to last before any was seen."""

_ASKING = threading.Lock()
"""Held while processes are started and asked how they ended.

`Process.start` asks all processes of the program whether they ended. The answer can be read once:
a thread that asks at the same time is told 255.
"""


@contextmanager
def warm_processes(
    monkeypatch_env, program: str = "crash.producer_program"
) -> Iterator[ForkServerContext]:
    """Processes which begin in milliseconds: forks of one that has imported what they need.

    It never calls gRPC, and has no threads.

    Args:
        monkeypatch_env: sets a variable of the environment.
        program: the module that they run.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", program])
    monkeypatch_env("PYTHONPATH", str(Path(__file__).parents[1]))
    try:
        yield context
    finally:
        forkserver._forkserver._stop()


@dataclass(frozen=True)
class Kill:
    """A kill, and what can be said about it once everything is over.

    Attributes:
        moment: what the producer told last before it died.
        decision: what its state file held.
        heads: write heads of the journals when it was dead.
    """

    moment: Moment
    decision: Decision | None
    heads: dict[str, int]


@dataclass
class Victim:
    """One producer, whose processes are killed one after the other.

    Attributes:
        history: shared with nobody: what this producer decided, and was told.
        kills: those of now.
    """

    context: ForkServerContext
    assignment: Assignment
    chance: random.Random
    history: History = field(default_factory=History)
    kills: list[Kill] = field(default_factory=list)
    rolled_back: int = 0
    _lasts_s: dict[Moment, float] = field(default_factory=dict)
    _last: Event = field(default_factory=lambda: Event(Moment.STARTED))

    def kill_often(self, count: int) -> None:
        """Let it be killed so many times."""
        while len(self.kills) < count:
            with self._running(ENDLESS) as (process, events):
                self._watch(events, self.chance.choice(AIMS), self.chance.randrange(3))
                # Within the phase, and now and then behind it.
                lasts_s = self._lasts_s.get(self._last.moment, USUAL_S)
                time.sleep(self.chance.random() * lasts_s * 1.2)
                process.kill()
            assert process.exitcode == -signal.SIGKILL, f"it ended by itself: {process.exitcode}"
            decision = self._learn()
            heads = {name: self._head(name) for name in self.assignment.journals}
            self.kills.append(Kill(self._last.moment, decision, heads))

    def finish(self, transactions: int) -> None:
        """Let it recover a last time, make some transactions, and end by itself."""
        with self._running(transactions) as (process, _):
            pass
        assert process.exitcode == 0
        self._learn()

    @contextmanager
    def _running(self, transactions_max: int) -> Iterator[tuple[BaseProcess, Connection]]:
        """A process of it; in the end it is dead, and everything that it told is noted."""
        events, log = self.context.Pipe(duplex=False)
        self.assignment = replace(
            self.assignment,
            process=self.assignment.process + 1,
            transactions_max=transactions_max,
        )
        process = self.context.Process(target=produce, args=(self.assignment, log), daemon=True)
        with _ASKING:
            process.start()
        log.close()
        try:
            yield process, events
            while self._note_next(events):
                pass
            with _ASKING:
                process.join(EVENT_TIMEOUT_S)
        finally:
            with _ASKING:
                process.kill()
                process.join()
            events.close()

    def _watch(self, events: Connection, moment: Moment, passed_by: int) -> None:
        """Return when a moment has come for the last time of so many."""
        if moment == Moment.STARTED:
            passed_by = 0  # there is but one
        while True:
            assert self._note_next(events), "a producer ended by itself"
            if self._last.moment == moment:
                if passed_by == 0:
                    return
                passed_by -= 1

    def _note_next(self, events: Connection) -> bool:
        """Note what the producer tells next; False if it has ended."""
        assert events.poll(EVENT_TIMEOUT_S), f"{self.assignment.producer} hangs in {self._last}"
        try:
            event: Event = events.recv()
        except EOFError:
            return False
        assert event.moment != Moment.FAILED, event.text
        if event.moment != Moment.STARTED:
            lasted_s = event.at - self._last.at
            usual_s = self._lasts_s.get(self._last.moment, lasted_s)
            self._lasts_s[self._last.moment] = 0.8 * usual_s + 0.2 * lasted_s
        self._last = event
        if event.moment == Moment.SAVED:
            self._decide(event.number, event.attempt)
        elif event.moment == Moment.ACKNOWLEDGED:
            self.history.acknowledge(self.assignment.producer, event.number)
        elif event.moment == Moment.ROLLED_BACK:
            self.rolled_back += 1
        return True

    def _learn(self) -> Decision | None:
        """What a dead producer had decided, which it may not have told any more."""
        decision = Decision.load(self.assignment.state)
        if decision is not None:
            self._decide(decision.number, decision.attempt)
        return decision

    def _decide(self, number: int, attempt: int) -> None:
        given = self.assignment
        self.history.decide(plan(given.seed, given.producer, number, attempt, given.journals))

    def _head(self, journal: str) -> int:
        return append_over_http(f"{self.assignment.address}/{journal}", b"")


_PHASES = {
    Moment.STARTED: "recovering",
    Moment.RECOVERED: "between transactions",
    Moment.PUBLISHING: "publishing",
    Moment.PUBLISHED: "waiting for what was published",
    Moment.SAVING: "saving",
    Moment.ACKNOWLEDGED: "between transactions",
    Moment.ROLLED_BACK: "between transactions",
}


def phases_of(kills: list[Kill], address: str) -> Counter[str]:
    """How many kills fell into which phase of a transaction."""
    contents: dict[str, bytes] = {}
    phases: Counter[str] = Counter()
    for kill in kills:
        if kill.moment != Moment.SAVED:
            phases[_PHASES[kill.moment]] += 1
            continue
        assert kill.decision is not None
        landed = []
        for journal, acknowledgement in AckIntents.from_bytes(kill.decision.intents).items():
            if journal not in contents:
                contents[journal] = read_over_http(f"{address}/{journal}")
            landed.append(contents[journal].find(acknowledgement, 0, kill.heads[journal]) >= 0)
        if not any(landed):
            phases["acknowledging, nowhere yet"] += 1
        elif all(landed):
            phases["acknowledging, everywhere"] += 1
        else:
            phases["acknowledging, in some journals"] += 1
    return phases

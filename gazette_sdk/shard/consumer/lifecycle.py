r"""Life of a shard in one process, as a table (shard section 5).

::

    IDLE -> BACKFILL -> STANDBY -> TAKING_OVER -> OPENING -> PRIMARY
                \__________________/

Every state before STOPPED can fail, and every state can stop. A failed shard stays failed until its
assignment is removed: recovering it at once, at the same place, would most likely fail again. The
table does nothing itself: its owner performs the effects.

:func:`until_caught_up` waits until shards have consumed the content of their sources, as any client
sees it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol, TypeVar

from gazette_sdk.errors import UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.shard_spec import source_journals
from gazette_sdk.shard.application.application import Application
from gazette_sdk.shard.application.generator import is_generated, list_topics
from gazette_sdk.shard.application.sources import group_journals, selectors_of
from gazette_sdk.shard.consumer.client import ShardClient
from gazette_sdk.transport.append.append import append
from gazette_sdk.transport.base import Transport


class State(Enum):
    """State of a shard in this process."""

    IDLE = auto()
    """Made, and not started."""
    BACKFILL = auto()
    """The log is played, and its write head is not reached yet."""
    STANDBY = auto()
    """The log is played as it grows; or there is no log."""
    TAKING_OVER = auto()
    """Primary: the fence is written to the log, and playback completes."""
    OPENING = auto()
    """Primary: the store is opened and its checkpoint restored."""
    PRIMARY = auto()
    """Primary: transactions run."""
    FAILED = auto()
    """An error ended it. A store that was ready stays readable."""
    STOPPED = auto()
    """Cancelled: the assignment was removed, or the process ends."""


class Input(Enum):
    """Event of a shard's life."""

    STARTED = auto()
    """The shard was assigned, and has a recovery log."""
    STARTED_WITHOUT_LOG = auto()
    """The shard was assigned, and has no recovery log."""
    TAILING = auto()
    """Playback has reached the write head for the first time."""
    PROMOTED = auto()
    """This process has slot 0."""
    RECOVERED = auto()
    """Playback has completed after our fence; or there is no log to play."""
    RESTORED = auto()
    """The store is open, and its checkpoint was restored."""
    INPUT_ENDED = auto()
    """The sources ended, or a transaction was aborted: begin at the checkpoint again."""
    ERROR = auto()
    """Playback, the store or a transaction raised."""
    CANCELLED = auto()
    """The assignment was removed or made anew, or the process ends."""


class Effect(Enum):
    """Action of a shard's owner on a transition."""

    NONE = auto()
    PLAY = auto()
    """Report BACKFILL, load hints, play the log."""
    REPORT_STANDBY = auto()
    """Report STANDBY."""
    TAKE_OVER = auto()
    """Draw an author and hand the log off to it; without a log, RECOVERED follows at once."""
    OPEN_STORE = auto()
    """Open the store and restore its checkpoint."""
    SERVE = auto()
    """Store recovered hints, send stored intents, report PRIMARY, run transactions."""
    RESTORE = auto()
    """Restore the checkpoint again, and continue from it."""
    REPORT_FAILURE = auto()
    """Report FAILED with the error's text; end both tasks, keep a store that was ready."""
    SHUT_DOWN = auto()
    """Cancel all tasks, wait for them and for open resolutions, destroy the store."""


class Transition(NamedTuple):
    """Result of an input."""

    effect: Effect
    state: State


_TABLE: dict[tuple[State, Input], Transition] = {
    (State.IDLE, Input.STARTED): Transition(Effect.PLAY, State.BACKFILL),
    (State.IDLE, Input.STARTED_WITHOUT_LOG): Transition(Effect.REPORT_STANDBY, State.STANDBY),
    (State.BACKFILL, Input.TAILING): Transition(Effect.REPORT_STANDBY, State.STANDBY),
    # A hand-off does not wait for the write head: playback itself orders the fence after it.
    (State.BACKFILL, Input.PROMOTED): Transition(Effect.TAKE_OVER, State.TAKING_OVER),
    (State.STANDBY, Input.PROMOTED): Transition(Effect.TAKE_OVER, State.TAKING_OVER),
    # A late report would take nothing back, because codes in Etcd never go down.
    (State.TAKING_OVER, Input.TAILING): Transition(Effect.NONE, State.TAKING_OVER),
    (State.TAKING_OVER, Input.RECOVERED): Transition(Effect.OPEN_STORE, State.OPENING),
    (State.OPENING, Input.RESTORED): Transition(Effect.SERVE, State.PRIMARY),
    (State.PRIMARY, Input.INPUT_ENDED): Transition(Effect.RESTORE, State.PRIMARY),
}
_ENDED = frozenset({State.FAILED, State.STOPPED})


def transition(state: State, event: Input) -> Transition:
    """Return the effect of an input, and the state after it.

    Raises:
        ValueError: the input cannot happen in this state.
    """
    if event is Input.CANCELLED:
        if state is State.STOPPED:
            return Transition(Effect.NONE, State.STOPPED)
        return Transition(Effect.SHUT_DOWN, State.STOPPED)
    if state in _ENDED:
        return Transition(Effect.NONE, state)  # tasks that are ending may report what they did
    if event is Input.ERROR:
        return Transition(Effect.REPORT_FAILURE, State.FAILED)
    found = _TABLE.get((state, event))
    if found is None:
        raise ValueError(f"a shard in state {state.name} cannot have the input {event.name}")
    return found


class Lifecycle:
    """State of one shard.

    Attributes:
        state: the state.
    """

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = State.IDLE

    def advance(self, event: Input) -> Effect:
        """Take an input, and return the effect to perform.

        Raises:
            ValueError: the input cannot happen in this state.
        """
        effect, self.state = transition(self.state, event)
        return effect

    @property
    def is_ended(self) -> bool:
        """True if the shard failed or was stopped."""
        return self.state in _ENDED


_log = logging.getLogger(__name__)


T = TypeVar("T")

POLL_S = 0.05
"""Pause between two looks at shards that are not there yet."""

SHOWN_MAX = 5
"""Number of shards in a text."""


class Ask(Protocol):
    """Function that asks a process of the application, until one answers."""

    def __call__(self, call: Callable[[ShardClient], Awaitable[T]], /) -> Awaitable[T]:
        """Return what the call returns."""


async def until_caught_up(
    application: Application[Any, Any], transport: Transport, ask: Ask
) -> None:
    """Wait until the shards have read through what their sources hold by now. The caller bounds it.

    Args:
        application: the application.
        transport: to the journals.
        ask: asks a process.

    Raises:
        GazetteError: the journals cannot be listed, or not be appended to.
    """
    listings = await list_topics(transport, selectors_of(application.all_sources))
    whole = group_journals(application.all_sources, listings).whole
    of_all = {spec.name for topic in whole.values() for spec in topic}
    for journal, head in (await _heads(listings, transport, ask)).items():
        reader = application.full_name if journal in of_all else ""
        for shard in await shards_of(journal, ask, every_shard_of=reader):
            request = cpb.StatRequest(shard=shard.id, read_through={journal: head})
            await _until_read(request, ask)


async def _until_read(request: cpb.StatRequest, ask: Ask) -> None:
    """Wait until a shard has read through offsets, also while its primary changes."""
    while True:
        try:
            response = await ask(lambda client: client.stat(request))
        except UnavailableError:
            pass  # the primary has died, and Etcd does not know yet
        else:
            if response.status == cpb.OK:
                return
        await asyncio.sleep(POLL_S)


async def shards_of(journal: str, ask: Ask, *, every_shard_of: str = "") -> Sequence[cpb.ShardSpec]:
    """Return the shards that read a journal, once there is one. The caller bounds the wait.

    Args:
        journal: its name.
        ask: asks a process.
        every_shard_of: name of an application whose shards are all to read it; empty for none.
    """
    while True:
        specs = [each.spec for each in (await ask(lambda client: client.list())).shards]
        found = [spec for spec in specs if journal in source_journals(spec)]
        wanted = [spec for spec in specs if is_generated(every_shard_of, spec)]
        if found and all(spec in found for spec in wanted):
            return found
        await asyncio.sleep(POLL_S)


async def _heads(
    listings: Sequence[Sequence[pb.JournalSpec]], transport: Transport, ask: Ask
) -> Mapping[str, int]:
    """Return the write heads of the sources: those of listings, or without any of all shards."""
    names = [journal.name for listing in listings for journal in listing]
    if not listings:
        shards = (await ask(lambda client: client.list())).shards
        names = [journal for shard in shards for journal in source_journals(shard.spec)]
    heads = {}
    for name in names:
        response = await append(transport, pb.AppendRequest(journal=name), [])
        heads[name] = response.commit.end
    return heads


def status_text(shards: Sequence[cpb.ListResponse.Shard]) -> str:
    """Return the members and statuses of a few shards, for an error; failed ones first."""
    failed = cpb.ReplicaStatus.FAILED
    shards = sorted(shards, key=lambda shard: all(s.code != failed for s in shard.status))
    return "; ".join(
        f"{shard.spec.id}: "
        + ", ".join(
            f"{member.suffix}{'*' if place == shard.route.primary else ''} "
            f"{cpb.ReplicaStatus.Code.Name(status.code)} {' '.join(status.errors)}".strip()
            for place, (member, status) in enumerate(
                zip(shard.route.members, shard.status, strict=True)
            )
        )
        for shard in shards[:SHOWN_MAX]
    )

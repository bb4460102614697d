"""``gazctl brokers drain``: brokers that drain and start again, one after the other.

A broker that is asked to drain does what it does at SIGTERM, and ends. What supervises its process
starts it again, with the version that is installed by then. So this command asks, and waits. It
keeps no state, and can be ended at any time: the next one begins with a broker that drains.

A plan, and the reason why a broker cannot leave, are pure functions of what brokers answer.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

import orjson
from google.protobuf.message import Message

from gazette_sdk.cli.allocator import counted, some_names
from gazette_sdk.cli.client import BROKER_CLIENT, call_cluster, open_broker
from gazette_sdk.cli.formats import Progress, open_progress, write_table
from gazette_sdk.cli.journals.read import time_of
from gazette_sdk.cli.program import TIMED_OUT, CommandFailedError, Invocation, explain
from gazette_sdk.cli.settings import DRAIN, DrainSettings
from gazette_sdk.cluster.allocator.simulation import (
    ClusterChange,
    ClusterDescription,
    DescribedItem,
    DescribedMember,
    MemberId,
    Simulation,
    simulate,
)
from gazette_sdk.errors import (
    CallError,
    ConfigurationError,
    DeadlineExceededError,
    GazetteError,
    UnavailableError,
    ValidationError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol.authorization import Capability
from gazette_sdk.protocol.durations import SECOND_NS, format_duration
from gazette_sdk.protocol.journal_spec import desired_replication
from gazette_sdk.protocol.names import may_send_token
from gazette_sdk.protocol.rules import DRAIN_RPC, JOURNALS_PAGE_RPC, MEMBERS_RPC, Rpc
from gazette_sdk.retries import retrying
from gazette_sdk.transport.listing import list_journals

CALL_TIMEOUT_S = 10.0
"""Longest time of a call. Brokers wait for their members for a second."""

ASK_PATIENCE_S = 30.0
"""Longest time of attempts to reach a broker that is to be asked."""

REASONS_MAX = 3
"""Brokers that cannot leave of which an error says why."""

POLL_S = 1.0
"""Time between two looks at the cluster."""

Members = Mapping[MemberId, clpb.Member]
"""Brokers by their ids, in order."""

_NOT_IN_SYNC = (
    clpb.JOURNAL_SHORT,
    clpb.JOURNAL_NO_PRIMARY,
    clpb.JOURNAL_UNASSIGNED,
    clpb.JOURNAL_WAITING,
)


class WaitTimedOutError(CommandFailedError):
    """End of a wait by ``--wait-timeout``."""

    exit_status = TIMED_OUT


# ---------------------------------------------------------------- plan


@dataclass(frozen=True, slots=True)
class Step:
    """Broker of a plan.

    Attributes:
        id: its zone and id.
        member: its description, as of the plan.
        passed: why it is passed over; empty if it is to drain.
    """

    id: MemberId
    member: clpb.Member
    passed: str = ""


def plan(members: Members, settings: DrainSettings) -> Sequence[Step]:
    """Return the brokers that options name, in the order in which they drain.

    One that drains already is the first.

    Args:
        members: all brokers.
        settings: the options.

    Raises:
        ConfigurationError: an option names no broker, or no time.
        CommandFailedError: a broker cannot be asked to drain.
    """
    since_us = None
    if settings.started_before:
        since_us = time_of(settings.started_before, "--started-before").timestamp() * 1e6
    steps = []
    for name in _named(members, settings.broker):
        member = members[name]
        if member.error:
            raise CommandFailedError(
                f"{name} cannot be asked to drain: {member.error}; mend that, or end its process"
            )
        if not member.version:
            raise CommandFailedError(
                f"{name} cannot be asked to drain: it is of another implementation; drain it by "
                "SIGTERM, and name the others with --broker"
            )
        passed = ""
        if settings.to_version and member.version == settings.to_version:
            passed = f"it runs {member.version}"
        elif since_us is not None and member.started_us >= since_us:
            passed = f"it has started at {_time(member.started_us)}"
        steps.append(Step(name, member, "" if member.exiting else passed))
    return sorted(steps, key=lambda step: not step.member.exiting)


def _named(members: Members, names: Sequence[str]) -> Iterable[MemberId]:
    """Return the brokers that options name, or all by zone and id.

    Raises:
        ConfigurationError: an option names no broker.
    """
    if not names:
        return sorted(members)
    found: dict[MemberId, None] = {}
    for text in names:
        try:
            name = MemberId.parse(text)
        except ValidationError as error:
            raise ConfigurationError(f"--broker: {error}") from error
        if name not in members:
            known = ", ".join(map(str, sorted(members))) or "none"
            raise ConfigurationError(
                f"--broker: there is no broker {name} now; there are {known}. Start it, if it has "
                "drained"
            )
        found[name] = None
    return found


def describe(
    members: Members, listing: pb.ListResponse, *, max_replication: int, back: Collection[MemberId]
) -> ClusterDescription:
    """Return the description of a cluster, for simulations.

    Args:
        members: its brokers.
        listing: its journals.
        max_replication: cap of every journal's replication.
        back: brokers that start again after they have drained, and so do not leave.
    """
    items = []
    for journal in listing.journals:
        route, spec = journal.route, journal.spec
        holders = [MemberId(each.zone, each.suffix) for each in route.members]
        if route.primary >= 0:
            holders.insert(0, holders.pop(route.primary))
        known = tuple(each for each in holders if each in members)
        items.append(DescribedItem(spec.name, desired_replication(spec, max_replication), known))
    described = tuple(
        DescribedMember(name, member.limit, member.exiting and name not in back)
        for name, member in members.items()
    )
    return ClusterDescription(described, tuple(items))


def refusals(
    description: ClusterDescription, brokers: Iterable[MemberId], *, allow_single_zone: bool = False
) -> Sequence[str]:
    """Return why brokers cannot leave, one at a time; none if the others have room for all.

    Args:
        description: the cluster.
        brokers: the brokers.
        allow_single_zone: True if journals may have all replicas in one zone meanwhile.
    """
    present = simulate(description, ClusterChange())
    if lacking := present.unplaced:
        names = some_names([each.name for each in lacking])
        lack = f"{counted(len(lacking), 'journal')} cannot have all replicas as it is"
        return [f"{lack} ({lacking[0].reason}): {names}; `gazctl report` has more"]
    found = []
    for broker in brokers:
        simulation = simulate(present.after, ClusterChange(drained=(broker,)))
        single_zone = set(simulation.single_zone).difference(present.single_zone)
        if broker in simulation.staying:
            found.append(_no_room(broker, simulation))
        elif single_zone and not allow_single_zone:
            found.append(
                f"{broker} should not leave, since {counted(len(single_zone), 'journal')} would "
                f"have all replicas in one zone: {some_names(sorted(single_zone))}; start another "
                "broker in its zone or in a third one, or give --allow-single-zone"
            )
    return found


def room_of(description: ClusterDescription) -> object:
    """Return all on which it depends if brokers have room: limits, zones and replicas."""
    return (
        tuple(sorted(description.members, key=lambda member: member.id)),
        tuple((item.name, item.replication) for item in description.items),
    )


def _no_room(broker: MemberId, simulation: Simulation) -> str:
    """Return why a broker cannot leave for which a simulation has found no room."""
    held = [item for item in simulation.after.items if broker in item.holders]
    usable = sum(member.limit > 0 and not member.exiting for member in simulation.after.members)
    if wide := [item for item in held if item.replication > usable]:
        most = max(item.replication for item in wide)
        return (
            f"{broker} cannot leave, since R = {most} needs {counted(most, 'other broker')}, and "
            f"there are {usable}: start another one; {some_names([item.name for item in wide])}"
        )
    full = [
        f"{each.id} has {each.after.replicas} of {each.limit}"
        for each in simulation.members
        if each.id != broker and each.after is not None and each.after.ratio >= 1
    ]
    remedy = f"{', '.join(full)}: raise --broker.limit there, or " if full else ""
    return (
        f"{broker} cannot leave, since {counted(len(held), 'replica')} would have no place on the "
        f"others ({remedy}start another broker): {some_names([item.name for item in held])}"
    )


# ---------------------------------------------------------------- cluster


_FINAL = frozenset(
    {"ABORTED", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "NOT_FOUND", "UNAUTHENTICATED"}
    | {"UNIMPLEMENTED"}
)
"""Codes after which a call is not made again."""


def _is_final(error: GazetteError) -> bool:
    return isinstance(error, CallError) and error.code in _FINAL


class Cluster:
    """A cluster, as its brokers show it.

    The broker at the address of the options is among those that drain. While it does not answer,
    the others are asked.

    Args:
        invocation: the call of the command.
    """

    def __init__(self, invocation: Invocation) -> None:
        self._invocation = invocation
        self._settings = invocation.settings(DRAIN)
        self._given = invocation.settings(BROKER_CLIENT).address
        self._addresses = [self._given]  # the one that answered last is the first

    async def members(self) -> tuple[Members, int]:
        """Return the brokers, and the revision of Etcd of which they are.

        Raises:
            CallError: no broker answers, or the one that does has no such call.
        """
        answer = await self._call(MEMBERS_RPC, clpb.MembersRequest(), Capability.LIST)
        found = {
            MemberId(each.id.zone, each.id.suffix): each
            for each in answer.members
            if each.component == "broker"
        }
        endpoints = (each.endpoint for each in found.values())
        sendable = [each for each in endpoints if may_send_token(self._given, each)]
        self._addresses = list(dict.fromkeys([self._addresses[0], self._given, *sendable]))
        return dict(sorted(found.items())), answer.header.etcd.revision

    async def describe(self, back: Collection[MemberId]) -> ClusterDescription:
        """Return the description of the cluster, for simulations.

        Args:
            back: brokers that start again after they have drained.

        Raises:
            GazetteError: it could not be listed.
        """
        async with open_broker(self._invocation) as transport:
            listing = await list_journals(transport)
        members, _ = await self.members()
        return describe(members, listing, max_replication=self._settings.max_replication, back=back)

    async def not_in_sync(self, revision: int) -> str:
        """Return what is said of journals whose replicas are not in sync; empty if there are none.

        Args:
            revision: of Etcd, at which or after which they are looked at.

        Raises:
            CallError: no broker answers.
        """
        request = clpb.JournalsPageRequest(limit=3, states=_NOT_IN_SYNC)
        page = await self._call(JOURNALS_PAGE_RPC, request, Capability.LIST)
        if page.revision < revision:
            return "journals are looked at again"
        if not page.total:
            return ""
        names = [row.name for row in page.rows]
        rest = page.total - len(names)
        shown = ", ".join(names) + (f" and {rest} more" if rest > 0 else "")
        return f"{counted(page.total, 'journal')} not in sync: {shown}"

    async def ask(self, member: clpb.Member) -> None:
        """Ask a broker to drain. It may have started again since; then it is left alone.

        Raises:
            CallError: it cannot be asked.
        """
        request = clpb.DrainRequest(id=member.id, started_us=member.started_us)

        async def call() -> None:
            await self._call(DRAIN_RPC, request, Capability.APPLY)

        try:
            await retrying(
                call, (UnavailableError, DeadlineExceededError), patience_s=ASK_PATIENCE_S
            )
        except CallError as error:
            if error.code != "ABORTED":
                raise

    async def _call(self, rpc: Rpc, request: Message, rights: int) -> Any:
        """Return the answer of the first broker that gives one.

        Raises:
            CallError: there is none.
        """
        failures: list[GazetteError] = []
        for address in self._addresses:
            try:
                answer = await call_cluster(
                    self._invocation,
                    rpc,
                    request,
                    CALL_TIMEOUT_S,
                    address=address,
                    rights=rights,
                )
            except GazetteError as error:
                if _is_final(error):
                    raise _explained(error, address) from error
                failures.append(error)
            else:
                self._addresses.remove(address)
                self._addresses.insert(0, address)
                return answer
        raise failures[0]


def _explained(error: GazetteError, address: str) -> GazetteError:
    """Return the error of a call that the broker at an address does not have, in words."""
    if isinstance(error, CallError) and error.code == "UNIMPLEMENTED":
        return CommandFailedError(
            f"the broker at {address} has no call for this: it is of an older version, or of "
            "another implementation; drain it by SIGTERM"
        )
    return error


# ---------------------------------------------------------------- waits


class Look(NamedTuple):
    """State of the cluster, while something is waited for.

    Attributes:
        stage: what is waited for: ``drain``, ``start`` or ``sync``.
        text: the state, as a clause.
        left: replicas that are left to be moved.
    """

    stage: Literal["drain", "start", "sync"]
    text: str
    left: int = 0


def look_at(step: Step, members: Members) -> Look | None:
    """Return what is waited for of a broker that was asked to drain; None once it is back.

    Args:
        step: the broker, as it was before.
        members: the present brokers.
    """
    member = members.get(step.id)
    if member is None:
        return Look("start", "it has left, and has not started again")
    is_same = member.started_us == step.member.started_us and bool(member.version)
    if member.exiting or is_same:
        held = counted(member.replicas, "replica")
        return Look("drain", f"it has {held} that others must take over", member.replicas)
    if member.error or not member.version:
        return Look("start", f"it does not answer yet ({member.error or 'no version'})")
    return None


_REMEDIES = {
    "drain": "it drains further; `gazctl report` shows what is in the way",
    "start": (
        "what supervises its process must start it also after exit status 0, as systemd does with "
        "Restart=always; start it"
    ),
    "sync": "`gazctl report` shows what is in the way",
}


class _Run:
    """A run of the command.

    Args:
        invocation: the call of the command.
        progress: where it is shown.
    """

    def __init__(self, invocation: Invocation, progress: Progress) -> None:
        self._settings = invocation.settings(DRAIN)
        self._cluster = Cluster(invocation)
        self._progress = progress
        self._begun_us = round(time.time() * 1e6)
        self._shown = ""
        self._due: Sequence[Step] = ()
        self._suffices: object = None

    async def run(self) -> None:
        """Drain all brokers of the plan.

        Raises:
            CommandFailedError: there is no room, a wait took too long, or a broker is not as it
                should be.
            GazetteError: a call failed.
        """
        settings, cluster = self._settings, self._cluster
        members, _ = await cluster.members()
        steps = plan(members, settings)
        due = self._due = [step for step in steps if not step.passed]
        refused = await self._refusals(due)
        if settings.dry_run:
            show_plan(steps, settings.format)
        if refused:
            raise CommandFailedError("; ".join([*refused[:REASONS_MAX], "nothing was drained"]))
        if settings.dry_run:
            return
        for step in steps:
            if step.passed:
                show(settings.format, step, "passed", f"passed over: {step.passed}")
        for step in due:
            await self._drain(step)

    async def _refusals(self, due: Sequence[Step]) -> Sequence[str]:
        """Return why brokers of a plan cannot leave.

        Nothing is simulated again while limits and journals are as they were found to suffice.
        """
        if not due:
            return ()
        description = await self._cluster.describe([step.id for step in due])
        if (wanted := room_of(description)) == self._suffices:
            return ()
        self._progress.begin("room on the other brokers")
        found = refusals(
            description,
            [step.id for step in due if not step.member.exiting],
            allow_single_zone=self._settings.allow_single_zone,
        )
        if not found and len(due) == len(self._due):
            self._suffices = wanted
        return found

    async def _drain(self, step: Step) -> None:
        """Drain one broker, and wait until it is back."""
        settings, cluster = self._settings, self._cluster
        begin_s = time.monotonic()
        if not step.member.exiting:
            await self._until_settled(step)
            if refused := await self._refusals([step]):
                raise CommandFailedError(f"{refused[0]}; then {self._hint()}")
            members, _ = await cluster.members()
            step = replace(step, member=members.get(step.id, step.member))
            begin_s = time.monotonic()
            await cluster.ask(step.member)
        if not settings.wait:
            held = counted(step.member.replicas, "replica")
            show(settings.format, step, "draining", f"drains {held}, and ends then")
            return
        version = await self._until_back(step)
        took = format_duration(round(time.monotonic() - begin_s) * SECOND_NS)
        if settings.to_version and version != settings.to_version:
            raise CommandFailedError(
                f"{step.id} is back with version {version}, and not {settings.to_version}: install "
                f"that on its host; {self._hint()}"
            )
        held = counted(step.member.replicas, "replica")
        text = f"drained {held}, and is back with version {version} after {took}"
        show(settings.format, step, "restarted", text, version=version)

    async def _until_settled(self, step: Step) -> None:
        """Wait until no broker drains, and all journals are in sync."""

        async def look() -> Look | None:
            members, revision = await self._cluster.members()
            exiting = [str(name) for name, member in members.items() if member.exiting]
            if exiting:
                return Look("sync", f"{', '.join(exiting)} drains")
            text = await self._cluster.not_in_sync(revision)
            return Look("sync", text) if text else None

        await self._until(f"{step.id} was not asked to drain", str(step.id), look)

    async def _until_back(self, step: Step) -> str:
        """Wait until a broker has drained and serves again, and all journals are in sync.

        Returns:
            its version.
        """
        version = ""

        async def look() -> Look | None:
            nonlocal version
            members, revision = await self._cluster.members()
            found = look_at(step, members)
            if found is None:
                version = members[step.id].version
                text = await self._cluster.not_in_sync(revision)
                found = Look("sync", text) if text else None
            return found

        await self._until(f"{step.id} is not done", str(step.id), look, step.member.replicas)
        return version

    async def _until(
        self, what: str, name: str, look: Callable[[], Awaitable[Look | None]], replicas: int = 0
    ) -> None:
        """Look at the cluster until there is nothing to wait for.

        Args:
            what: the failure, as a clause.
            name: name of the broker.
            look: looks; None for nothing.
            replicas: replicas that are to be moved.

        Raises:
            WaitTimedOutError: it took too long.
            CallError: a call is refused.
        """
        limit_s = self._settings.wait_timeout_s
        last = Look("sync", "no broker answers")
        try:
            async with asyncio.timeout(limit_s) as bound:
                while True:
                    try:
                        found = await look()
                    except GazetteError as error:
                        if _is_final(error) or isinstance(error, CommandFailedError):
                            raise
                        found = last._replace(text=explain(error))
                    if found is None:
                        return
                    last = found
                    self._show_wait(name, found, replicas)
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            if not bound.expired():
                raise
            limit = format_duration(round(limit_s * SECOND_NS))
            raise WaitTimedOutError(
                f"{what} within {limit} (--wait-timeout): {last.text}; {_REMEDIES[last.stage]}. "
                f"Then {self._hint()}"
            ) from None
        except asyncio.CancelledError:
            sys.stderr.write(f"{what}: {last.text}; {self._hint()}\n")
            raise

    def _show_wait(self, name: str, found: Look, replicas: int) -> None:
        stage = f"{name}: {found.stage}"
        if stage != self._shown:
            self._shown = stage
            is_drain = found.stage == "drain"
            self._progress.begin(stage, max(replicas, found.left) if is_drain else None)
            if not sys.stderr.isatty():
                sys.stderr.write(f"{name}: {found.text}\n")
                sys.stderr.flush()
        if found.stage == "drain":
            self._progress.advance(max(0, replicas - found.left))

    def _hint(self) -> str:
        """Return how the command is continued."""
        settings = self._settings
        if settings.to_version or settings.started_before or not settings.one_by_one:
            return "run the command again to continue"
        return f"run the command again with --started-before {_time(self._begun_us)} to continue"


async def run(invocation: Invocation) -> None:
    """Drain brokers, one after the other.

    Raises:
        ConfigurationError: options exclude each other, or name no broker.
        CommandFailedError: there is no room, a wait took too long, or a broker is not as it should
            be.
        GazetteError: a call failed.
    """
    settings = invocation.settings(DRAIN)
    check(settings)
    with open_progress("messages") as progress:
        await _Run(invocation, progress).run()


def check(settings: DrainSettings) -> None:
    """Check options together.

    Raises:
        ConfigurationError: they exclude each other.
    """
    if settings.one_by_one and not settings.wait:
        raise ConfigurationError(
            "--one-by-one drains a broker when the one before is back: give --wait, too"
        )
    if not settings.one_by_one and len(set(settings.broker)) != 1:
        raise ConfigurationError(
            "brokers drain one after the other: give --one-by-one --wait, or name one broker with "
            "--broker ZONE/ID"
        )


# ---------------------------------------------------------------- output


def show(format_: str, step: Step, outcome: str, text: str, *, version: str = "") -> None:
    """Write what came of a broker: one line, or one JSON object.

    Args:
        format_: ``table`` or ``json``.
        step: the broker.
        outcome: ``restarted``, ``passed`` or ``draining``.
        text: the same in words.
        version: version that it runs now; by default the one that it had.
    """
    if format_ == "json":
        _write_json(step, outcome, text, version=version)
    else:
        sys.stdout.write(f"{step.id}: {text}\n")
    sys.stdout.flush()


def show_plan(steps: Sequence[Step], format_: str) -> None:
    """Write a plan.

    Args:
        steps: its brokers.
        format_: ``table`` or ``json``.
    """
    rows = []
    for step in steps:
        outcome, text = "planned", "drain"
        if step.passed:
            outcome, text = "passed", f"pass over: {step.passed}"
        elif step.member.exiting:
            text = "wait: it drains"
        if format_ == "json":
            _write_json(step, outcome, text)
        member = step.member
        cells = [str(step.id), member.version, _time(member.started_us)]
        rows.append([*cells, str(member.replicas), str(member.primaries), text])
    if format_ != "json":
        write_table(["Broker", "Version", "Started", "Replicas", "Primaries", "Step"], rows)
    sys.stdout.flush()


def _write_json(step: Step, outcome: str, text: str, *, version: str = "") -> None:
    value = {
        "zone": step.id.zone,
        "id": step.id.id,
        "outcome": outcome,
        "text": text,
        "version": version or step.member.version,
        "version_before": step.member.version,
        "replicas": step.member.replicas,
    }
    sys.stdout.write(orjson.dumps(value).decode() + "\n")


def _time(us: int) -> str:
    return (
        datetime.fromtimestamp(us / 1e6, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    )

"""Verification of members that may be dead, brokers and consumers: a dead one loses its lease.

The driver (:class:`Verifier`) performs the action of the current state, and reports the result as
one :class:`Input`. A member is deposed only if its endpoint refuses every dial, or closes it before
the first byte of an answer, *and* it leaves a challenge in Etcd unanswered. One that others or Etcd
still hear answers the challenge, or others do so in its place: so a cut link never deposes it, also
one that refuses.

Challenges are keys in Etcd that a living member deletes at once. They stand below
``/gazette_sdk/failover{root}``, outside the cluster's own prefix::

    answering/{zone}#{suffix}     the member answers challenges; under its own lease
    challenges/{zone}#{suffix}    asks the member whether it lives; under the verifier's lease

A challenge is created by one verifier at a time. The challenged deletes it. So does every other
member which reaches its endpoint: a member that others hear is never deposed.

A dial of a member's endpoint distinguishes a dead process from one that cannot be reached.

Evidence is a stream or a link that broke, or a call that could not be carried. It only begins a
verification, which the table of :func:`step` defines: evidence of a member that lives costs it a
few connections. Consumers have no streams to each other that would break. So each holds a
connection to a few others (:class:`Neighbours`), those whose keys follow its own, in a ring. As
long as one of three members next to each other lives, a death is noticed; if they die together, the
ring closes over them one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeAlias

from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Compare, Delete, Put
from gazette_sdk.cluster.items import MemberEntry, ProcessKeySpace
from gazette_sdk.cluster.keyspace import Entry, KeySpace
from gazette_sdk.contexts import logged_context
from gazette_sdk.errors import EtcdError, GazetteError, LeaseLostError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import names as urls


class State(enum.Enum):
    """State of a verification. The last three are its ends."""

    DIAL = enum.auto()
    DIAL_LATER = enum.auto()
    DIAL_AGAIN = enum.auto()
    CHALLENGE = enum.auto()
    AWAIT_VERIFIER = enum.auto()
    AWAIT_ANSWER = enum.auto()
    DIAL_LAST = enum.auto()
    CONDEMN = enum.auto()
    REVOKE = enum.auto()
    ALIVE = enum.auto()
    UNDECIDED = enum.auto()
    DEPOSED = enum.auto()


ENDS = frozenset({State.ALIVE, State.UNDECIDED, State.DEPOSED})
"""States in which a verification has ended. Where it is undecided, the lease decides."""


DIALS = frozenset({State.DIAL, State.DIAL_LATER, State.DIAL_AGAIN, State.DIAL_LAST})
"""States whose action is a dial."""


class Input(enum.Enum):
    """Result of a state's action."""

    REFUSED = enum.auto()
    """The host is there, and nothing listens at the endpoint."""
    CLOSED = enum.auto()
    """The connection was closed before the first byte of an answer: by a proxy, load balancer or
    service mesh in front of a process that does not listen, or by a link that resets."""
    REACHED = enum.auto()
    """The endpoint answered."""
    UNCLEAR = enum.auto()
    """The dial failed otherwise: the host may be away, or the network."""
    CREATED = enum.auto()
    """The challenge is ours."""
    HELD = enum.auto()
    """Another member has challenged the suspect."""
    FREE = enum.auto()
    """The challenge of another member has ended."""
    ANSWERED = enum.auto()
    """Our challenge is gone, or the lease was renewed: the suspect lives."""
    UNANSWERED = enum.auto()
    """The time to answer is over."""
    CONFIRMED = enum.auto()
    """Etcd has ended our challenge; it was unanswered, and the member key was as before."""
    REVOKED = enum.auto()
    """The lease has ended."""
    FAILED = enum.auto()
    """Etcd refused, or did not answer."""


NOTHING_LISTENS = frozenset({Input.REFUSED, Input.CLOSED})
"""Results of a dial that stand for a dead process, if the challenge is unanswered, too."""

VERIFICATION: Mapping[tuple[State, Input], State] = {
    (State.DIAL, Input.REFUSED): State.DIAL_AGAIN,
    (State.DIAL, Input.CLOSED): State.DIAL_AGAIN,
    # A process that is killed may close its listener after its connections.
    (State.DIAL, Input.REACHED): State.DIAL_LATER,
    (State.DIAL, Input.UNCLEAR): State.UNDECIDED,
    (State.DIAL_LATER, Input.REFUSED): State.DIAL_AGAIN,
    (State.DIAL_LATER, Input.CLOSED): State.DIAL_AGAIN,
    (State.DIAL_LATER, Input.REACHED): State.ALIVE,
    (State.DIAL_LATER, Input.UNCLEAR): State.UNDECIDED,
    (State.DIAL_AGAIN, Input.REFUSED): State.CHALLENGE,
    (State.DIAL_AGAIN, Input.CLOSED): State.CHALLENGE,
    (State.DIAL_AGAIN, Input.REACHED): State.ALIVE,
    (State.DIAL_AGAIN, Input.UNCLEAR): State.UNDECIDED,
    (State.CHALLENGE, Input.CREATED): State.AWAIT_ANSWER,
    (State.CHALLENGE, Input.HELD): State.AWAIT_VERIFIER,
    (State.CHALLENGE, Input.FAILED): State.UNDECIDED,
    # The other verifier may have died, too: its challenge ends with its own lease.
    (State.AWAIT_VERIFIER, Input.FREE): State.DIAL,
    (State.AWAIT_VERIFIER, Input.FAILED): State.UNDECIDED,
    (State.AWAIT_ANSWER, Input.ANSWERED): State.ALIVE,
    (State.AWAIT_ANSWER, Input.UNANSWERED): State.DIAL_LAST,
    (State.AWAIT_ANSWER, Input.FAILED): State.UNDECIDED,
    (State.DIAL_LAST, Input.REFUSED): State.CONDEMN,
    (State.DIAL_LAST, Input.CLOSED): State.CONDEMN,
    (State.DIAL_LAST, Input.REACHED): State.ALIVE,
    (State.DIAL_LAST, Input.UNCLEAR): State.UNDECIDED,
    (State.CONDEMN, Input.CONFIRMED): State.REVOKE,
    (State.CONDEMN, Input.ANSWERED): State.ALIVE,
    (State.CONDEMN, Input.FAILED): State.UNDECIDED,
    (State.REVOKE, Input.REVOKED): State.DEPOSED,
    (State.REVOKE, Input.FAILED): State.UNDECIDED,
}
"""(state, input) → next state. Other pairs cannot happen."""


def step(state: State, given: Input) -> State:
    """Return the entry of :data:`VERIFICATION`.

    Raises:
        AssertionError: the input cannot happen in this state: a bug of the driver.
    """
    after = VERIFICATION.get((state, given))
    assert after is not None, f"{given.name} cannot happen to a verification in {state.name}"
    return after


MEMBERS_MIN = 2
"""Members of a cluster in which challenges are made."""

_log = logging.getLogger(__name__)


class Challenges:
    """Answers of one member to challenges, and its own challenges of others.

    Args:
        etcd: the client.
        keyspace: mirror of the cluster.
        local_id: this member.
        lease: id of this member's lease.
        dial: dials an endpoint.
    """

    def __init__(
        self,
        etcd: Etcd,
        keyspace: ProcessKeySpace[Any, Any, Any],
        local_id: pb.ProcessSpec.ID,
        lease: int,
        dial: Callable[[str], Awaitable[Input]],
    ) -> None:
        self._etcd = etcd
        self._keyspace = keyspace
        self._local_id = local_id
        self._lease = lease
        self._dial = dial
        root = f"/gazette_sdk/failover{keyspace.root.rstrip('/')}"
        self._mirror = KeySpace(root, _decode)
        self._mirror.observers.append(self._observe)
        self._answering: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Answer challenges, until cancelled. Etcd may forbid it: then leases decide alone."""
        try:
            await self._mirror.keep(
                self._etcd, "watch of fail-over challenges", self._announce, delay_s=0
            )
        finally:
            answering = list(self._answering)
            for task in answering:
                task.cancel()
            if answering:
                await asyncio.wait(answering)

    async def _announce(self) -> None:
        """Tell that we answer challenges, when there is a member which may challenge us."""
        while len(self._keyspace.members()) < MEMBERS_MIN:
            await self._keyspace.wait_for_update()
        key = self._key("answering", self._local_id)
        await self._etcd.txn((), (Put(key, b"", self._lease),))

    # ---------------------------------------------------------- of a verifier

    def are_answered_by(self, member: pb.ProcessSpec.ID, lease: int) -> bool:
        """Return True if a member, under its present lease, answers challenges while it lives."""
        entry = self._mirror.find(self._key("answering", member))
        return entry is not None and entry.lease == lease

    async def create(self, member: pb.ProcessSpec.ID) -> int:
        """Challenge a member. Return the revision of the challenge; 0 if there is one already.

        Raises:
            EtcdError: Etcd refused, or did not answer.
        """
        key = self._key("challenges", member)
        value = _name(self._local_id).encode()
        result = await self._etcd.txn((Compare.version(key, 0),), (Put(key, value, self._lease),))
        return result.revision if result.succeeded else 0

    async def gone(self, member: pb.ProcessSpec.ID, revision: int = 0) -> None:
        """Return when there is no challenge of a member that is as new as ``revision``."""
        key = self._key("challenges", member)
        while self._mirror.find(key) is not None or self._mirror.header.revision < revision:
            await self._mirror.wait_for_update()

    async def end(self, member: pb.ProcessSpec.ID, revision: int, *compares: Compare) -> bool:
        """Delete a challenge. Return True if it was unanswered, and everything compared holds.

        Args:
            member: the challenged.
            revision: of the challenge.
            compares: further conditions.

        Raises:
            EtcdError: Etcd refused, or did not answer.
        """
        key = self._key("challenges", member)
        compare = Compare.create_revision(key, revision)
        return (await self._etcd.txn((compare, *compares), (Delete(key),))).succeeded

    # ---------------------------------------------------------- of the challenged, and others

    def _observe(self) -> None:
        """Answer the challenges of the last changes."""
        prefix = self._key("challenges")
        for _, _, entry in self._mirror.changes:
            if entry is None or not entry.key.startswith(prefix):
                continue
            zone, _, suffix = entry.key.removeprefix(prefix).decode().partition("#")
            challenged = pb.ProcessSpec.ID(zone=zone, suffix=suffix)
            if challenged == self._local_id or entry.value != _name(self._local_id).encode():
                task = asyncio.get_running_loop().create_task(
                    self._answer(challenged, entry.create_revision), name="answer a challenge"
                )
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)

    async def _answer(self, challenged: pb.ProcessSpec.ID, revision: int) -> None:
        """Answer a challenge if it is ours, or if we reach the challenged."""
        if challenged != self._local_id:
            endpoint = self._keyspace.endpoint(challenged.zone, challenged.suffix)
            if endpoint is None or await self._dial(endpoint) is not Input.REACHED:
                return
        try:
            await self.end(challenged, revision)
        except EtcdError as error:
            _log.warning(
                "the challenge of %s was not answered: %s",
                _name(challenged),
                error,
                extra={"peer": f"{challenged.zone}/{challenged.suffix}"},
            )

    def _key(self, directory: str, member: pb.ProcessSpec.ID | None = None) -> bytes:
        return f"{self._mirror.root}/{directory}/{_name(member) if member else ''}".encode()


def _name(member: pb.ProcessSpec.ID) -> str:
    return f"{member.zone}#{member.suffix}"


def _decode(kv: Any) -> Entry[bytes]:
    return Entry.of(kv, kv.value)


DIAL_TIMEOUT_S = 0.5
"""Bound of one dial. A process that is dead refuses within a round trip."""

_QUESTION = b"GET /debug/ready HTTP/1.1\r\nHost: member\r\nConnection: close\r\n\r\n"
"""Request to which any member has an answer: a response, or with TLS an alert."""

_LASTING_QUESTION = _QUESTION.replace(b"Connection: close\r\n", b"")
"""The same, on a connection that is to stay open."""

_CHUNK_BYTES = 4096

_Hold: TypeAlias = Callable[[socket.socket], Awaitable[None]]


async def dial(endpoint: str, *, timeout_s: float = DIAL_TIMEOUT_S) -> Input:
    """Connect to an endpoint, ask for an answer, and close the connection.

    An answer is awaited because the kernel accepts connections for a frozen process, and some
    networks do for a host that they do not reach.

    Args:
        endpoint: URL of a broker or consumer: ``http://``, ``https://`` or ``unix://``.
        timeout_s: bound of the whole dial.

    Returns:
        ``REACHED`` if an address of the host answered; ``REFUSED`` if all of them refused;
        ``CLOSED`` if they did that, or accepted and closed; else ``UNCLEAR``.
    """
    return await _dial(endpoint, timeout_s, None)


async def hold(endpoint: str, *, timeout_s: float = DIAL_TIMEOUT_S) -> Input:
    """Dial an endpoint, and keep the connection that was answered until it ends.

    The kernel of a process that dies ends it at once. Arguments and results are those of
    :func:`dial`; the bound is that of the dial.
    """
    return await _dial(endpoint, timeout_s, _until_ended)


async def _dial(endpoint: str, timeout_s: float, then: _Hold | None) -> Input:
    found: list[Input] = []
    try:
        async with asyncio.timeout(timeout_s) as bound:
            async for family, address in _places(endpoint):
                with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as sock:
                    question = _QUESTION if then is None else _LASTING_QUESTION
                    found.append(await _connect(sock, address, question))
                    if found[-1] is Input.REACHED:
                        if then is not None:
                            bound.reschedule(None)
                            await then(sock)
                        return Input.REACHED
    except (OSError, ValueError, GazetteError):  # the endpoint may have no port
        return Input.UNCLEAR
    if not found or not NOTHING_LISTENS.issuperset(found):
        return Input.UNCLEAR
    return Input.CLOSED if Input.CLOSED in found else Input.REFUSED


async def _until_ended(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while await asyncio.get_running_loop().sock_recv(sock, _CHUNK_BYTES):
            pass


async def _places(endpoint: str) -> AsyncIterator[tuple[int, Any]]:
    """Yield the family and the address of each socket of an endpoint."""
    address = urls.dial_address(endpoint)
    if address.startswith("unix:"):
        yield socket.AF_UNIX, address.removeprefix("unix://")
        return
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    for family, _, _, _, place in found:
        yield family, place


async def _connect(sock: socket.socket, address: Any, question: bytes) -> Input:
    """Connect to one address, of the form of the socket's family, and await the first byte."""
    loop = asyncio.get_running_loop()
    sock.setblocking(False)
    try:
        await loop.sock_connect(sock, address)
    except ConnectionRefusedError:
        return Input.REFUSED
    except OSError:
        return Input.UNCLEAR
    try:
        # A port of this host on which no process listens may be connected to itself.
        if sock.family != socket.AF_UNIX and sock.getsockname() == sock.getpeername():
            return Input.REFUSED
        await loop.sock_sendall(sock, question)
        return Input.REACHED if await loop.sock_recv(sock, 1) else Input.CLOSED
    except OSError as error:
        is_reset = isinstance(error, ConnectionError) or error.errno == errno.ENOTCONN
        return Input.CLOSED if is_reset else Input.UNCLEAR


NEIGHBOURS_MAX = 3
"""Members that one holds connections to. Their number bounds the cost, whatever the cluster's."""

OPEN_AGAIN_S = 1.0
"""Least time between two openings of a connection. Endpoints with TLS end it after an alert."""


class _Neighbour(NamedTuple):
    """A process: the member key of its successor has another revision."""

    zone: str
    suffix: str
    create_revision: int
    endpoint: str


class Neighbours:
    """Connections to the next members in the ring of member keys.

    A connection that worked, ended, and is refused or closed when it is opened again, is evidence.
    One that never worked is none: a member is announced before its port serves.

    Args:
        keyspace: mirror of the cluster; :meth:`observe` is to be one of its observers.
        local_id: this member.
        suspect: called with a member and the reason.
        hold: dials an endpoint, and returns when the connection has ended.
    """

    def __init__(
        self,
        keyspace: ProcessKeySpace[Any, Any, Any],
        local_id: pb.ProcessSpec.ID,
        suspect: Callable[[pb.ProcessSpec.ID, object], None],
        *,
        hold: Callable[[str], Awaitable[Input]],
    ) -> None:
        self._keyspace = keyspace
        self._local_id = local_id
        self._suspect = suspect
        self._hold = hold
        self._tasks: dict[_Neighbour, asyncio.Task[None]] = {}
        self._is_running = False

    async def run(self) -> None:
        """Hold the connections, until cancelled."""
        self._is_running = True
        self.observe()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._is_running = False
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    def observe(self) -> None:
        """Open connections to new neighbours, and end those to members that are none any more."""
        if not self._is_running:
            return
        wanted = self._next_members()
        for neighbour in self._tasks.keys() - wanted:
            self._tasks[neighbour].cancel()
        for neighbour in sorted(wanted - self._tasks.keys()):
            task = asyncio.get_running_loop().create_task(
                self._follow(neighbour), name=f"neighbour {neighbour.zone}/{neighbour.suffix}"
            )
            self._tasks[neighbour] = task
            task.add_done_callback(partial(self._ended, neighbour))

    def _next_members(self) -> set[_Neighbour]:
        local = self._local_id.zone, self._local_id.suffix
        others = sorted(
            _Neighbour(
                member.zone,
                member.suffix,
                member.create_revision,
                member.value.process_spec.endpoint,
            )
            for member in self._keyspace.members()
            if (member.zone, member.suffix) != local
        )
        first = sum(each[:2] < local for each in others)
        return set((others[first:] + others[:first])[:NEIGHBOURS_MAX])

    async def _follow(self, neighbour: _Neighbour) -> None:
        """Hold a connection to a member, and suspect the member if it cannot be opened again."""
        loop = asyncio.get_running_loop()
        peer = pb.ProcessSpec.ID(zone=neighbour.zone, suffix=neighbour.suffix)
        has_worked = False
        while True:
            open_again_at = loop.time() + OPEN_AGAIN_S
            ended = await self._hold(neighbour.endpoint)
            has_worked |= ended is Input.REACHED
            if has_worked and ended in NOTHING_LISTENS:
                self._suspect(peer, "the connection to it ended, and cannot be opened again")
            await asyncio.sleep(open_again_at - loop.time())

    def _ended(self, neighbour: _Neighbour, task: asyncio.Task[None]) -> None:
        del self._tasks[neighbour]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s failed", task.get_name(), exc_info=error)
        if self._is_running:
            self.observe()  # it may be wanted again


DIAL_AGAIN_S = 0.05
"""Pause before the second dial of an endpoint that refused."""

DIAL_LATER_S = 0.2
"""Pause before the second dial of an endpoint that accepted."""

ANSWER_S = 0.3
"""Shortest time to answer a challenge."""

CLOSED_ANSWER_S = 0.6
"""The same for a member whose endpoint closes connections instead of refusing them: a proxy may do
that in front of a member that lives, and some messages of Etcd are slow."""

ANSWER_CALLS = 5
"""Time to answer, in times of the call of Etcd that made the challenge: Etcd may be slow."""

SILENT_ANSWER_S = 2.0
"""Time to answer in place of a member that does not answer challenges itself: one of another
implementation, or an earlier release."""

SILENT_ANSWER_SHARE = 0.5
"""Time to answer for such a member, as a share of the time that its lease has left, if its endpoint
closes connections instead of refusing them. A proxy may do that to a question that it does not
understand. A member that lives renews its lease in each third of its time."""

VERIFY_AGAIN_S = 1.0
"""Pause between verifications of one member that were not the last."""


class Verifier:
    """Verifier of suspected members, and observer of those that leave.

    Args:
        etcd: the client.
        keyspace: mirror of the cluster; :meth:`observe` is to be one of its observers.
        local_id: this member, which is never suspected.
        lease: id of this member's lease.
        dial: dials an endpoint.
        kind: what members are called: ``broker`` or ``consumer``.
        on_left: called with the zone and suffix of each member that left, and an error that says
            so: no call waits for its answers then.
    """

    def __init__(
        self,
        etcd: Etcd,
        keyspace: ProcessKeySpace[Any, Any, Any],
        local_id: pb.ProcessSpec.ID,
        lease: int,
        *,
        dial: Callable[[str], Awaitable[Input]],
        kind: str,
        on_left: Callable[[str, str, GazetteError], None] = lambda *_: None,
    ) -> None:
        self._etcd = etcd
        self._keyspace = keyspace
        self._local_id = local_id
        self._kind = kind
        self._on_left = on_left
        self._dial = dial
        self.challenges = Challenges(etcd, keyspace, local_id, lease, dial)
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._again: set[tuple[str, str]] = set()
        self._is_closed = False

    async def run(self) -> None:
        """Answer challenges until cancelled; then end all verifications, and begin no more."""
        try:
            await self.challenges.run()
        finally:
            self._is_closed = True
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    def observe(self) -> None:
        """Verify processes that are no members any more no longer, and report that they left."""
        for _, old, new in self._keyspace.changes:
            if new is None and isinstance(old, MemberEntry):
                if (task := self._tasks.get((old.zone, old.suffix))) is not None:
                    task.cancel()
                name = f"{self._kind} {old.zone}/{old.suffix}"
                self._on_left(
                    old.zone, old.suffix, UnavailableError(f"{name} has left the cluster")
                )

    def suspect(self, peer: pb.ProcessSpec.ID, reason: object) -> None:
        """Verify that a member lives; again, if that is continuing.

        Args:
            peer: the member.
            reason: why it is suspected, for the log.
        """
        name = peer.zone, peer.suffix
        if self._is_closed or peer == self._local_id or self._keyspace.member(*name) is None:
            return
        if name in self._tasks:
            self._again.add(name)
            return
        _log.debug("%s %s/%s is verified: %s", self._kind, *name, reason)
        task = asyncio.get_running_loop().create_task(
            self._verify(*name),
            name=f"verify {peer.zone}/{peer.suffix}",
            context=logged_context(peer=f"{peer.zone}/{peer.suffix}"),
        )
        self._tasks[name] = task
        task.add_done_callback(lambda done: self._verified(name, done))

    async def is_silent(self, member: MemberEntry[Any]) -> bool:
        """Challenge a member that is not suspected. Return True if the challenge is unanswered.

        A member that does not answer challenges is not known to be silent.

        Raises:
            EtcdError: Etcd refused, or did not answer.
        """
        peer = member.value.process_spec.id
        if not self.challenges.are_answered_by(peer, member.lease):
            return False
        loop = asyncio.get_running_loop()
        begun, revision = loop.time(), 0
        try:
            async with asyncio.timeout(SILENT_ANSWER_S):
                while not (revision := await self.challenges.create(peer)):
                    await self.challenges.gone(peer)  # that of another member
                    begun = loop.time()
            answer_s = max(ANSWER_S, ANSWER_CALLS * (loop.time() - begun))
            async with asyncio.timeout(answer_s):
                await self.challenges.gone(peer, revision)
                revision = 0
        except TimeoutError:
            if not revision:
                return False
        finally:
            is_unanswered = bool(revision) and await self.challenges.end(peer, revision)
        return is_unanswered

    async def _verify(self, zone: str, suffix: str) -> None:
        """Verify one member, until there is no new evidence or it is no member any more."""
        self._again.add((zone, suffix))
        while (zone, suffix) in self._again:
            self._again.discard((zone, suffix))
            member = self._keyspace.member(zone, suffix)
            if member is None:
                return
            await _Verification(self._etcd, self.challenges, self._dial, member, self._kind).run()
            await asyncio.sleep(VERIFY_AGAIN_S)

    def _verified(self, name: tuple[str, str], task: asyncio.Task[None]) -> None:
        del self._tasks[name]
        self._again.discard(name)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s failed", task.get_name(), exc_info=error)


class _Verification:
    """Verification of one member.

    Args:
        etcd: the client.
        challenges: those of this member.
        dial: dials an endpoint.
        member: the suspect's key.
        kind: of the member.
    """

    def __init__(
        self,
        etcd: Etcd,
        challenges: Challenges,
        dial: Callable[[str], Awaitable[Input]],
        member: MemberEntry[Any],
        kind: str,
    ) -> None:
        self._etcd = etcd
        self._challenges = challenges
        self._dial = dial
        self._member = member
        self._kind = kind
        self._is_closed = False  # by the last dial
        self._peer = member.value.process_spec.id
        self._endpoint = member.value.process_spec.endpoint
        self._challenge = 0  # its revision, while it is there
        self._answer_s = 0.0
        self._begun_s = 0.0
        self._time_to_live_s = 0

    async def run(self) -> State:
        """Go through the table's states to one of its ends, and return that."""
        state = State.DIAL
        try:
            while state not in ENDS:
                try:
                    given = await self._ACTIONS[state](self)
                except EtcdError as error:
                    _log.warning("the verification of %s failed: %s", self._endpoint, error)
                    given = Input.FAILED
                if state in DIALS:
                    self._is_closed = given is Input.CLOSED
                state = step(state, given)
        finally:
            if self._challenge:
                await self._withdraw()
        return state

    # ------------------------------------------------------------------ dials

    async def _dial_now(self) -> Input:
        return await self._dial(self._endpoint)

    async def _dial_again(self) -> Input:
        await asyncio.sleep(DIAL_AGAIN_S)
        return await self._dial(self._endpoint)

    async def _dial_later(self) -> Input:
        await asyncio.sleep(DIAL_LATER_S)
        return await self._dial(self._endpoint)

    # -------------------------------------------------------------- challenge

    async def _make_challenge(self) -> Input:
        loop = asyncio.get_running_loop()
        self._begun_s = begun = loop.time()
        self._time_to_live_s = await self._etcd.time_to_live(self._member.lease)
        self._challenge = await self._challenges.create(self._peer)
        is_answering = self._challenges.are_answered_by(self._peer, self._member.lease)
        if is_answering:
            shortest_s = CLOSED_ANSWER_S if self._is_closed else ANSWER_S
        else:
            of_lease = SILENT_ANSWER_SHARE if self._is_closed else 0.0
            shortest_s = max(SILENT_ANSWER_S, of_lease * self._time_to_live_s)
        self._answer_s = max(shortest_s, ANSWER_CALLS * (loop.time() - begun))
        return Input.CREATED if self._challenge else Input.HELD

    async def _await_verifier(self) -> Input:
        try:
            # Until then the suspect's own lease has decided.
            async with asyncio.timeout(max(1, self._time_to_live_s)):
                await self._challenges.gone(self._peer)
        except TimeoutError:
            return Input.FAILED
        return Input.FREE

    async def _await_answer(self) -> Input:
        try:
            async with asyncio.timeout(self._answer_s):
                await self._challenges.gone(self._peer, self._challenge)
        except TimeoutError:
            return Input.UNANSWERED
        self._challenge = 0
        return Input.ANSWERED

    async def _withdraw(self) -> None:
        challenge, self._challenge = self._challenge, 0
        try:
            await self._challenges.end(self._peer, challenge)
        except GazetteError as error:
            _log.warning("a challenge stays until our lease ends: %s", error)

    # ----------------------------------------------------------------- verdict

    async def _condemn(self) -> Input:
        member = self._member
        elapsed_s = asyncio.get_running_loop().time() - self._begun_s
        left_s = await self._etcd.time_to_live(member.lease)
        if left_s > self._time_to_live_s + 1 - elapsed_s:  # Etcd tells whole seconds
            return Input.ANSWERED  # it was renewed
        unchanged = Compare.mod_revision(member.key, member.mod_revision)
        challenge, self._challenge = self._challenge, 0
        is_unanswered = await self._challenges.end(self._peer, challenge, unchanged)
        return Input.CONFIRMED if is_unanswered else Input.ANSWERED

    async def _revoke(self) -> Input:
        _log.warning(
            "%s %s/%s is dead: %s %s connections, and its challenge in Etcd was not answered; its "
            "lease is revoked",
            self._kind, self._peer.zone, self._peer.suffix, self._endpoint,
            "closes" if self._is_closed else "refuses",
        )  # fmt: skip
        try:
            await self._etcd.revoke(self._member.lease)
        except LeaseLostError:
            _log.info("lease %x had ended already", self._member.lease)
        return Input.REVOKED

    _ACTIONS: ClassVar[Mapping[State, Callable[[_Verification], Awaitable[Input]]]] = {
        State.DIAL: _dial_now,
        State.DIAL_LATER: _dial_later,
        State.DIAL_AGAIN: _dial_again,
        State.CHALLENGE: _make_challenge,
        State.AWAIT_VERIFIER: _await_verifier,
        State.AWAIT_ANSWER: _await_answer,
        State.DIAL_LAST: _dial_now,
        State.CONDEMN: _condemn,
        State.REVOKE: _revoke,
    }

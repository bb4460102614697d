"""The driver of verifications: from evidence that a member died to the revocation of its lease.

Evidence is a stream or a link that broke, or a call that could not be carried. It only begins a
verification, which the table of `decision` defines: evidence of a member that lives costs it a few
connections.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar

from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Compare
from gazette_sdk.cluster.item_keyspace import MemberEntry, ProcessKeySpace
from gazette_sdk.cluster.verification.challenges import Challenges
from gazette_sdk.cluster.verification.decision import DIALS, ENDS, Input, State, step
from gazette_sdk.errors import EtcdError, GazetteError, LeaseLostError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb

__all__ = ["Verifier"]

DIAL_AGAIN_S = 0.05
"""Pause before the second dial of an endpoint that refused."""

DIAL_LATER_S = 0.2
"""Pause before the second dial of an endpoint that accepted."""

ANSWER_S = 0.3
"""Shortest time to answer a challenge."""

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

_log = logging.getLogger(__name__)


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

    async def run(self) -> None:
        """Answer challenges until cancelled; then end all verifications."""
        try:
            await self.challenges.run()
        finally:
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
        """Verify that a member lives; again, if that is going on.

        Args:
            peer: the member.
            reason: why it is suspected, for the log.
        """
        name = peer.zone, peer.suffix
        if peer == self._local_id or self._keyspace.member(*name) is None:
            return
        if name in self._tasks:
            self._again.add(name)
            return
        _log.debug("%s %s/%s is verified: %s", self._kind, *name, reason)
        task = asyncio.get_running_loop().create_task(
            self._verify(*name), name=f"verify {peer.zone}/{peer.suffix}"
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
        shortest_s = ANSWER_S if is_answering else SILENT_ANSWER_S
        if self._is_closed and not is_answering:
            shortest_s = max(shortest_s, SILENT_ANSWER_SHARE * self._time_to_live_s)
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

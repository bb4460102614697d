"""Verification of a member that may be dead, as a table.

The driver (`verifier`) performs the action of the current state, and reports the result as one
:class:`Input`. A member is deposed only if its endpoint refuses every dial, or closes it before the
first byte of an answer, *and* it leaves a challenge in Etcd unanswered. One that others or Etcd
still hear answers the challenge, or others do so in its place: so a cut link never deposes it, also
one that refuses.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

__all__ = ["DIALS", "ENDS", "NOTHING_LISTENS", "VERIFICATION", "Input", "State", "step"]


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

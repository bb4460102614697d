"""Judgement of the answers of all peers to a proposal (broker section 6.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gazette_sdk.broker.append.machine import Input
from gazette_sdk.broker.replication.peer_stream import Answer, unexpected
from gazette_sdk.errors import GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.rules import equivalent

__all__ = ["Sync", "judge_acks", "judge_sync"]


@dataclass(frozen=True, slots=True)
class Sync:
    """Result of the answers to a synchronizing proposal (broker section 6.2).

    Attributes:
        input: AGREED, ROLL, LATER or FAILED.
        roll_to: offset to roll to, 0 for none.
        registers: registers to adopt with it; ``None`` to keep ours.
        read_through: revision to resolve at, 0 for none.
        error: the first failure.
        failed: indices of the peers that failed.
    """

    input: Input
    roll_to: int = 0
    registers: pb.LabelSet | None = None
    read_through: int = 0
    error: GazetteError | None = None
    failed: tuple[int, ...] = ()


def judge_sync(
    header: pb.Header,
    peers: Sequence[pb.ProcessSpec.ID],
    head: int,
    answers: Sequence[Answer],
) -> Sync:
    """Classify the answers to a synchronizing proposal.

    Args:
        header: the pipeline's.
        peers: the peers that answered, in member order.
        head: end of our own spool.
        answers: of every peer.
    """
    roll_to, read_through = 0, 0
    registers: pb.LabelSet | None = None
    errors: dict[int, GazetteError] = {}

    for index, answer in enumerate(answers):
        if isinstance(answer, GazetteError):
            errors[index] = answer
        elif answer.status == pb.OK:
            pass
        elif (
            answer.status == pb.WRONG_ROUTE
            and not equivalent(answer.header.route, header.route)
            and answer.header.etcd.revision > header.etcd.revision
        ):
            read_through = max(read_through, answer.header.etcd.revision)
        elif answer.status == pb.PROPOSAL_MISMATCH and answer.fragment.end > max(head, roll_to):
            roll_to, registers = answer.fragment.end, answer.registers
        elif answer.status == pb.PROPOSAL_MISMATCH and (
            # It may lack the beginning of our fragment; or be ahead, but behind another peer.
            answer.fragment.end > head
            or (answer.fragment.end == head and answer.fragment.begin == answer.fragment.end)
        ):
            roll_to = max(roll_to, answer.fragment.end)
        else:
            errors[index] = unexpected(peers[index], answer)

    if errors:
        given = Input.FAILED
    elif roll_to or any(_mismatches(answer) for answer in answers):
        given = Input.ROLL
    elif read_through:
        given = Input.LATER
    else:
        given = Input.AGREED
    return Sync(
        given,
        roll_to=roll_to,
        registers=registers,
        read_through=read_through,
        error=next(iter(errors.values()), None),
        failed=tuple(errors),
    )


def judge_acks(
    peers: Sequence[pb.ProcessSpec.ID], answers: Sequence[Answer]
) -> GazetteError | None:
    """Return the error of the first peer that did not acknowledge; ``None`` if all did."""
    for peer, answer in zip(peers, answers, strict=True):
        if isinstance(answer, GazetteError):
            return answer
        if answer.status != pb.OK:
            return unexpected(peer, answer)
    return None


def _mismatches(answer: Answer) -> bool:
    return not isinstance(answer, GazetteError) and answer.status == pb.PROPOSAL_MISMATCH

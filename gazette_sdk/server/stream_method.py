"""Method of the stream transport: the functions that serve its calls, and their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from gazette_sdk.protocol.rules import Rpc
from gazette_sdk.server.metrics import meters_of

if TYPE_CHECKING:
    from gazette_sdk.server.stream_serving import StreamCall

__all__ = ["Answer", "AnswerNow", "Serve", "StartedCall", "StreamMethod"]


class Answer(NamedTuple):
    """The only response of a call.

    Attributes:
        response: encoded.
        success: True if calls that run only after its success may run.
    """

    response: bytes
    success: bool = True


class StartedCall(NamedTuple):
    """Call that was started synchronously, and is answered later.

    Attributes:
        answer: task of its answer.
        group: shared by calls of which the later ones fail if an earlier one fails.
    """

    answer: asyncio.Task[Answer]
    group: object


Serve: TypeAlias = Callable[["StreamCall"], Coroutine[Any, Any, Answer | None]]

AnswerNow: TypeAlias = Callable[["StreamCall", object | None], Answer | StartedCall | None]


class StreamMethod:
    """A method, and the functions that serve it.

    Args:
        rpc: its name, number and shape.
        serve: serves one call. It returns the answer of a method that has one response, and
            nothing where the responses were sent. A
            :class:`~gazette_sdk.errors.GazetteError` fails the call.
        answer_now: answers or starts a call that is whole, without waiting for anything. It gets
            the group of the calls in flight before it, if there are any: it must then start a
            call of that group, or decline. It declines by returning ``None``, without any effect,
            and :attr:`serve` serves the call then.
    """

    def __init__(self, rpc: Rpc, serve: Serve, answer_now: AnswerNow | None = None) -> None:
        self.rpc = rpc
        self.path = rpc.path
        self.serve = serve
        self.answer_now = answer_now
        self.meters = meters_of(rpc.path, rpc.client_streams, rpc.server_streams)

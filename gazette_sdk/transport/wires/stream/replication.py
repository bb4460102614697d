"""The sending side of a replication."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.wires.stream.open_call import Ended, OpenCall

__all__ = ["end_if_failed", "send_requests"]


async def send_requests(call: OpenCall, requests: AsyncIterator[pb.ReplicateRequest]) -> None:
    """Send what follows the opening proposal. Content is sent as such where that tells it all."""
    delta = 0
    async for request in requests:
        if call.over:
            return
        if request.content and request == pb.ReplicateRequest(
            content=request.content, content_delta=delta
        ):
            call.send_content(request.content)
        else:
            call.send_message(request.SerializeToString())
            delta = 0 if request.HasField("proposal") else request.content_delta
        delta += len(request.content)
        await call.drained()
    call.send_end()


def end_if_failed(sending: asyncio.Task[None], call: OpenCall) -> None:
    """End a call whose requests failed: for a callback of the task that sends them."""
    if not sending.cancelled() and sending.exception() is not None:
        call.give_up()
        call.fail(Ended.FAILED, "")

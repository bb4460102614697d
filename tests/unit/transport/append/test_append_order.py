"""Appends of one journal against an oracle: their order, what they wait for, and fences.

The model of a broker below writes an append only if the one before it on the connection was
written, as transports promise; it loses answers as the test says. The oracle goes through the
appends in the order of the calls, and knows nothing of queues, windows and attempts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette_sdk.errors import RegisterMismatchError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append import queue as linger
from gazette_sdk.transport.append.appender import AppendService
from gazette_sdk.transport.append.queue import DependencyFailedError, PendingAppend
from gazette_sdk.transport.base import AppendRoute

JOURNAL = "a/journal"
AUTHORS = ["one", "two"]
LOST = UnavailableError("the answer was lost")
MISMATCH = pb.AppendResponse(status=pb.REGISTER_MISMATCH)


def wanted(author):
    selector = pb.LabelSelector()
    selector.include.labels.add(name="author", value=author)
    return selector


def labels(author):
    return pb.LabelSet(labels=[pb.Label(name="author", value=author)])


class Broker(AppendRoute):
    """Route to a model of a broker with one journal.

    Attributes:
        author: value of the journal's one register.
        writes: numbers of the writes of each append that was written, in order.
        on_write: called with the numbers of an append that is written.
    """

    def __init__(self):
        self.author = ""
        self.writes = []
        self.on_write = lambda _numbers: None
        self._answers = deque()  # of those in flight: the callback, and the response or None
        self._is_broken = False

    def try_begin(self, request, content, answered, _traceparent=""):
        alone = request.HasField("check_registers") or request.HasField("union_registers")
        assert not (alone and self._answers), "an append with preconditions is alone in flight"
        response = None
        if not self._is_broken:
            response = self._write(request, b"".join(content))
            self._is_broken = response.status != pb.OK
        self._answers.append((answered, response))
        return True

    def _write(self, request, content):
        if request.HasField("check_registers"):
            [label] = request.check_registers.include.labels
            if label.value != self.author:
                return MISMATCH
        numbers = list(content)
        self.on_write(numbers)
        if request.HasField("union_registers"):
            self.author = request.union_registers.labels[0].value
        self.writes.append(numbers)
        return pb.AppendResponse(status=pb.OK)

    async def open(self, request):
        pass

    def give_up(self):
        self._answers.clear()

    @property
    def is_waited_for(self):
        return bool(self._answers)

    def answer(self):
        """Answer the oldest append in flight, with the loss of the answer where none came."""
        answered, response = self._answers.popleft()
        if not self._answers:
            self._is_broken = False  # the next one opens another connection
        answered(LOST if response is None else response)

    def lose(self):
        """Lose all answers that are under way."""
        self._is_broken = True
        self._answers = deque((answered, None) for answered, _ in self._answers)
        while self._answers:
            self.answer()
        self._is_broken = False


@dataclass
class Added:
    after: list[asyncio.Future]
    check: str | None
    union: str | None
    append: PendingAppend


def expected(added, author):
    """Return what becomes of each append: None if it is acknowledged, or the class of its error."""
    outcomes = []
    error = None
    for each in added:
        if error is None and any(gate.exception() is not None for gate in each.after):
            error = DependencyFailedError
        if error is None and each.check is not None and each.check != author:
            error = RegisterMismatchError
        if error is None and each.union is not None:
            author = each.union
        outcomes.append(error)
    return outcomes


async def turns(count=8):
    for _ in range(count):
        await asyncio.sleep(0)


async def no_pause(_attempt):
    await asyncio.sleep(0)


STEPS = ["append"] * 4 + ["gate", "open", "fail", "answer", "answer", "answer", "lose", "turn"]


async def play(data, batch_bytes_max):
    loop = asyncio.get_running_loop()
    broker = Broker()
    transport = SimpleNamespace(append_route=lambda _journal, _pump: broker)
    service = AppendService(transport, pause=no_pause, batch_bytes_max=batch_bytes_max)
    appender = service.appender(JOURNAL)
    added, gates = [], []

    def on_write(numbers):
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        for each in added[: numbers[-1] + 1]:
            assert all(gate.done() and gate.exception() is None for gate in each.after)

    broker.on_write = on_write
    for _ in range(data.draw(st.integers(1, 60))):
        step = data.draw(st.sampled_from(STEPS))
        closed = [gate for gate in gates if not gate.done()]
        if step == "append" and len(added) < 250:
            after = data.draw(st.lists(st.sampled_from(gates), max_size=2)) if gates else []
            check, union = data.draw(
                st.one_of(
                    st.just((None, None)),
                    st.sampled_from([(None, author) for author in AUTHORS]),
                    st.sampled_from([(author, None) for author in AUTHORS]),
                    st.sampled_from([(author, author) for author in AUTHORS]),
                )
            )
            append = appender.append(
                bytes([len(added)]),
                after=after,
                check=None if check is None else wanted(check),
                union=None if union is None else labels(union),
            )
            added.append(Added(after, check, union, append))
        elif step == "gate":
            gates.append(loop.create_future())
        elif step == "open" and closed:
            data.draw(st.sampled_from(closed)).set_result(None)
        elif step == "fail" and closed:
            data.draw(st.sampled_from(closed)).set_exception(LOST)
        elif step == "answer" and broker.is_waited_for:
            broker.answer()
        elif step == "lose" and broker.is_waited_for:
            broker.lose()
        else:
            await turns()
        unsettled = {each.append for each in added if not each.append.done()}
        assert appender.pending() == unsettled
    for gate in gates:
        if not gate.done():
            gate.set_result(None)
    while True:
        await turns()
        if broker.is_waited_for:
            broker.answer()
        elif not appender.pending():
            break
    for gate in gates:
        gate.exception()  # it was looked at, also if nothing waited for it
    found = [each.append.exception() for each in added]
    outcomes = expected(added, "")
    assert [None if error is None else type(error) for error in found] == outcomes
    written = [number for numbers in broker.writes for number in numbers]
    kept = [number for number, error in enumerate(outcomes) if error is None]
    assert list(dict.fromkeys(written)) == kept, "each once, in order, before any is repeated"
    refused = appender.append(b"x")
    assert not outcomes or (refused.exception() is None) == (outcomes[-1] is None)
    await service.aclose()


@settings(max_examples=300)
@given(st.data(), st.sampled_from([1, 3, 1 << 20]))
def test_appends_are_written_in_order_behind_what_they_wait_for_and_fences_hold(
    data, batch_bytes_max
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linger, "LINGER_S", 0.0)
        asyncio.run(play(data, batch_bytes_max))


@pytest.mark.parametrize("is_retried", [False, True])
def test_a_fence_ends_the_appends_of_the_author_before(is_retried):
    """An author that was fenced can write nothing more, whatever it had queued."""

    async def fence():
        broker = Broker()
        transport = SimpleNamespace(append_route=lambda _journal, _pump: broker)
        service = AppendService(transport, pause=no_pause)
        appender = service.appender(JOURNAL)
        begun = appender.append(bytes([0]), union=labels("one"))
        await turns()
        broker.answer()
        await turns()
        gate = asyncio.get_running_loop().create_future()
        late = [
            appender.append(bytes([1]), after=[gate], check=wanted("one")),
            appender.append(bytes([2]), check=wanted("one")),
            appender.append(bytes([3])),
        ]
        broker.author = "two"
        gate.set_result(None)
        await turns()
        if is_retried:
            broker.lose()
            await turns()
        broker.answer()
        await turns()
        assert begun.exception() is None
        assert [type(each.exception()) for each in late] == [RegisterMismatchError] * 3
        assert broker.writes == [[0]]
        assert not broker.is_waited_for, "nothing is tried again"
        refused = appender.append(bytes([4]), check=wanted("two"))
        assert isinstance(refused.exception(), RegisterMismatchError)
        await service.aclose()

    asyncio.run(fence())

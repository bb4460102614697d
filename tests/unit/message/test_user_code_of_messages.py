"""Keys, mappings, validators and classes of messages that raise what ends an iteration or a task.

A batch is published as a whole or not at all, and a reader leaves nothing out in silence.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec
import pyarrow as pa
import pydantic
import pytest

from gazette_sdk import JsonMessage, Publisher, Reader, mapping
from gazette_sdk.errors import DecodeError, UserCodeError, ValidationError
from gazette_sdk.framing import JsonLines
from gazette_sdk.message import CsvRecord
from gazette_sdk.message.mapping import SelectorMapping
from gazette_sdk.transport.loop import run
from support.published import TO, WAIT_S, bare
from support.written_messages import TICK, frame

KINDS = [StopIteration, StopAsyncIteration, asyncio.CancelledError, GeneratorExit]
MESSAGES = [{"i": i, "tag": i != 2} for i in range(5)]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request):
    return request.param


def choosing(name, kind):
    def key(message):
        if not message["tag"]:
            raise kind
        return str(message["i"])

    if name == "function":
        return lambda message: f"orders/part-{int(key(message)) % 4}"
    if name == "choose":
        return SelectorMapping("topic=orders", lambda message, _: int(key(message)) % 4)
    return getattr(mapping, name)("topic=orders", key=key)


def written(transport):
    return [each.message["i"] for each in Reader(dict, "topic=orders", transport=transport)]


@pytest.mark.parametrize("name", ["modulo", "rendezvous", "choose", "function"])
@pytest.mark.parametrize(
    "batch", [MESSAGES, pa.RecordBatch.from_pylist(MESSAGES)], ids=["dicts", "columns"]
)
def test_a_key_that_ends_an_iteration_refuses_its_batch_or_transaction(orders, kind, name, batch):
    with Publisher(choosing(name, kind), transport=orders) as publisher:
        with pytest.raises(UserCodeError, match=f"message 2 of the batch: .*{kind.__name__}"):
            publisher.publish_batch(batch)
        with pytest.raises(UserCodeError), publisher.transaction() as txn:
            txn.publish_batch(batch)
        with pytest.raises(UserCodeError, match=kind.__name__):
            publisher.publish(MESSAGES[2])
        assert written(orders) == []
        publisher.publish_batch(MESSAGES[:2]).result(WAIT_S)
        with pytest.raises(UserCodeError):
            asyncio.run(publishing_in_a_coroutine(publisher))
    assert sorted(written(orders)) == [0, 1]


async def publishing_in_a_coroutine(publisher):
    await publisher.apublish(MESSAGES[2])


def validated(kind):
    @dataclass
    class Data(JsonMessage):
        n: int

        def validate(self):
            if self.n == 2:
                raise kind

    class Struct(msgspec.Struct):
        n: int

        def validate(self):
            if self.n == 2:
                raise kind

    class Record(CsvRecord):
        def validate(self):
            if self[1] == "2":
                raise kind

    return {"dataclass": Data, "struct": Struct, "csv": lambda n: Record(["", str(n)])}


@pytest.mark.parametrize("of", ["dataclass", "struct", "csv"])
def test_a_validator_that_ends_an_iteration_refuses_its_batch(transport, kind, of):
    labels = {"content_type": "text/csv"} if of == "csv" else {}
    transport.create("a/journal", **labels)
    made = validated(kind)[of]
    with Publisher(TO, transport=transport) as publisher:
        for batch in ([made(1), made(2), made(3)], [made(1), ["", "1"], made(2)]):
            with pytest.raises(UserCodeError, match=kind.__name__):
                publisher.publish_batch(batch)
        with pytest.raises(UserCodeError, match=kind.__name__):
            publisher.publish(made(2))
    assert transport.content_of("a/journal") == b""


@dataclass
class CheckedLater(JsonMessage):
    n: int

    async def validate(self):
        """Nothing of it ever runs."""


def test_a_validator_of_which_nothing_has_run_refuses_its_message(transport):
    transport.create("a/journal")
    with Publisher(TO, transport=transport) as publisher:
        for publish in (publisher.publish, lambda message: publisher.publish_batch([message])):
            with pytest.raises(UserCodeError, match=r"validate returned a coroutine"):
                publish(CheckedLater(1))
    assert transport.content_of("a/journal") == b""


def test_a_serializer_that_ends_an_iteration_refuses_its_batch(transport, kind):
    class Model(pydantic.BaseModel):
        n: int

        @pydantic.field_serializer("n")
        def written(self, n: int) -> int:
            if n == 2:
                raise kind
            return n

    transport.create("a/journal")
    with Publisher(TO, transport=transport) as publisher:
        with pytest.raises((UserCodeError, ValidationError), match=r"message 1 of the batch: .*"):
            publisher.publish_batch([Model(n=1), Model(n=2)])
        publisher.publish_batch([Model(n=3)])
    assert bare(transport, "a/journal") == [{"n": 3}]


def read_classes(kind):
    def checked(n):
        if n == 20:
            raise kind

    class Model(pydantic.BaseModel):
        n: int

        @pydantic.field_validator("n")
        @classmethod
        def check(cls, n: int) -> int:
            checked(n)
            return n

    class Struct(msgspec.Struct):
        n: int

        def __post_init__(self):
            checked(self.n)

    @dataclass
    class Data(JsonMessage):
        n: int

        def __post_init__(self):
            checked(self.n)

    return {"pydantic": Model, "struct": Struct, "dataclass": Data}


@pytest.mark.parametrize("of", ["pydantic", "struct", "dataclass"])
def test_a_reader_leaves_no_message_out_in_silence(transport, kind, of):
    transport.create("a/journal").content += b"".join(
        frame(n, 1, TICK * (n + 1)) for n in range(40)
    )
    message_type = read_classes(kind)[of]
    found = []
    messages = (
        each.message.n for each in Reader(message_type, name="a/journal", transport=transport)
    )
    with pytest.raises(DecodeError, match=kind.__name__):
        found.extend(messages)
    assert found == list(range(20))
    rest = Reader(message_type, name="a/journal", transport=transport, on_error="skip")
    assert [each.message.n for each in rest] == [n for n in range(40) if n != 20]


def test_a_reader_of_records_leaves_none_out_in_silence(transport, kind):
    class Record(CsvRecord):
        def __init__(self, fields=()):
            super().__init__(fields)
            if len(self) > 1 and self[1] == "5":
                raise kind

    transport.create("a/journal", content_type="text/csv")
    with Publisher(TO, transport=transport) as publisher:
        publisher.publish_batch([CsvRecord(["", str(n)]) for n in range(9)])
    with pytest.raises(DecodeError, match=kind.__name__):
        list(Reader(Record, name="a/journal", transport=transport))
    rest = Reader(Record, name="a/journal", transport=transport, on_error="skip")
    assert [each.message[1] for each in rest] == [str(n) for n in range(9) if n != 5]


def test_a_function_on_error_that_ends_an_iteration_fails_the_reader(transport, kind):
    def judge(error):
        raise kind

    transport.create("a/journal").content += frame(1, 1, TICK) + b"{\n" + frame(2, 1, 2 * TICK)
    with pytest.raises(UserCodeError, match=f"judge raised {kind.__name__}"):
        list(Reader(dict, name="a/journal", transport=transport, on_error=judge))


def test_a_framing_that_ends_an_iteration_fails_its_caller(transport, kind):
    class Odd(JsonLines):
        def encode(self, payload, out):
            out += b"half a frame"
            raise kind

    transport.create("a/journal")
    with Publisher(TO, transport=transport) as publisher:
        publisher.publish({"n": 1}).result(WAIT_S)
        outbox = publisher._sender.outboxes["a/journal"]
        outbox.framing, outbox.is_lines = Odd(), False
        for publish in (publisher.publish, lambda message: publisher.publish_batch([message])):
            with pytest.raises(UserCodeError, match=f"encode raised {kind.__name__}"):
                publish({"n": 2})
        outbox.framing = JsonLines()
        publisher.publish({"n": 3}).result(WAIT_S)
    assert bare(transport, "a/journal") == [{"n": 1}, {"n": 3}]


def test_a_function_that_saves_intents_fails_its_transaction(transport, kind):
    def save(intents):
        raise kind

    async def asave(intents):
        raise kind

    transport.create("a/journal")
    with (
        Publisher(TO, transport=transport) as publisher,
        pytest.raises(UserCodeError, match=kind.__name__),
        publisher.transaction(save=save) as txn,
    ):
        txn.publish({"n": 1})
    if kind is not GeneratorExit and not issubclass(kind, StopIteration | StopAsyncIteration):
        with pytest.raises(UserCodeError, match=kind.__name__):
            asyncio.run(saved(transport, asave))


async def saved(transport, save):
    async with (
        Publisher(TO, transport=transport) as publisher,
        publisher.transaction(save=save) as txn,
    ):
        txn.publish({"n": 1})


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, StopIteration])
def test_a_mapping_called_on_the_event_loop_of_the_sdk_fails_its_receipt(orders, kind):
    """Where calls wait for a first listing there; the loop and what waits for it go on."""
    chosen = choosing("modulo", kind)

    async def publish(publisher):
        return publisher.publish(MESSAGES[2])

    publisher = Publisher(chosen, transport=orders)
    receipt = run(publish(publisher), WAIT_S)
    with pytest.raises((kind, UserCodeError)):
        receipt.result(WAIT_S)
    with pytest.raises((kind, UserCodeError)):
        publisher.flush(WAIT_S)
    publisher.publish(MESSAGES[3]).result(WAIT_S)
    publisher.close(WAIT_S)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_the_event_loop_of_the_sdk_outlives_a_task_that_ends_the_process(kind, caplog):
    async def ending():
        raise kind

    with pytest.raises(kind):
        run(ending(), WAIT_S)
    assert run(asyncio.sleep(0, "alive"), WAIT_S) == "alive"
    assert kind.__name__ in caplog.text

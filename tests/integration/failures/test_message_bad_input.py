"""Bad messages in journals, and journals that can hold none: one clear error, nothing lost.

Each is told in one line, with the journal, the offset and the remedy; what stands before it is
delivered, and reading goes on behind it.
"""

import subprocess
import sys
import time
import uuid
from dataclasses import dataclass

import pytest

from gazette_sdk import JsonMessage, Publisher, Reader, connect
from gazette_sdk.errors import (
    DecodeError,
    DesyncError,
    FramingError,
    MappingError,
    TornFrameError,
)
from gazette_sdk.framing import framing_for
from gazette_sdk.message import mapping
from gazette_sdk.message.kinds import kind_of
from gazette_sdk.message.uuid import (
    ACK_TXN,
    CONTINUE_TXN,
    OUTSIDE_TXN,
    Stamp,
    build_uuid,
    new_producer_id,
)
from integration.failures.journals import append, run, spec, wait_until_stored, within
from integration.failures.reading import messages
from support.protobuf_messages import Gram

JSON = "application/x-ndjson"
FIXED = "application/x-protobuf-fixed"
CSV = "text/csv"
RECOVERY_LOG = "application/x-gazette-recoverylog"
PRODUCER = b"\x05write"
MAGIC = b"\x66\x33\x93\x36"


@dataclass
class Order(JsonMessage):
    number: int


KINDS = {
    "dict": (JSON, dict, lambda number: {"number": number}, lambda each: each["number"]),
    "dataclass": (JSON, Order, Order, lambda each: each.number),
    "protobuf": (FIXED, Gram, lambda number: Gram(count=number), lambda each: each.count),
    "csv": (CSV, list, lambda number: ["", str(number)], lambda each: int(each[1])),
}


class Journal:
    """A journal, in which the first two messages stand."""

    def __init__(self, cluster, name, kind):
        content_type, self.message_type, self._make, self._number_of = KINDS[kind]
        self.name = name
        self.transport = cluster.transport
        cluster.apply(spec(name, content_type=content_type))
        self.publish(0, 1)

    def publish(self, *numbers):
        with Publisher(lambda _: self.name, transport=self.transport) as publisher:
            for number in numbers:
                publisher.publish(self._make(number))

    def append(self, content):
        return append(self.transport, self.name, content).commit

    def reader(self, **options):
        return Reader(self.message_type, name=self.name, transport=self.transport, **options)

    def read(self, **options):
        """Numbers of the messages, and the error behind them."""
        with within(5), self.reader(**options) as reader:
            found, error = messages(reader)
            return [self._number_of(each) for each in found], error, reader


@pytest.fixture
def journal(cluster, name):
    return lambda kind: Journal(cluster, name, kind)


def is_clear(error, journal, offset):
    """One line, which says where, and what to do."""
    text = str(error)
    assert (error.journal, error.offset) == (journal.name, offset)
    assert text.startswith(f"{journal.name}: ")
    assert f"offset {offset}" in text
    assert "\n" not in text
    assert "mend its writer" in text or "its writer is broken" in text
    return True


def stamped(producer, clock, flags, message_type=dict):
    stamp = Stamp(producer)
    stamp.clock, stamp.flags = clock, flags
    content_type, _, make, _ = next(each for each in KINDS.values() if each[1] is message_type)
    framing, out = framing_for(content_type), bytearray()

    def frame(number):
        out.clear()
        framing.encode(kind_of(message_type, framing.form).encode(make(number), stamp), out)
        return bytes(out)

    return frame


NO_UUIDS = [
    ("dict", b'{"UUID": "no-uuid", "number": 7}\n', DecodeError),
    ("dict", b'{"UUID": "%b", "number": 7}\n' % (b"x" * 36), DecodeError),
    ("dataclass", b'{"UUID": "no-uuid", "number": 7}\n', DecodeError),
]
POISON = [
    *NO_UUIDS,
    ("dict", b"this is no JSON\n", DecodeError),
    ("dict", b"\n", DecodeError),
    ("dict", b'{"UUID": 7, "number": 7}\n', DecodeError),
    ("dataclass", b'{"number": "seven"}\n', DecodeError),
    ("protobuf", MAGIC + b"\4\0\0\0\xff\xff\xff\xff", DecodeError),
    ("protobuf", b"these are no frames", DesyncError),
    ("csv", b"no-uuid,7\n", DecodeError),
    ("csv", b"one field\n", DecodeError),
    ("csv", b"%b,7,8\n" % str(build_uuid(PRODUCER, 160, 0)).encode(), DecodeError),
    ("csv", b'a "quote" where none may stand,7\n', DecodeError),
    ("csv", b"%b,\xff\n" % str(build_uuid(PRODUCER, 160, 0)).encode(), DecodeError),
]


@pytest.mark.parametrize(
    ("kind", "poison", "error_type", "isolation"),
    [(*each, "committed") for each in POISON]
    + [(*each, "uncommitted") for each in POISON if each not in NO_UUIDS],
)
def test_a_poison_record_is_reported_and_nothing_around_it_is_lost(
    journal, kind, poison, error_type, isolation
):
    journal = journal(kind)
    commit = journal.append(poison)
    journal.publish(2, 3)

    numbers, error, reader = journal.read(isolation=isolation)
    assert numbers == [0, 1]
    assert type(error) is error_type
    assert is_clear(error, journal, commit.begin)
    assert reader.offsets == {journal.name: commit.begin}

    numbers, error, reader = journal.read(isolation=isolation, offsets={journal.name: commit.end})
    assert (numbers, error) == ([2, 3], None)

    told = []
    for on_error in ("skip", told.append):
        numbers, error, _ = journal.read(isolation=isolation, on_error=on_error)
        assert (numbers, error) == ([0, 1, 2, 3], None)
    assert [type(each) for each in told] == [error_type]
    assert is_clear(told[0], journal, commit.begin)


@pytest.mark.parametrize(("kind", "poison", "error_type"), NO_UUIDS)
def test_text_that_is_no_uuid_is_reported_by_its_envelope_where_nothing_is_sequenced(
    journal, kind, poison, error_type
):
    journal = journal(kind)
    commit = journal.append(poison)
    with within(5), journal.reader(isolation="uncommitted") as reader:
        envelopes = list(reader)
    assert len(envelopes) == 3
    with pytest.raises(error_type) as caught:
        envelopes[2].uuid  # noqa: B018 - it is worked out when it is asked for
    assert is_clear(caught.value, journal, commit.begin)


def test_a_reader_continues_from_a_checkpoint_before_a_poison_record(journal):
    journal = journal("dict")
    journal.append(b"poison\n")
    journal.publish(2)
    _, error, reader = journal.read()
    assert isinstance(error, DecodeError)
    numbers, error, _ = journal.read(checkpoint=reader.checkpoint(), on_error="skip")
    assert (numbers, error) == ([2], None)


def test_an_error_of_a_callback_ends_the_iteration(journal):
    class TooManyError(Exception):
        pass

    def refuse(error):
        raise TooManyError from error

    journal = journal("dict")
    journal.append(b"poison\n")
    with within(5), journal.reader(on_error=refuse) as reader, pytest.raises(TooManyError):
        list(reader)


TORN = [
    ("dict", b'{"number": ', b"2}\n"),
    ("dict", b"{", b'"number":2}\n'),
    ("protobuf", MAGIC[:2], MAGIC[2:] + b"\2\0\0\0\x18\2"),
    ("protobuf", MAGIC + b"\2\0\0\0\x18", b"\2"),
    ("csv", b'%b,"' % str(build_uuid(PRODUCER, 160, 0)).encode(), b'2"\n'),
]


@pytest.mark.parametrize(("kind", "begin", "rest"), TORN)
def test_a_frame_that_is_torn_at_the_head_is_reported_and_read_when_it_is_whole(
    journal, kind, begin, rest
):
    journal = journal(kind)
    commit = journal.append(begin)
    numbers, error, reader = journal.read()
    assert numbers == [0, 1]
    assert type(error) is TornFrameError
    assert is_clear(error, journal, commit.begin)
    assert reader.offsets == {journal.name: commit.begin}

    told = []
    with within(5), journal.reader(on_error=told.append) as patient:
        assert len(list(patient)) == 2
        assert [type(each) for each in told] == [TornFrameError]
        assert patient.offsets == {journal.name: commit.begin}
        journal.append(rest)
        journal.publish(3)
        assert next(iter(patient)).begin == commit.begin
    numbers, error, _ = journal.read()
    assert (numbers, error) == ([0, 1, 2, 3], None)


def test_the_last_csv_record_needs_no_end(journal):
    journal = journal("csv")
    commit = journal.append(b"%b,2" % str(build_uuid(PRODUCER, 160, 0)).encode())
    numbers, error, reader = journal.read()
    assert (numbers, error) == ([0, 1, 2], None)
    assert reader.offsets == {journal.name: commit.end}


@pytest.mark.parametrize(
    "text",
    [
        "1b4e28ba-2fa1-4bd2-883f-0016d3cca427",
        "00000000-0000-0000-0000-000000000000",
        "urn:uuid:1b4e28ba-2fa1-3bd2-a83f-0016d3cca427",
        "{1B4E28BA-2FA1-5BD2-E83F-0016D3CCA427}",
        "1b4e28ba2fa14bd2883f0016d3cca427",
    ],
)
def test_a_uuid_of_another_version_is_read_by_its_fields(journal, text):
    journal = journal("dict")
    journal.append(b'{"UUID": "%b", "number": 2}\n' % text.encode())
    journal.publish(3)
    with within(5), journal.reader() as reader:
        envelopes = list(reader)
    assert [envelope.message["number"] for envelope in envelopes] == [0, 1, 2, 3]
    assert envelopes[2].uuid == uuid.UUID(text)


def test_a_clock_that_runs_backwards_in_a_journal_is_a_duplicate(journal):
    journal = journal("dict")
    producer = new_producer_id()
    for number, clock in [(2, 1600), (3, 320), (4, 1600), (5, 3200)]:
        journal.append(stamped(producer, clock, OUTSIDE_TXN)(number))
    assert journal.read()[:2] == ([0, 1, 2, 5], None)
    assert journal.read(isolation="uncommitted")[:2] == ([0, 1, 2, 3, 4, 5], None)


def test_an_acknowledgement_from_the_past_begins_the_producer_anew(journal):
    journal = journal("dict")
    producer = new_producer_id()
    for number, clock, flags in [
        (2, 1600, CONTINUE_TXN), (None, 1760, ACK_TXN),
        (3, 1920, CONTINUE_TXN), (None, 800, ACK_TXN),
        (4, 960, CONTINUE_TXN), (None, 1120, ACK_TXN),
    ]:  # fmt: skip
        journal.append(stamped(producer, clock, flags)(number))
    assert journal.read()[:2] == ([0, 1, 2, 4], None)


def test_a_wall_clock_that_is_set_back_stops_no_publisher(journal, monkeypatch):
    journal = journal("dict")
    real = time.time_ns
    with Publisher(lambda _: journal.name, transport=journal.transport) as publisher:
        publisher.publish({"number": 2})
        monkeypatch.setattr(time, "time_ns", lambda: real() - 3600 * 10**9)
        for number in range(3, 6):
            publisher.publish({"number": number})
    assert journal.read()[:2] == ([0, 1, 2, 3, 4, 5], None)


@pytest.mark.parametrize("content_type", ["", "text/plain", RECOVERY_LOG])
def test_a_journal_without_framing_is_reported_to_readers_and_publishers(
    cluster, name, content_type
):
    cluster.apply(spec(name, content_type=content_type))
    append(cluster.transport, name, b"content\n")

    def is_clear(error):
        assert type(error) is FramingError
        assert error.journal == name
        for told in (name, f"unrecognized content-type ({content_type})", "content_type="):
            assert told in str(error)
        assert "\n" not in str(error)

    for on_error in ("raise", "skip"):
        with (
            within(5),
            Reader(dict, name=name, transport=cluster.transport, on_error=on_error) as reader,
        ):
            found, error = messages(reader)
        assert found == []
        is_clear(error)
    with Publisher(lambda _: name, transport=cluster.transport) as publisher, within(5):
        with pytest.raises(FramingError) as caught:
            publisher.publish({"number": 1})
        is_clear(caught.value)
        with pytest.raises(FramingError) as caught:
            publisher.publish_batch([{"number": 1}])
        is_clear(caught.value)


def test_a_store_read_directly_needs_its_content_type(cluster, name):
    cluster.apply(spec(name, length=1024))
    for _ in range(2):
        append(cluster.transport, name, b"{}\n" * 512)
    wait_until_stored(cluster, name)
    store = connect(f"file://{cluster.fragments}")
    with within(5), Reader(dict, name=name, transport=store) as reader:
        found, error = messages(reader)
    run(store.aclose())
    assert found == []
    assert isinstance(error, FramingError)
    assert "content-type" in str(error)


@pytest.mark.parametrize("kind", ["csv", "protobuf"])
def test_a_class_that_a_journal_cannot_hold_is_reported_with_those_it_can(journal, kind):
    journal = journal(kind)
    with within(5), Reader(dict, name=journal.name, transport=journal.transport) as reader:
        found, error = messages(reader)
    assert found == []
    text = {"csv": "use CsvRecord or list", "protobuf": "use a generated protobuf class"}[kind]
    assert text in str(error)
    assert journal.name in str(error)


def test_a_mapping_to_an_unknown_journal_publishes_nothing(journal):
    journal = journal("dict")
    unknown = f"{journal.name}-unknown"
    with Publisher(lambda _: unknown, transport=journal.transport) as publisher, within(5):
        for attempt in (
            lambda: publisher.publish({"number": 2}),
            lambda: publisher.publish_batch([{"number": 2}]),
            lambda: publisher.publish({"number": 2}, mapping=mapping.random(f"name={unknown}")),
        ):
            with pytest.raises(MappingError) as caught:
                attempt()
            assert unknown in str(caught.value)
            assert "gazctl journals apply" in str(caught.value)
            assert "\n" not in str(caught.value)

        def first_known(message):
            return journal.name if message["number"] < 3 else unknown

        def publish_both():
            with publisher.transaction(mapping=first_known) as txn:
                txn.publish({"number": 2})
                txn.publish({"number": 3})

        with pytest.raises(MappingError):
            publish_both()
    assert journal.read()[:2] == ([0, 1], None)


@pytest.mark.parametrize(
    ("framing", "content", "told"),
    [
        ("fixed", b"no frames at all", "input at byte 0: no whole record: 13 bytes are no frame"),
        ("fixed", MAGIC + b"\7\0\0\0abc", "input at byte 0: no whole record: unexpected EOF"),
        ("lines", b"{}\n{", "input at byte 3: no whole record: unexpected EOF"),
    ],
)
def test_the_command_line_reports_bad_input_in_one_line(cluster, name, framing, content, told):
    cluster.apply(spec(name))
    ended = subprocess.run(
        [
            sys.executable, "-m", "gazette_sdk.cli.gazctl", "journals", "append",
            "-l", f"name={name}", "--framing", framing, "--broker.address", cluster.address,
        ],
        input=content, capture_output=True, timeout=30, check=False,
    )  # fmt: skip
    assert ended.returncode != 0
    text = ended.stderr.decode()
    assert told in text
    assert "Traceback" not in text
    assert len(text.strip().splitlines()) == 1

"""CSV messages: lists of strings whose first is the UUID."""

from __future__ import annotations

import base64
import csv
import io

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gazette_sdk.errors import ValidationError
from gazette_sdk.framing import Csv, Cutter, Frames, Framing
from gazette_sdk.message import Publisher, Reader
from gazette_sdk.message.kinds import kind_of
from gazette_sdk.message.kinds.others import CsvRecord
from gazette_sdk.message.uuid import ACK_TXN, OUTSIDE_TXN, Envelope, Stamp, build_uuid
from support.vectors import golden, group

PRODUCER = bytes.fromhex("0d04970419de")
VECTORS = group("message", "csv_framing")
KIND = kind_of(list, "csv")


def stamp(clock: int = 160, flags: int = OUTSIDE_TXN) -> Stamp:
    made = Stamp(PRODUCER)
    made.clock, made.flags = clock, flags
    return made


class Recorded(Stamp):
    """A stamp of the UUID in a record that another writer wrote."""

    def __init__(self, text: str) -> None:
        super().__init__(PRODUCER)
        self._text = text.encode()

    def text(self) -> bytes:
        return self._text


def decode(content: bytes, message_type: type = list):
    cut = Cutter(Csv()).feed(content)
    assert cut.frames.error is None
    return kind_of(message_type, "csv").decode(Csv(), cut.buffer, cut.frames)


def encoded(records: list[list[str]]) -> bytes:
    out = bytearray()
    Csv().encode_many([KIND.encode(record, stamp()) for record in records], out)
    return bytes(out)


def uuid_of(raw) -> str:
    return str(Envelope("j", 0, 1, None, raw).uuid)


def test_records_are_encoded_as_recorded():
    case = VECTORS["encode"][0]
    out = bytearray()
    for record in case["records"]:
        Csv().encode(KIND.encode(["", *record[1:]], Recorded(record[0])), out)
    assert out.decode() == case["expect_stream_utf8"]


def test_records_are_decoded_as_recorded():
    for case in VECTORS["decode"][:2]:
        cut = Cutter(Csv()).feed(case["stream_utf8"].encode())
        decoded = KIND.decode(Csv(), cut.buffer, cut.frames)
        assert decoded.messages == case["expect"][:1]
        assert decoded.error is None


def test_a_first_field_that_is_no_uuid_is_an_error_as_recorded():
    case = VECTORS["decode"][2]
    decoded = decode(case["stream_utf8"].encode())
    assert decoded.messages == []
    assert str(decoded.error) == case["expect"][0]["error"]


@pytest.mark.parametrize("bad", [b",a\n", b'"",a\n', b"12,a\n", b"x" * 36 + b",a\n"])
def test_a_bad_uuid_is_found_behind_the_good_ones(bad):
    good = encoded([["", "1"], ["", "2"]])
    decoded = decode(good + bad + good)
    assert [message[1] for message in decoded.messages] == ["1", "2"]
    assert "invalid UUID" in str(decoded.error)


def test_bytes_that_are_no_text_are_found_behind_the_good_ones():
    good = encoded([["", "1"]])
    decoded = decode(good + good[:36] + b",\xff\n" + good)
    assert len(decoded.messages) == 1
    assert isinstance(decoded.error, UnicodeDecodeError)


@pytest.mark.parametrize("message_type", [list, CsvRecord])
def test_an_acknowledgement_has_as_many_fields(message_type):
    case = VECTORS["acknowledgement"]
    kind = kind_of(message_type, "csv")
    empty = kind.new_acknowledgement(message_type(case["of_record"]), "a/journal")
    assert type(empty) is message_type
    assert len(empty) == case["expect_fields"]
    payload = kind.encode(empty, stamp(320, ACK_TXN))
    text = stamp(320, ACK_TXN).text().decode()
    assert payload.decode() + "\n" == case["expect_line_shape"].replace(r"\n", "\n").replace(
        "<ack uuid>", text
    )
    decoded = decode(payload + b"\n", message_type)
    assert decoded.messages == [[text, "", "", ""]]
    assert Envelope("j", 0, 1, None, decoded.uuids[0]).flags == ACK_TXN


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in golden("consumer/messages/framing.json")["frames"]
        if case["content_type"] == "text/csv"
    ],
    ids=lambda case: case["name"],
)
def test_golden_records_are_decoded_and_written_again(case):
    frame = base64.b64decode(case["frame"])
    decoded = decode(frame)
    assert decoded.error is None
    [record] = decoded.messages
    assert uuid_of(decoded.uuids[0]) == record[0]
    assert KIND.encode(list(record), Recorded(record[0])) + b"\n" == frame
    if case["name"] == "csv":
        assert record[1:] == [
            "plain", "com,ma", 'quo"te', " lead", "trail ", "new\nline", "cr\rx", "", "\\.", "é",
            "\ttab",
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "written"),
    [
        ("plain", "plain"),
        ("", ""),
        ("a b ", "a b "),
        (" a", '" a"'),
        ("\u00a0a", '"\u00a0a"'),
        ("\u3000", '"\u3000"'),
        ("\x1ca", "\x1ca"),  # white space to Python alone
        ("\\.", '"\\."'),
        ("\\.x", "\\.x"),
        ("a,b", '"a,b"'),
        ('"', '""""'),
        ("a\nb", '"a\nb"'),
        ("a\rb", '"a\rb"'),
    ],
)
def test_only_fields_that_need_quotes_have_them(field, written):
    text = stamp().text().decode()
    assert KIND.encode(["", field], stamp()).decode() == f"{text},{written}"
    assert KIND.encode(["", "x", field, "y"], stamp()).decode() == f"{text},x,{written},y"


FIELD = st.text(max_size=8) | st.sampled_from(
    ["", '"', ",", "\n", "\r", "\r\n", '""', "\\.", " ", "a\rb", '",\n"']
)


@given(
    st.integers(1, 4).flatmap(
        lambda count: st.lists(st.lists(FIELD, min_size=count, max_size=count), max_size=6)
    )
)
@example([["\r"]])
@example([["x\r", ""]])
@example([["\x85", "\ud7ff"]])
def test_records_are_read_back(rows):
    records = [["", *row] for row in rows]
    try:
        content = encoded(records)
    except ValidationError:
        assert any("\ud800" <= character <= "\udfff" for row in rows for character in "".join(row))
        return
    decoded = decode(content)
    assert decoded.error is None
    assert decoded.messages == records
    assert [uuid_of(raw) for raw in decoded.uuids] == [record[0] for record in records]
    # Any reader of CSV reads the same.
    assert list(csv.reader(io.StringIO(content.decode()), strict=True)) == records


def test_records_of_other_writers_are_read():
    text = str(build_uuid(PRODUCER, 160, 0))
    lines = [
        f"{text},a\r\n",
        "\r\n",
        "\n",
        f'"{text}","b"\n',
        f"{text.upper()},c\n",
        f"urn:uuid:{text},d\r\n",
        f"{text},e\rf\n",
        f"{text}," + "x" * 200_000 + "\n",
        f'{text},"' + "y" * 200_000 + '"\n',
    ]
    for chosen in (lines, lines[:1], lines[:3], lines[3:4], lines[:4], lines[6:7], lines[8:]):
        decoded = decode("".join(chosen).encode())
        assert decoded.error is None
        expected = [
            line.rstrip("\r\n").split(",", 1)[1].strip('"') for line in chosen if "," in line
        ]
        assert [message[1] for message in decoded.messages] == expected
        assert {uuid_of(raw) for raw in decoded.uuids} <= {text}


def test_publishing_sets_the_first_field():
    record = CsvRecord(["whatever", "7"])
    KIND.encode(record, stamp())
    assert record == [stamp().text().decode(), "7"]


@pytest.mark.parametrize(
    ("record", "remedy"),
    [
        ([], "give it a first field"),
        (["", 7], "make its fields strings"),
        (["", None], "make its fields strings"),
        (["", "\ud800"], "cannot be encoded as CSV"),
    ],
)
def test_a_record_that_cannot_be_written_is_refused_with_the_remedy(record, remedy):
    with pytest.raises(ValidationError, match=remedy):
        KIND.encode(record, stamp())


def test_a_class_of_ones_own_is_made_of_its_fields_and_may_validate():
    class Ride(CsvRecord):
        @property
        def minutes(self):
            return int(self[2])

        def validate(self):
            if self.minutes < 0:
                raise ValueError("negative")

        def new_acknowledgement(self, journal):
            return Ride(["", journal, "0"])

    kind = kind_of(Ride, "csv")
    ride = Ride(["", "7", "12"])
    [read] = decode(kind.encode(ride, stamp()) + b"\n", Ride).messages
    assert type(read) is Ride
    assert read.minutes == 12
    with pytest.raises(ValueError, match="negative"):
        kind.validate(Ride(["", "7", "-1"]))
    assert kind.new_acknowledgement(ride, "a/b") == ["", "a/b", "0"]
    assert KIND.validate is None


def test_a_csv_framing_of_ones_own_needs_no_lines():
    class Semicolons(Framing):
        content_type = "text/x-csv-records"
        form = "csv"
        trailer_bytes = 1

        def encode(self, payload, out):
            out += payload + b";"

        def cut(self, buffer, *, searched=0, final=False):
            ends = [at + 1 for at in range(len(buffer)) if buffer[at : at + 1] == b";"]
            return Frames([0, *ends][: len(ends)], ends, ends[-1] if ends else 0)

    framing, out = Semicolons(), bytearray()
    records = [["", "a\n"], ["", '"']]
    framing.encode_many([KIND.encode(record, stamp()) for record in records], out)
    decoded = KIND.decode(framing, out, framing.cut(out))
    assert decoded.messages == records


def test_classes_of_other_forms_are_refused_with_the_remedy():
    with pytest.raises(ValidationError, match="journal with another content-type label"):
        kind_of(list, "json")
    with pytest.raises(ValidationError, match="CsvRecord"):
        kind_of(dict, "csv")


def test_transactions_of_records_are_read_whole_or_not_at_all(transport):
    for name in ("a/journal", "b/journal"):
        transport.create(name, content_type="text/csv")
    rows = [["", str(number), 'a "b",\n'] for number in range(20)]

    def by_number(record):
        return "a/journal" if int(record[1]) % 2 else "b/journal"

    def fail(publisher):
        with publisher.transaction(mapping=by_number) as txn:
            txn.publish(["", "98", ""])
            txn.publish(["", "99", ""])
            raise KeyError

    with Publisher(by_number, transport=transport) as publisher:
        publisher.publish(rows[0])
        with pytest.raises(KeyError):
            fail(publisher)
        with publisher.transaction() as txn:
            for row in rows[1:10]:
                txn.publish(row)
            txn.publish_batch([CsvRecord(row) for row in rows[10:19]])
        publisher.publish(rows[19])
    for ring_size in (1, 8192):  # with a ring of one message most are read again
        for name, parity in (("a/journal", 1), ("b/journal", 0)):
            with Reader(list, name=name, transport=transport, ring_size=ring_size) as reader:
                found = [envelope.message[1:] for envelope in reader]
            assert found == [row[1:] for row in rows if int(row[1]) % 2 == parity]
    with Reader(list, name="a/journal", transport=transport, acknowledgements=True) as reader:
        acknowledgements = [each.message for each in reader if each.flags == ACK_TXN]
    assert [record[1:] for record in acknowledgements] == [["", ""]]

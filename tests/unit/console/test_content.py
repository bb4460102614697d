"""Masks of the console: no masked value comes through. Names of the fields of messages."""

from __future__ import annotations

import itertools
import json

import pytest
from google.protobuf import descriptor_pb2
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.console.content import (
    LINE_BYTES_MAX,
    MASKED,
    ConsoleContent,
    MaskedContent,
    Masks,
    MessageTypes,
)
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.framing import framing_for
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import label_set

SECRET = "s3cret"
OPEN = "open"


def spec(content_type="application/x-ndjson", topic="orders"):
    labels = label_set((("content-type", content_type), ("topic", topic)))
    return pb.JournalSpec(name=f"{topic}/part-000", labels=labels)


def masked(content, *masks, of=None, offset=0, pieces=1):
    """The lines of an answer about content, which comes in pieces."""
    of = of or spec()
    found = MaskedContent(of, Masks.parse(masks).of(of), offset)
    size = max(1, -(-len(content) // pieces))
    answer = b"".join(
        found.feed(content[begin : begin + size]) for begin in range(0, len(content), size)
    )
    return [json.loads(line) for line in (answer + found.finish()).splitlines()]


def shown(message, *masks):
    """The value that is shown of a message."""
    [line, _] = masked(json.dumps(message).encode() + b"\n", *masks)
    return json.loads(line["text"])


def test_fields_are_masked_by_their_paths():
    order = {"customer": {"email": "a@b", "name": "ada"}, "card": {"no": 1, "cvc": [2]}, "cents": 5}
    assert shown(order, "topic=orders: customer.email, card.*") == {
        "customer": {"email": MASKED, "name": "ada"},
        "card": {"no": MASKED, "cvc": MASKED},
        "cents": 5,
    }
    assert shown(order, "topic=orders: customer.email", ": card") == {
        "customer": {"email": MASKED, "name": "ada"},
        "card": MASKED,
        "cents": 5,
    }


def test_elements_of_arrays_are_masked_and_a_wildcard_is_any_key():
    message = {"items": [{"to": "x"}, [{"to": "y"}]], "a": {"to": "z", "by": 1}, "to": 2}
    assert shown(message, ": items.to") == message | {"items": [{"to": MASKED}, [{"to": MASKED}]]}
    assert shown(message, ": *.to") == {
        "items": [{"to": MASKED}, [{"to": MASKED}]],
        "a": {"to": MASKED, "by": 1},
        "to": 2,
    }
    assert shown({"a.b": {"c d": 1}, "a": {"b": 2}}, ': "a.b"."c d"') == {
        "a.b": {"c d": MASKED},
        "a": {"b": 2},
    }


def test_a_field_that_is_no_object_is_masked_as_a_whole():
    assert shown({"customer": '{"email":"a@b"}'}, ": customer.email") == {"customer": MASKED}
    assert shown({"customer": [None, 1]}, ": customer.email") == {"customer": [None, MASKED]}


def test_only_selected_journals_are_masked():
    masks = Masks.parse(["topic=orders: a", ": b.c", "topic in (clicks,views): d"])
    assert masks.of(spec()) == (("a",), ("b", "c"))
    assert masks.of(spec(topic="views")) == (("b", "c"), ("d",))
    assert masks.of(None) == (("a",), ("b", "c"), ("d",)), "the journal is not known"
    assert not Masks()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no ': '"),
        ("topic=orders", "has no ': '"),
        ("topic=orders:customer.email", "has no ': '"),
        ("topic=orders:", "has no path of a field at 'its end'"),
        ("topic=orders: a,", "at 'its end'"),
        ("topic=orders: a..b", r"at '\.\.b'"),
        ("topic=orders: a b", "at ' b'"),
        ("topic=orders: .a", r"at '\.a'"),
        ('topic=orders: "a', "at"),
        ('topic=orders: "\\x"', "malformed key"),
        ("=: a", "no valid selector"),
    ],
)
def test_a_malformed_mask_is_refused(text, reason):
    with pytest.raises(ConfigurationError, match=reason) as caught:
        Masks.parse([text])
    assert "customer.email" in str(caught.value) or "selector" in str(caught.value)


def test_lines_that_are_no_json_are_not_shown_and_offsets_are_those_of_the_journal():
    content = b'{"a":1}\n{"a":' + SECRET.encode() + b'}\n\n{"b":2}\n{"a'
    assert masked(content, ": a", offset=100) == [
        {"begin": 100, "end": 108, "text": f'{{"a":"{MASKED}"}}'},
        {"begin": 108, "end": 121},
        {"begin": 121, "end": 122, "text": ""},
        {"begin": 122, "end": 130, "text": '{"b":2}'},
        {"end": 133},
    ]


def test_a_message_that_is_too_long_is_not_shown():
    long = json.dumps({"a": SECRET, "b": "x" * LINE_BYTES_MAX}).encode() + b"\n"
    lines = masked(b'{"b":1}\n' + long + b'{"b":2}\n', ": a", pieces=40)
    assert lines == [
        {"begin": 0, "end": 8, "text": '{"b":1}'},
        {"begin": 8, "end": 8 + len(long)},
        {"begin": 8 + len(long), "end": 16 + len(long), "text": '{"b":2}'},
        {"end": 16 + len(long)},
    ]


def test_messages_deeper_than_a_parser_goes_are_not_shown():
    deep = b'{"a":' * 2000 + b"1" + b"}" * 2000 + b"\n"
    wide = b"[" * 300 + b"1" + b"]" * 300 + b"\n"
    assert [set(line) for line in masked(deep + wide, ": a")[:2]] == [{"begin", "end"}] * 2


@pytest.mark.parametrize("content_type", ["text/csv", "application/x-protobuf-fixed"])
def test_other_framings_are_cut_and_not_shown(content_type):
    framed, ends = bytearray(), []
    framing = framing_for(content_type)
    for text in ("one", "two", SECRET):
        framing.encode(text.encode(), framed)
        ends.append(len(framed))
    for pieces in (1, 5, len(framed)):
        lines = masked(bytes(framed), ": a", of=spec(content_type), pieces=pieces)
        assert [line["end"] for line in lines] == [*ends, len(framed)]
        assert all("text" not in line for line in lines)


@pytest.mark.parametrize("of", [spec("application/x-gazette-recoverylog"), spec("image/png")])
def test_content_without_a_framing_is_not_shown(of):
    assert masked(b"abc" + SECRET.encode(), ": a", of=of, offset=7, pieces=3) == [
        {"begin": 7, "end": 10},
        {"begin": 10, "end": 13},
        {"begin": 13, "end": 16},
        {"end": 16},
    ]


# ---------------------------------------------------------------- the law

KEYS = st.sampled_from(["email", "card", "a", "b.c", 'q"'])
LEAVES = st.sampled_from([OPEN, 1, None, True, 2.5])


@st.composite
def json_texts(draw, depth=0, *, is_secret=False):
    """JSON text, in any spelling, whose values below the key ``email`` have the secret."""
    kind = draw(st.integers(0, 3)) if depth < 4 else 0
    if kind == 1:
        inner = [
            draw(json_texts(depth + 1, is_secret=is_secret)) for _ in range(draw(st.integers(0, 3)))
        ]
        return f"[{', '.join(inner)}]"
    if kind >= 2:
        pairs = []
        for _ in range(draw(st.integers(0, 4))):  # also with the same key several times
            key = draw(KEYS)
            value = draw(json_texts(depth + 1, is_secret=is_secret or key == "email"))
            pairs.append(f"{draw(spellings(key))} :{value}")
        return "{" + ",".join(pairs) + "}"
    return json.dumps(SECRET if is_secret else draw(LEAVES))


@st.composite
def spellings(draw, key):
    """A JSON string of a key, some letters of which are escaped."""
    letters = [
        f"\\u{ord(letter):04x}" if draw(st.booleans()) else json.dumps(letter)[1:-1]
        for letter in key
    ]
    return f'"{"".join(letters)}"'


ANY_DEPTH = [f": {'*.' * depth}email" for depth in range(6)]


@given(
    st.lists(st.one_of(json_texts(), st.just("no json " + SECRET)), min_size=1, max_size=4),
    st.data(),
)
def test_no_masked_value_is_in_an_answer(messages, data):
    content = "".join(message + "\n" for message in messages).encode()
    begin = data.draw(st.integers(0, len(content)), label="a read begins anywhere")
    cuts = sorted(data.draw(st.lists(st.integers(begin, len(content)), max_size=5)))
    found = MaskedContent(spec(), Masks.parse(ANY_DEPTH).of(spec()), begin)
    places = [begin, *cuts, len(content)]
    pieces = [content[one:other] for one, other in itertools.pairwise(places)]
    answer = b"".join(map(found.feed, pieces)) + found.finish()
    assert SECRET.encode() not in answer
    lines = [json.loads(line) for line in answer.splitlines()]
    assert lines.pop() == {"end": len(content)}
    ends = [begin, *(line["end"] for line in lines)]
    assert [line["begin"] for line in lines] == ends[:-1], "messages follow each other"
    assert ends[-1] == len(content)
    for line in lines:
        frame = content[line["begin"] : line["end"]]
        assert frame.endswith(b"\n")
        if frame.strip() and SECRET.encode() not in frame:
            assert line["begin"] == begin or OPEN.encode() not in frame or "text" in line


# ---------------------------------------------------------------- types


def descriptors():
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="shop.proto", package="shop", syntax="proto3")
    order = file.message_type.add(name="Order")
    order.field.add(name="customer", number=1, type=kinds.TYPE_STRING)
    order.field.add(name="items", number=2, type=kinds.TYPE_MESSAGE, type_name=".shop.Order.Item")
    order.field.add(name="state", number=3, type=kinds.TYPE_ENUM, type_name=".shop.State")
    order.field.add(name="parent", number=4, type=kinds.TYPE_MESSAGE, type_name=".shop.Order")
    order.nested_type.add(name="Item").field.add(name="cents", number=1, type=kinds.TYPE_SINT64)
    state = file.enum_type.add(name="State")
    state.value.add(name="OPEN", number=0)
    state.value.add(name="PAID", number=1)
    return descriptor_pb2.FileDescriptorSet(file=[file])


def test_a_table_has_a_message_type_and_those_within_it(tmp_path):
    path = tmp_path / "shop.binpb"
    path.write_bytes(descriptors().SerializeToString())
    types = MessageTypes.load(str(path))
    assert types.table("shop.Order") == {
        "root": "shop.Order",
        "types": {
            "shop.Order": {
                "1": ["customer", 9],
                "2": ["items", 11, "shop.Order.Item"],
                "3": ["state", 14, "shop.State"],
                "4": ["parent", 11, "shop.Order"],
            },
            "shop.Order.Item": {"1": ["cents", 18]},
            "shop.State": {"0": "OPEN", "1": "PAID"},
        },
    }
    assert types.table("shop.None") == {}
    assert ConsoleContent.of([": a"], str(path)).features == "masks types"
    assert ConsoleContent.of([], "").features == ""


def test_a_file_that_is_no_descriptor_set_is_refused(tmp_path):
    path = tmp_path / "shop.binpb"
    for content, reason in (
        (None, "No such file"),
        (b"\xff", "no descriptor set"),
        (b"", "no mess"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigurationError, match=reason) as caught:
            MessageTypes.load(str(path))
        assert "protoc --descriptor_set_out" in str(caught.value)

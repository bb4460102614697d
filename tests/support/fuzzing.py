"""Seeded cases of hostile input: mutated requests, frames, messages and texts.

A case depends on its seed, its kind and its number alone, so each can be made again by itself.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable

from google.protobuf.message import Message

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.protocol.durations import from_ns
from gazette_sdk.protocol.labels import label_set
from gazette_sdk.protocol.rules import RPCS
from gazette_sdk.protocol.stream_frames import PREFACE, Kind, Method, encode, encode_call
from support import raw_grpc

JOURNAL = "fuzz/journal"
NOW = 1_800_000_000.0
"""Unix time at which tokens are signed."""

KEYS = "ZnV6emVkIGtleSBvZiB0aGUgdGVzdHM="

_TOKENS = (
    *(
        b"\x00",
        b"\xff",
        b"\r\n",
        b"\n",
        b"\r\n\r\n",
        b" ",
        b"/",
        b"//",
        b"..",
        b"%",
        b"%00",
        b"%2f",
    ),
    *(b"-1", b"0", b"9223372036854775807", b"9223372036854775808", b"1e999", b"0x7f", b"=", b","),
    *(b"(", b")", b"!", b":", b"*", b"&", b"&a ", b"*a", b"[", b"]", b"{", b"}", b'"', b"'", b"#"),
    *(
        b"\xc3\xbc",
        b"\xed\xa0\x80",
        b"\xf0\x9f\x92\xa9",
        b"\\",
        b"\\ud800",
        b"- ",
        b"? ",
        b"| ",
        b"@",
    ),
    *(b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n", b"Content-Encoding: gzip\r\n"),
    *(b"Expect: 100-continue\r\n", b"Connection: Upgrade\r\nUpgrade: websocket\r\n"),
    *(b"name=", b"prefix=", b"in (a,b)", b"not in", b"!!python/object:os.system", b"!!binary "),
)
"""Pieces that parsers give a meaning to."""


def case(seed: int, kind: str, number: int) -> tuple[random.Random, bytes]:
    """A case, and the random numbers with which to go on."""
    chance = random.Random(f"{seed}/{kind}/{number}")
    return chance, _MAKERS[kind](chance)


def mutated(chance: random.Random, original: bytes) -> bytes:
    """The bytes with some changes; with none in one of eight cases."""
    content = bytearray(original)
    for _ in range(chance.choice((0, 1, 1, 2, 2, 3, 5, 20))):
        at = chance.randrange(len(content) + 1)
        match chance.randrange(7):
            case 0 if at < len(content):
                content[at] ^= 1 << chance.randrange(8)
            case 1 if at < len(content):
                content[at] = chance.randrange(256)
            case 2:
                del content[at : at + chance.choice((1, 1, 2, 8, 64))]
            case 3:
                content[at:at] = chance.choice(_TOKENS)
            case 4:
                content[at:at] = content[at : at + chance.choice((1, 4, 16, 64))]
            case 5 if chance.random() < 0.2:
                del content[at:]
            case 6 if chance.random() < 0.1:
                content[at:at] = chance.choice(_TOKENS) * chance.choice((10, 100, 1000))
            case _:
                content[at:at] = chance.randbytes(chance.choice((1, 2, 4)))
    return bytes(content)


# ------------------------------------------------------------------ messages


_NAMED = ([("name", JOURNAL)], [("name:prefix", "fuzz/")], [("name", "")], [])


def _selector(chance: random.Random) -> pb.LabelSelector:
    return pb.LabelSelector(
        include=label_set(_NAMED[chance.randrange(4)]),
        exclude=label_set([("a", "b")] if chance.random() < 0.2 else ()),
    )


def _spec(chance: random.Random) -> pb.JournalSpec:
    spec = pb.JournalSpec(
        name=chance.choice(
            (JOURNAL, "fuzz/other", "fuzz/" + "x" * chance.randrange(1, 600), "/bad")
        ),
        replication=chance.choice((0, 1, 3, -1)),
        flags=chance.choice((0, 1, 2, 4, 99)),
        max_append_rate=chance.choice((0, 1, -1, 1 << 62)),
    )
    spec.fragment.length = chance.choice((0, 1024, 1 << 62))
    spec.fragment.compression_codec = chance.choice((0, 1, 2, 5, 77))
    spec.fragment.stores.append(chance.choice(("file:///", "file:///a/", "x", "file://h/p", "")))
    spec.fragment.path_postfix_template = chance.choice(
        ("", "{{ .Spool.FirstAppendTime }}", "{{", "{{.}}")
    )
    spec.fragment.refresh_interval.CopyFrom(from_ns(chance.choice((0, 10**9, -1, 1 << 62))))
    return spec


def _request(chance: random.Random, name: str) -> Message:  # noqa: PLR0911 - one for each call
    """A request that may be valid."""
    offset = chance.choice((0, 0, 1, -1, 100, -2, (1 << 63) - 1))
    match name:
        case "List":
            return pb.ListRequest(selector=_selector(chance), watch=chance.random() < 0.2)
        case "Apply":
            change = pb.ApplyRequest.Change(expect_mod_revision=999_999_999, upsert=_spec(chance))
            if chance.random() < 0.3:
                change.ClearField("upsert")
                change.delete = JOURNAL
            return pb.ApplyRequest(changes=[change] * chance.choice((0, 1, 1, 2, 130)))
        case "Read":
            return pb.ReadRequest(
                journal=chance.choice((JOURNAL, JOURNAL, "no/such", "", "a;b")),
                offset=offset,
                end_offset=chance.choice((0, 0, 10, -1)),
                block=chance.random() < 0.3,
                metadata_only=chance.random() < 0.2,
                begin_mod_time=chance.choice((0, 0, 1, -1, 1 << 62)),
            )
        case "Append":
            return pb.AppendRequest(
                journal=chance.choice((JOURNAL, JOURNAL, "no/such", "")),
                offset=chance.choice((0, 0, 0, 1, -1, 1 << 62)),
                check_registers=_selector(chance) if chance.random() < 0.2 else None,
                union_registers=label_set([("a", "b")] if chance.random() < 0.2 else ()),
                suspend=chance.choice((0, 0, 0, 1, 9)),
                content=b"content where none may be" if chance.random() < 0.1 else b"",
            )
        case "Replicate":
            fragment = pb.Fragment(journal=JOURNAL, begin=max(0, offset), end=max(0, offset))
            return pb.ReplicateRequest(proposal=fragment, acknowledge=chance.random() < 0.5)
        case "ListFragments":
            return pb.FragmentsRequest(
                journal=chance.choice((JOURNAL, "no/such")),
                page_limit=chance.choice((0, 1, -1, 10_000, 1 << 30)),
                next_page_token=offset,
                signatureTTL=from_ns(chance.choice((1, 10**9, -1, 1 << 62))),
            )
        case _:
            return pb.FragmentStoreHealthRequest(
                fragment_store=chance.choice(
                    ("file:///", "file:///no/such/", "x", "", "file:///?a=b")
                ),
                check_delete=chance.random() < 0.3,
                check_delete_prefix=chance.choice(("", "a/", "../", "/")),
            )


def grpc_call(chance: random.Random) -> tuple[str, list[bytes]]:
    """A method's name and its messages."""
    name = chance.choice(RPCS).name
    count = chance.choice((1, 1, 2, 4)) if name in {"Append", "Replicate"} else 1
    messages = [mutated(chance, _request(chance, name).SerializeToString()) for _ in range(count)]
    if name == "Append" and chance.random() < 0.5:
        messages += [pb.AppendRequest(content=b"content\n").SerializeToString(), b""]
    return name, messages


# --------------------------------------------------------------------- bytes


def _http(chance: random.Random) -> bytes:
    body = chance.choice((b"", b"content\n", b"{}", b'{"journal": "fuzz/journal"}'))
    method, target = chance.choice(
        (
            ("GET", f"/{JOURNAL}?offset=0"),
            ("GET", f"/{JOURNAL}?offset=-1&block=true"),
            ("HEAD", f"/{JOURNAL}"),
            ("GET", "/debug/ready"),
            ("PUT", f"/{JOURNAL}"),
            ("PUT", f"/{JOURNAL}"),
            ("POST", "/v1/journals/list"),
            ("POST", "/v1/journals/read"),
            ("OPTIONS", "/v1/journals/list"),
            ("DELETE", f"/{JOURNAL}"),
        )
    )
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost"]
    if method == "PUT" and chance.random() < 0.3:
        body = gzip.compress(body * chance.choice((1, 1000)), mtime=0)
        lines.append("Content-Encoding: gzip")
    if chance.random() < 0.3:
        lines.append("Transfer-Encoding: chunked")
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    elif method in {"PUT", "POST"}:
        lines.append(f"Content-Length: {len(body)}")
    if chance.random() < 0.1:
        lines.append("Authorization: Bearer abc")
    if chance.random() < 0.2:
        lines.append("Accept-Encoding: " + chance.choice(("gzip", "br, gzip;q=0", "gzip;q=")))
    request = "\r\n".join([*lines, "", ""]).encode() + body
    return mutated(chance, request * chance.choice((1, 1, 1, 3)))


def _http2(chance: random.Random) -> bytes:
    if chance.random() < 0.5:
        return _half_requests(chance)
    settings = bytes.fromhex("000000040000000000")
    frames = b"".join(
        len(payload).to_bytes(3, "big")
        + bytes((chance.randrange(12), chance.randrange(256)))
        + chance.choice((0, 1, 3, 1 << 31)).to_bytes(4, "big")
        + payload
        for payload in (chance.randbytes(chance.randrange(40)) for _ in range(chance.randrange(4)))
    )
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + mutated(chance, settings + frames)


def _half_requests(chance: random.Random) -> bytes:
    """Unary gRPC calls whose messages are never complete."""
    frames = []
    for stream in range(1, chance.choice((2, 4, 16, 200)), 2):
        rpc = chance.choice(RPCS)
        content = _request(chance, rpc.name).SerializeToString()
        length = len(content) + chance.choice((1, 1000, 4_000_000))
        frames.append(raw_grpc.call(stream, rpc.path))
        frames.append(raw_grpc.half_message(stream, length, content[:1000]))
    return raw_grpc.PREFACE + mutated(chance, b"".join(frames))


def _stream(chance: random.Random) -> bytes:
    frames: list[bytes] = []
    for _ in range(chance.choice((1, 1, 2, 4, 8))):
        if chance.random() < 0.7:
            rpc = chance.choice(RPCS)
            request = _request(chance, rpc.name).SerializeToString()
            if chance.random() < 0.5:
                request = mutated(chance, request)
            frames.append(encode_call(Method(rpc.number), request, b""))
            if rpc.client_streams:
                frames += [encode(Kind.CONTENT, b"content\n"), encode(Kind.END, b"")]
        else:
            kind = chance.choice(tuple(Kind))
            size = 0 if kind in {Kind.END, Kind.ABORT} else chance.randrange(60)
            frames.append(encode(kind, chance.randbytes(size)))
    content = b"".join(frames)
    if chance.random() < 0.1:
        return mutated(chance, PREFACE + content)
    return PREFACE + mutated(chance, content)


_TREE = b"""\
name: fuzz/
replication: 3
labels:
- name: a
  value: b
fragment:
  length: 1024
  compression_codec: GZIP
  stores: [file:///]
  refresh_interval: 1m0s
  retention: 1h
children:
- name: fuzz/a
  comment: one
- name: fuzz/b
  delete: true
  revision: 7
"""
_TREES = (
    _TREE,
    b"children: &a\n- {name: a, labels: &b [{name: x, value: y}]}\n- {name: b, labels: *b}\n",
    b"suspend: {level: PARTIAL, offset: 7}\nflags: O_RDWR\nmax_append_rate: 0x10\nname: 'a/b'\n",
)


def _yaml(chance: random.Random) -> bytes:
    return mutated(chance, chance.choice(_TREES))


def _selector_text(chance: random.Random) -> bytes:
    terms = ("name=a/b", "prefix=a/", "aa in (b,c)", "dd not in (e)", "!ff", "gg", "hh!=i")
    return mutated(chance, ",".join(chance.choices(terms, k=chance.randrange(1, 5))).encode())


def _fragment_name(chance: random.Random) -> bytes:
    begin = chance.choice((0, 1, 1 << 40, (1 << 63) - 1))
    name = b"%016x-%016x-%s%s" % (
        begin,
        begin + chance.randrange(3),
        chance.randbytes(20).hex().encode(),
        chance.choice((b".raw", b".gz", b".zst", b".sz", b".gzod")),
    )
    return mutated(chance, chance.choice((b"", b"date=2020-01-01/hour=01/")) + name)


_AUTHORITY = Authority(KEYS)


def _token(chance: random.Random) -> bytes:
    token = _AUTHORITY.header(Capability.READ, _selector(chance), 60, NOW)
    assert token is not None
    return mutated(chance, token.encode())


_MAKERS: dict[str, Callable[[random.Random], bytes]] = {
    "http": _http,
    "http2": _http2,
    "stream": _stream,
    "grpc": lambda _: b"",  # see grpc_call
    "yaml": _yaml,
    "selector": _selector_text,
    "fragment": _fragment_name,
    "token": _token,
}
KINDS = tuple(_MAKERS)

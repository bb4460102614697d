"""Kinds of frames, and their encoding."""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from gazette_sdk.errors import StreamProtocolError
from gazette_sdk.protocol.service import RPCS
from gazette_sdk.protocol.stream_pb2 import CallHead, Hello

__all__ = [
    "ABORT_FRAME",
    "CONTENT_BYTES_MAX",
    "END_FRAME",
    "FRAME_HEADER",
    "HEADER_BYTES",
    "MESSAGE_BYTES_MAX",
    "METHODS",
    "PAYLOAD_BYTES_MAX",
    "PING_BYTES_MAX",
    "PREFACE",
    "STATUS_OK_FRAME",
    "WIRE_VERSION",
    "CallHead",
    "Frame",
    "Hello",
    "Kind",
    "Method",
    "MethodTraits",
    "complaint",
    "encode",
    "encode_append",
    "encode_call",
    "encode_goaway",
    "encode_hello",
    "encode_status",
    "header",
]

PREFACE = b"GZT/1\r\n\r\n"
"""First bytes that a client sends. They read as an HTTP request line that no server accepts."""

WIRE_VERSION = 1
"""Version that a HELLO announces."""

HEADER_BYTES = 5
"""Length of a frame's kind and length."""

CONTENT_BYTES_MAX = 1 << 20
"""Greatest payload of a CONTENT frame."""

MESSAGE_BYTES_MAX = 16 << 20
"""Greatest payload of a frame that carries a message or a text."""

PING_BYTES_MAX = 64
"""Greatest payload of PING and PONG: enough for a time and a nonce, too small to be a load."""

_TEXT_BYTES_MAX = 16 << 10
"""Longer texts of STATUS and GOAWAY are cut when they are encoded."""


class Kind(enum.IntEnum):
    """Kinds of frames."""

    HELLO = 1
    CALL = 2
    MESSAGE = 3
    CONTENT = 4
    END = 5
    ABORT = 6
    STATUS = 7
    PING = 8
    PONG = 9
    GOAWAY = 10


class Method(enum.IntEnum):
    """Numbers of the methods: those of journals up to 15, those of shards from 16."""

    LIST = 1
    APPLY = 2
    READ = 3
    APPEND = 4
    REPLICATE = 5
    LIST_FRAGMENTS = 6
    FRAGMENT_STORE_HEALTH = 7
    SHARD_STAT = 16
    SHARD_LIST = 17
    SHARD_APPLY = 18
    SHARD_GET_HINTS = 19
    SHARD_UNASSIGN = 20


class MethodTraits(NamedTuple):
    """Streaming and content of a method's calls.

    Attributes:
        client_streams: MESSAGE and CONTENT may follow its CALL, up to END.
        server_streams: it is answered by any number of MESSAGEs, else by exactly one.
        answers_content: it may be answered by CONTENT, too.
    """

    client_streams: bool = False
    server_streams: bool = False
    answers_content: bool = False


METHODS: dict[int, MethodTraits] = {
    **{
        int(rpc.number): MethodTraits(
            rpc.client_streams, rpc.server_streams, rpc.number == Method.READ
        )
        for rpc in RPCS
    },
    **{int(method): MethodTraits() for method in Method if method >= Method.SHARD_STAT},
}
"""Every method by its number."""


class Frame(NamedTuple):
    """A whole frame. ``kind`` is a number of :class:`Kind`."""

    kind: int
    payload: bytes


# ------------------------------------------------------------------ encoding

FRAME_HEADER = struct.Struct(">BI")
_CALL_HEADER = struct.Struct(">BIBH")
_APPEND_TAIL = bytes((Kind.END, 0, 0, 0, 0))

_pack_header = FRAME_HEADER.pack
_pack_call = _CALL_HEADER.pack

_LIMITS: dict[int, int] = {
    Kind.CONTENT: CONTENT_BYTES_MAX,
    Kind.END: 0,
    Kind.ABORT: 0,
    Kind.PING: PING_BYTES_MAX,
    Kind.PONG: PING_BYTES_MAX,
}
PAYLOAD_BYTES_MAX = tuple(
    _LIMITS.get(kind, MESSAGE_BYTES_MAX) if Kind.HELLO <= kind <= Kind.GOAWAY else -1
    for kind in range(256)
)
"""Greatest payload of each first byte of a header; -1 where it is no kind."""


def header(kind: int, length: int) -> bytes:
    """Return the five bytes before a payload that is sent by itself, such as by ``sendfile``.

    Args:
        kind: of the frame.
        length: of the payload, in bytes.

    Raises:
        StreamProtocolError: the kind is unknown, or its payload may not be so long.
    """
    if length > PAYLOAD_BYTES_MAX[kind]:
        raise StreamProtocolError(complaint(kind, length))
    return _pack_header(kind, length)


def encode(kind: int, payload: bytes) -> bytes:
    """Return a whole frame.

    Raises:
        StreamProtocolError: the kind is unknown, or its payload may not be so long.
    """
    length = len(payload)
    if length > PAYLOAD_BYTES_MAX[kind]:
        raise StreamProtocolError(complaint(kind, length))
    return _pack_header(kind, length) + payload


END_FRAME = encode(Kind.END, b"")
ABORT_FRAME = encode(Kind.ABORT, b"")
STATUS_OK_FRAME = encode(Kind.STATUS, b"\x00")
"""STATUS of a call that succeeded."""


def encode_call(method: int, request: bytes, head: bytes = b"") -> bytes:
    """Return a CALL frame.

    Args:
        method: number of the method.
        request: the encoded request.
        head: an encoded ``CallHead``; empty stands for no metadata and no bound. Callers that
            make many calls with the same head encode it once.

    Raises:
        StreamProtocolError: the head or the request is too long.
    """
    head_length = len(head)
    length = 3 + head_length + len(request)
    if head_length > 0xFFFF or length > MESSAGE_BYTES_MAX:
        raise StreamProtocolError(_too_long_call(head_length, length))
    return b"%b%b%b" % (_pack_call(2, length, method, head_length), head, request)


def encode_append(request: bytes, content: bytes, head: bytes = b"") -> bytes:
    """Return a whole Append of one piece of content: CALL, CONTENT and END, ready for one write.

    Args:
        request: the encoded ``AppendRequest`` that names the journal.
        content: up to 1 MiB.
        head: an encoded ``CallHead``.

    Raises:
        StreamProtocolError: the head, the request or the content is too long.
    """
    head_length = len(head)
    length = 3 + head_length + len(request)
    content_length = len(content)
    if head_length > 0xFFFF or length > MESSAGE_BYTES_MAX:
        raise StreamProtocolError(_too_long_call(head_length, length))
    if content_length > CONTENT_BYTES_MAX:
        raise StreamProtocolError(complaint(Kind.CONTENT, content_length))
    return b"".join(
        (
            _pack_call(2, length, 4, head_length),
            head,
            request,
            _pack_header(4, content_length),
            content,
            _APPEND_TAIL,
        )
    )


def encode_status(code: int, text: str = "", kind: str = "") -> bytes:
    """Return a STATUS frame.

    Args:
        code: gRPC status code.
        text: reason of the failure; cut after 16 KiB. NULs in it become spaces.
        kind: name of the error's class, where a client distinguishes classes that share a code.
    """
    if not (code or text or kind):
        return STATUS_OK_FRAME
    payload = bytes((code,)) + _cut_text(text.replace("\0", " "))
    if kind:
        payload += b"\0" + kind.encode()
    return encode(Kind.STATUS, payload)


def encode_goaway(reason: str) -> bytes:
    """Return a GOAWAY frame; the reason is cut after 16 KiB."""
    return encode(Kind.GOAWAY, _cut_text(reason))


def encode_hello(
    zone: str = "",
    suffix: str = "",
    *,
    content_bytes_max: int = CONTENT_BYTES_MAX,
    message_bytes_max: int = MESSAGE_BYTES_MAX,
) -> bytes:
    """Return a server's HELLO frame.

    Args:
        zone: of the server's member key; empty where it is no member.
        suffix: of the same.
        content_bytes_max: greatest CONTENT that the server accepts.
        message_bytes_max: greatest CALL or MESSAGE that the server accepts.
    """
    hello = Hello(
        zone=zone,
        suffix=suffix,
        wire_version=WIRE_VERSION,
        content_bytes_max=content_bytes_max,
        message_bytes_max=message_bytes_max,
    )
    return encode(Kind.HELLO, hello.SerializeToString())


def _cut_text(text: str) -> bytes:
    encoded = text.encode("utf-8", "replace")
    if len(encoded) > _TEXT_BYTES_MAX:
        encoded = encoded[:_TEXT_BYTES_MAX].decode("utf-8", "ignore").encode()
    return encoded


def _too_long_call(head_length: int, length: int) -> str:
    if head_length > 0xFFFF:
        return f"a call's head of {head_length} bytes exceeds 65535"
    return complaint(Kind.CALL, length)


def complaint(kind: int, length: int) -> str:
    """Return the message of the error for a header of this kind and length."""
    bound = PAYLOAD_BYTES_MAX[kind]
    if bound < 0:
        return f"frame of unknown kind {kind}"
    return f"{Kind(kind).name} frame of {length} bytes exceeds {bound}"

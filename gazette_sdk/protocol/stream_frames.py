"""Frames of the stream transport: encoding and decoding.

A connection begins with :data:`PREFACE`, which the client sends. What follows, in both directions,
is a sequence of frames::

    kind: u8 | length: u32, big-endian | payload: `length` bytes

Nothing here reads or writes. Encoders return bytes. :class:`FrameBuffer` owns the memory that a
socket receives into (``asyncio.BufferedProtocol``, ``socket.recv_into``), and returns frames. It
returns the same frames however the bytes are cut, checks a frame's kind and length as soon as its
five header bytes are there, and holds no more than one incomplete frame.

Payloads with an inner form:

- CALL: ``u8`` method, ``u16`` length of the head, the head (a ``CallHead``), the request.
- STATUS: ``u8`` gRPC status code, then UTF-8 text. Where the peer should know the *class* of the
  error, not only its text, a NUL and the class's name follow the text.
- HELLO: a ``Hello``. GOAWAY: UTF-8 text. PING and PONG: up to 64 bytes of any kind.
"""

from __future__ import annotations

import enum
import struct
from functools import partial
from typing import NamedTuple

from google.protobuf.message import DecodeError as ProtobufDecodeError

from gazette_sdk.errors import StreamProtocolError
from gazette_sdk.protocol.rules import RPCS
from gazette_sdk.protocol.stream_pb2 import CallHead, Hello

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


_CODE_MAX = 16
"""Greatest gRPC status code."""

_unpack_header = FRAME_HEADER.unpack_from
_frame_of = partial(tuple.__new__, Frame)  # equal to Frame(), at half of its cost


class FrameBuffer:
    """Decoder of frames in the memory that a socket receives into.

    For ``asyncio.BufferedProtocol`` and for ``recv_into``: :meth:`get_buffer`, receive,
    :meth:`updated`. The memory begins small and doubles as frames fill it, up to twice the bytes
    received. It shrinks when few bytes are received, so that thousands of connections cost little.
    A payload is copied once.

    Args:
        opening: bytes before the first frame: :data:`PREFACE` at a server that receives it,
            nothing elsewhere.

    Attributes:
        error: the violation of the rules, if any. Check it after each :meth:`updated`: frames
            before the bad one were returned, and none follow.
        missing: bytes of an incomplete frame that are known to follow.
    """

    __slots__ = ("_begin", "_end", "_memory", "_opening", "_quiet", "_view", "error", "missing")

    SMALL_BYTES = 8 << 10
    """Memory of a quiet connection."""

    LARGE_BYTES = 256 << 10
    """Greatest memory for many small frames; only one greater frame needs more."""

    QUIET_UPDATES = 16
    """The memory shrinks after so many updates in a row of few, whole frames."""

    def __init__(self, opening: bytes = b"") -> None:
        self.error: StreamProtocolError | None = None
        self.missing = 0
        self._opening = opening
        self._begin = 0
        self._end = 0
        self._quiet = 0
        self._memory = bytearray(self.SMALL_BYTES)
        self._view = memoryview(self._memory)

    @property
    def inside_frame(self) -> bool:
        """Return True if the bytes so far end inside the opening or inside a frame."""
        return self._begin < self._end or bool(self._opening)

    @property
    def frame_bytes(self) -> int:
        """Length of the incomplete frame, as far as it is known; 0 if there is none."""
        buffered = self._end - self._begin
        return buffered + self.missing if buffered else 0

    def get_buffer(self, _sizehint: int = -1) -> memoryview:
        """Return the memory for the next bytes: never empty, valid until :meth:`updated`."""
        return self._view[self._end :]

    def updated(self, length: int) -> list[Frame]:
        """Decode the next bytes of the stream: the first ``length`` of :meth:`get_buffer`.

        Returns:
            The frames that are complete now, in order. :attr:`error` is set if one was wrong.

        Raises:
            StreamProtocolError: earlier bytes were wrong already.
        """
        if self.error is not None:
            raise self.error
        frames: list[Frame] = []
        view = self._view
        begin = self._begin
        fresh = begin == self._end
        end = self._end = self._end + length
        if self._opening:
            begin = self._past_opening(begin, end)
        wanted = HEADER_BYTES
        while (payload := begin + HEADER_BYTES) <= end:
            kind, size = _unpack_header(view, begin)
            if size > PAYLOAD_BYTES_MAX[kind]:
                self.error = StreamProtocolError(complaint(kind, size))
                return frames
            after = payload + size
            if after > end:
                wanted += size
                break
            frames.append(_frame_of((kind, bytes(view[payload:after]))))
            begin = after
        if begin == end:
            self.missing = self._begin = self._end = 0
            if len(view) > self.SMALL_BYTES or end == len(view):
                self._resize_empty(length, quiet=fresh and length < self.SMALL_BYTES)
        else:
            self._begin = begin
            self.missing = wanted - (end - begin)
            self._check_kind(view[begin])
            self._make_room(wanted)
        return frames

    def trim(self) -> None:
        """Release the memory that an idle connection doesn't need.

        Not to be called between :meth:`get_buffer` and :meth:`updated`.
        """
        if self._begin == self._end and len(self._memory) > self.SMALL_BYTES:
            self._begin = self._end = 0
            self._allocate(self.SMALL_BYTES)

    def _resize_empty(self, received: int, *, quiet: bool) -> None:
        """Grow the memory if one update filled it; shrink it after some quiet updates."""
        capacity = len(self._memory)
        if received == capacity and capacity < self.LARGE_BYTES:
            self._allocate(2 * capacity)
        elif not quiet:
            self._quiet = 0
        elif self._quiet < self.QUIET_UPDATES:
            self._quiet += 1
        else:
            self._quiet = 0
            self._allocate(self.SMALL_BYTES)

    def _make_room(self, wanted: int) -> None:
        """Move or grow the memory so that more bytes of an incomplete frame fit.

        Args:
            wanted: length of the incomplete frame, as far as it is known.
        """
        capacity = len(self._memory)
        begin, end = self._begin, self._end
        if begin and (end == capacity or begin + wanted > capacity):
            self._end = end - begin
            self._begin = 0
            self._view[: end - begin] = self._view[begin:end]
        if self._end == capacity:
            self._allocate(min(2 * capacity, wanted))
        elif end == capacity < self.LARGE_BYTES:
            self._allocate(2 * capacity)

    def _allocate(self, capacity: int) -> None:
        """Replace the memory. The bytes of an incomplete frame stand at the begin of both."""
        memory = bytearray(capacity)
        memory[: self._end] = self._view[: self._end]
        self._memory = memory
        self._view = memoryview(memory)

    def _past_opening(self, begin: int, end: int) -> int:
        """Return the position after the part of the opening that was received."""
        seen = bytes(self._view[begin : min(end, begin + len(self._opening))])
        if not self._opening.startswith(seen):
            self._opening = b""
            self.error = StreamProtocolError("the connection does not begin with the preface")
            return end
        self._opening = self._opening[len(seen) :]
        return begin + len(seen)

    def _check_kind(self, kind: int) -> None:
        if PAYLOAD_BYTES_MAX[kind] < 0:
            self.error = StreamProtocolError(complaint(kind, 0))


# ---------------------------------------------------------- inner forms

_unpack_call = struct.Struct(">BH").unpack_from


class StatusLine(NamedTuple):
    """Payload of a STATUS: the end of a call.

    Attributes:
        code: gRPC status code; 0 is success.
        text: reason of the failure; empty for success.
        kind: name of the error's class, where the server sent it.
    """

    code: int
    text: str = ""
    kind: str = ""


def decode_call(payload: bytes) -> tuple[int, bytes, bytes]:
    """Split a CALL's payload.

    Returns:
        Number of the method (any), the encoded head, the encoded request.

    Raises:
        StreamProtocolError: it is shorter than its header says.
    """
    if len(payload) < 3:
        raise StreamProtocolError(f"CALL frame of {len(payload)} bytes has no head")
    method, head_length = _unpack_call(payload)
    if not head_length:
        return method, b"", payload[3:]
    begin = 3 + head_length
    if len(payload) < begin:
        raise StreamProtocolError(f"CALL frame of {len(payload)} bytes ends within its head")
    return method, payload[3:begin], payload[begin:]


def decode_head(head: bytes) -> CallHead:
    """Return the head of a CALL.

    Raises:
        StreamProtocolError: it is no ``CallHead``.
    """
    try:
        return CallHead.FromString(head)
    except ProtobufDecodeError as error:
        raise StreamProtocolError(f"a call's head is malformed: {error}") from error


def decode_status(payload: bytes) -> StatusLine:
    """Return the content of a STATUS's payload.

    Raises:
        StreamProtocolError: it is empty, or its code is none of gRPC's.
    """
    if payload == b"\0":
        return _SUCCESS
    if not payload or payload[0] > _CODE_MAX:
        raise StreamProtocolError("STATUS frame without a status code")
    text, _, kind = decode_text(payload[1:]).partition("\0")
    return StatusLine(payload[0], text, kind)


_SUCCESS = StatusLine(0)


def decode_hello(payload: bytes) -> Hello:
    """Return the message in a HELLO's payload, with default bounds where it has none.

    Raises:
        StreamProtocolError: it is no ``Hello``, or names no version.
    """
    try:
        hello = Hello.FromString(payload)
    except ProtobufDecodeError as error:
        raise StreamProtocolError(f"HELLO is malformed: {error}") from error
    if not hello.wire_version:
        raise StreamProtocolError("HELLO names no version")
    hello.content_bytes_max = hello.content_bytes_max or CONTENT_BYTES_MAX
    hello.message_bytes_max = hello.message_bytes_max or MESSAGE_BYTES_MAX
    return hello


def decode_text(payload: bytes) -> str:
    """Return the text of a GOAWAY or STATUS; bytes that are not UTF-8 are escaped."""
    return payload.decode("utf-8", "backslashreplace")

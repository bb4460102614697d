"""What an append is answered, as a message or encoded.

Fronts that have messages take :meth:`message`. The stream transport takes :meth:`encoded`: of a
commit's answer the header is the greatest part by far, and it is encoded once per resolution.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

from gazette_sdk.broker.resolver import Resolution
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.non_null_fields import complete
from gazette_sdk.protocol.varint import encode_varint

__all__ = ["AppendAnswer", "Committed", "Told"]

_LENGTH_DELIMITED = 2
_FIELDS = pb.AppendResponse.DESCRIPTOR.fields_by_name


class AppendAnswer(Protocol):
    """What an append came to."""

    @property
    def status(self) -> pb.Status:
        """Of the answer."""

    def message(self) -> pb.AppendResponse:
        """The answer. It is the caller's."""

    def encoded(self) -> bytes:
        """The same, as it goes over a wire."""


class Told:
    """An answer that is a message already.

    Args:
        response: the message.
    """

    __slots__ = ("_response",)

    def __init__(self, response: pb.AppendResponse) -> None:
        self._response = response

    @property
    def status(self) -> pb.Status:
        """See :class:`AppendAnswer`."""
        return self._response.status

    def message(self) -> pb.AppendResponse:
        """See :class:`AppendAnswer`."""
        return self._response

    def encoded(self) -> bytes:
        """See :class:`AppendAnswer`."""
        return complete(self._response).SerializeToString()


class Committed:
    """The answer to an append that was committed.

    Args:
        resolution: of the append.
        commit: span and sum of its content.
        registers: the journal's, with it.
        total_chunks: messages of its content.
        delayed_chunks: of them, those that were held back.
    """

    __slots__ = ("_chunks", "_commit", "_registers", "_resolution")

    status: pb.Status = pb.OK

    def __init__(
        self,
        resolution: Resolution,
        commit: pb.Fragment,
        registers: pb.LabelSet,
        total_chunks: int,
        delayed_chunks: int,
    ) -> None:
        self._resolution = resolution
        self._commit = commit
        self._registers = registers
        self._chunks = total_chunks, delayed_chunks

    def message(self) -> pb.AppendResponse:
        """See :class:`AppendAnswer`."""
        total_chunks, delayed_chunks = self._chunks
        return pb.AppendResponse(
            header=self._resolution.header,
            commit=self._commit,
            registers=self._registers,
            total_chunks=total_chunks,
            delayed_chunks=delayed_chunks,
        )

    def encoded(self) -> bytes:
        """See :class:`AppendAnswer`."""
        commit = self._commit.SerializeToString()
        registers = self._registers.SerializeToString()
        total_chunks, delayed_chunks = self._chunks
        parts = [
            _header_field(self._resolution.encoded_header),
            _COMMIT_TAG,
            encode_varint(len(commit)),
            commit,
            _REGISTERS_TAG,
            encode_varint(len(registers)),
            registers,
        ]
        if total_chunks:
            parts += (_TOTAL_TAG, encode_varint(total_chunks))
        if delayed_chunks:
            parts += (_DELAYED_TAG, encode_varint(delayed_chunks))
        return b"".join(parts)


@lru_cache(maxsize=1024)  # they are those of resolutions
def _header_field(header: bytes) -> bytes:
    return _HEADER_TAG + encode_varint(len(header)) + header


def _tag(field: str, wire_type: int) -> bytes:
    return bytes((_FIELDS[field].number << 3 | wire_type,))


_HEADER_TAG = _tag("header", _LENGTH_DELIMITED)
_COMMIT_TAG = _tag("commit", _LENGTH_DELIMITED)
_REGISTERS_TAG = _tag("registers", _LENGTH_DELIMITED)
_TOTAL_TAG = _tag("total_chunks", 0)
_DELAYED_TAG = _tag("delayed_chunks", 0)

"""Journals of a cluster, as tests of failures use them: from plain code, always bounded."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from crash.appends import History, make_content
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.errors import GazetteError, OffsetNotYetAvailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.append.append import append_once
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.journal_reader import ByteReader, RetryReader
from gazette_sdk.transport.listing import apply_journals, list_all_fragments

TIMEOUT_S = 20.0

CODECS = ("NONE", "GZIP", "ZSTANDARD", "SNAPPY")
"""Those which ``file://`` stores take."""


def spec(
    name: str,
    *stores: str,
    codec: str = "NONE",
    length: int = 1 << 20,
    refresh: str = "1s",
    content_type: str = "application/x-ndjson",
) -> str:
    """The specification of a journal, as YAML; its store is ``file:///`` unless others are given.

    Args:
        length: bytes from which the next append closes a fragment.
        content_type: its label; none if empty.
    """
    label = f'[{{name: content-type, value: "{content_type}"}}]' if content_type else "[]"
    return f"""
    name: {name}
    replication: 1
    labels: {label}
    fragment:
      length: {length}
      compression_codec: {codec}
      stores: [{", ".join(f'"{store}"' for store in stores or ("file:///",))}]
      refresh_interval: {refresh}
    """


def append(transport: Transport, journal: str, content: bytes, **more: object) -> pb.AppendResponse:
    """One append, one try.

    Raises:
        GazetteError: what became of it.
    """
    request = pb.AppendRequest(journal=journal, **more)  # type: ignore[arg-type]
    return sdk_loop.run(append_once(transport, request, _chunks(content)), TIMEOUT_S)


async def _chunks(content: bytes) -> AsyncIterator[bytes]:
    for begin in range(0, len(content), 64 << 10):
        yield content[begin : begin + (64 << 10)]


class Writer:
    """Appends content with names, and remembers what became of it."""

    def __init__(self, transport: Transport, journal: str) -> None:
        self.history = History()
        self._transport = transport
        self._journal = journal
        self._chance = random.Random(journal)

    def append(self, length: int = 1000) -> pb.AppendResponse:
        content = make_content(self._chance, length)
        try:
            response = append(self._transport, self._journal, content)
        except GazetteError:
            # It was answered, with an error: so it is nowhere.
            self.history.given_up.append(content)
            raise
        self.history.acknowledged[response.commit.begin] = content
        return response

    def check(self, transport: Transport | None = None) -> None:
        """Everything acknowledged is there, and nothing else."""
        content, error = read(transport or self._transport, self._journal)
        assert isinstance(error, OffsetNotYetAvailableError), error
        self.history.check(content)


def read(transport: Transport, journal: str, offset: int = 0) -> tuple[bytes, GazetteError]:
    """Return the bytes of one read of a journal, and its end."""

    async def read() -> tuple[bytes, GazetteError]:
        content = bytearray()
        request = pb.ReadRequest(journal=journal, offset=offset)
        reader = ByteReader(transport, request)
        async with contextlib.aclosing(reader):
            try:
                while (piece := await reader.read()) is not None:
                    content += piece
            except GazetteError as error:
                return bytes(content), error
        raise AssertionError("a read without an end offset ends with a status")

    return sdk_loop.run(read(), TIMEOUT_S)


def read_on(transport: Transport, journal: str, offset: int = 0) -> tuple[bytes, GazetteError]:
    """Return the bytes of a reader that tries again, and its end."""

    async def read() -> tuple[bytes, GazetteError]:
        content = bytearray()
        reader = RetryReader(transport, pb.ReadRequest(journal=journal, offset=offset))
        async with contextlib.aclosing(reader):
            try:
                while (piece := await reader.read()) is not None:
                    content += piece
            except GazetteError as error:
                return bytes(content), error
        raise AssertionError("a read without an end offset ends with a status")

    return sdk_loop.run(read(), TIMEOUT_S)


def fragments(cluster: EmbeddedCluster, journal: str) -> list[pb.Fragment]:
    """Its fragments, as the broker lists them."""
    response = sdk_loop.run(
        list_all_fragments(cluster.transport, pb.FragmentsRequest(journal=journal)), TIMEOUT_S
    )
    return [listed.spec for listed in response.fragments]


def files(directory: Path) -> list[Path]:
    """Stored fragments below a directory, in the order of their offsets."""
    found = directory.rglob("*") if directory.exists() else ()
    return sorted(
        path
        for path in found
        if path.is_file() and not path.name.startswith(".") and ".test" not in path.parts
    )


def wait_until(is_so: Callable[[], object], what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Look until something is so. For what happens elsewhere, and tells nobody."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


def delete(cluster: EmbeddedCluster, *journals: str) -> None:
    """Delete journals; a stop of the cluster then waits for none of their stores."""
    changes = [
        pb.ApplyRequest.Change(delete=journal, expect_mod_revision=-1) for journal in journals
    ]
    run(apply_journals(cluster.transport, pb.ApplyRequest(changes=changes)))


def wait_until_stored(cluster: EmbeddedCluster, journal: str) -> None:
    """Wait until the broker knows that all closed fragments are in a store, of at least one."""

    def is_stored() -> bool:
        *closed, _ = fragments(cluster, journal) or [None]
        return bool(closed) and all(fragment.mod_time for fragment in closed)

    wait_until(is_stored, f"{journal} is stored")


@contextlib.contextmanager
def within(limit_s: float) -> Iterator[None]:
    """The block takes no longer than this."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < limit_s, f"it took {took:.1f} s, not {limit_s:g}"


def run(coroutine, timeout_s: float = TIMEOUT_S):
    """A coroutine's result, from the SDK's loop."""
    return sdk_loop.run(coroutine, timeout_s)

"""State of one value, in a JSON file.

The file ``/state.json`` holds three documents, each on a line: journals' offsets, the state, and
the checkpoint (`shard` 9.1). Gazette's consumers read and write the same file. While there are
timers, a fourth document has them: the time of each, by its key in base64. While there are rows of
windows or tables, a fifth one has them, by their keys, both in base64.
"""

from __future__ import annotations

import base64
import contextlib
import heapq
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    ShardStoreError,
    UnreadableStateError,
)
from gazette_sdk.message.checkpoint import Checkpoint, ProducerState, SourceTimes
from gazette_sdk.message.uuid import PRODUCER_BYTES
from gazette_sdk.shard.recovery.hints import (
    CreateFile,
    FileChange,
    RemoveFile,
    RenameFile,
    WriteFile,
)
from gazette_sdk.shard.stores.base import (
    Entry,
    StoreWithoutExpiry,
    TimerRow,
    recovered_files,
    refuse_other_files,
    type_arguments,
)
from gazette_sdk.shard.stores.codec import is_same, json

State = TypeVar("State")

_STATE_PATH = "/state.json"
_NEXT_PATH = "/next.json"
# Go escapes these in JSON strings; nowhere else in a document do they occur.
_ESCAPED = {
    b"<": rb"\u003c",
    b">": rb"\u003e",
    b"&": rb"\u0026",
    "\u2028".encode(): rb"\u2028",
    "\u2029".encode(): rb"\u2029",
}


class JsonView(Generic[State]):
    """Value of a ``JsonStore``; of its last local commit, for a query.

    If the value is a dict, its keys and values are read as those of a ``RocksStore``.

    Args:
        state: the application's value.
        rows: rows, by their keys.
        timers: times of timers, by their keys.

    Attributes:
        state: the application's value.
    """

    state: State

    def __init__(
        self, state: State, rows: Mapping[bytes, bytes], timers: Mapping[bytes, int]
    ) -> None:
        self.state = state
        self._rows = rows
        self._timers = timers

    def row(self, key: bytes) -> bytes | None:
        """Return a row; see :class:`~gazette_sdk.shard.stores.base.RowStore`."""
        return self._rows.get(key)

    def rows_of(self, prefix: bytes) -> Sequence[tuple[bytes, bytes]]:
        """Return rows; see :class:`~gazette_sdk.shard.stores.base.RowStore`."""
        return _rows_of(self._rows, prefix)

    def rows_from(self, lower: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Return rows; see :class:`~gazette_sdk.shard.stores.base.ShownView`."""
        return heapq.nsmallest(limit, (row for row in self._rows.items() if row[0] >= lower))

    def timers_after(self, row: TimerRow | None, limit: int) -> Sequence[TimerRow]:
        """Return the next timers; see :class:`~gazette_sdk.shard.stores.base.TimerStore`."""
        rows = (TimerRow(due_us, key) for key, due_us in self._timers.items())
        return heapq.nsmallest(limit, (each for each in rows if row is None or each > row))

    def entries(self, keys: Sequence[Any] | None, limit: int) -> Sequence[Entry]:
        """Return entries; see :class:`~gazette_sdk.shard.stores.base.ShownView`."""
        state: Any = msgspec.to_builtins(self.state, str_keys=True)
        if not isinstance(state, dict):
            return [] if keys is not None else [Entry("", None, state)]
        wanted = sorted(state) if keys is None else [key for key in map(str, keys) if key in state]
        return [Entry("", key, state[key]) for key in dict.fromkeys(wanted[:limit])]

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value of a key, or ``default``.

        Raises:
            TypeError: the state is no dict.
        """
        return self._entries().get(key, default)

    def __getitem__(self, key: Any) -> Any:
        return self._entries()[key]

    def __contains__(self, key: object) -> bool:
        return key in self._entries()

    def items(
        self, *, prefix: str | None = None, start: Any = None, stop: Any = None
    ) -> Iterator[tuple[Any, Any]]:
        """Yield keys and values in the order of keys, as they are when the iteration begins.

        Args:
            prefix: only keys that begin with it.
            start: the least key.
            stop: the first key that is left out.

        Raises:
            TypeError: the state is no dict, or has keys without prefixes.
        """
        entries = dict(self._entries())
        if prefix is not None and not all(isinstance(key, str) for key in entries):
            raise TypeError("keys of this type have no prefixes; pass start and stop")
        for key in sorted(entries):
            if (
                (prefix is None or key.startswith(prefix))
                and (start is None or key >= start)
                and (stop is None or key < stop)
            ):
                yield key, entries[key]

    def _entries(self) -> dict[Any, Any]:
        state = self.state
        if not isinstance(state, dict):
            raise TypeError(
                f"the state of this JsonStore is of the type {type(state).__qualname__}, which has"
                " no keys; use store.state, or declare JsonStore[dict[str, ...]]"
            )
        return state


class JsonStore(JsonView[State], StoreWithoutExpiry):
    """State that is one value, encoded as JSON whole with each commit.

    For small states: a commit costs time and log in proportion to the state. The first state is
    ``state_type()``. A dict is read and changed as the keys and values of a ``RocksStore``, too.

    Args:
        directory: of the shard; holds the recovered files.
        state_type: any type of msgspec; of ``JsonStore[Totals]``, ``Totals``; else ``dict``.

    Attributes:
        state: the application's value, which it changes or assigns.
    """

    overlaps_commit: ClassVar[bool] = True
    is_full: ClassVar[bool] = False

    def __init__(self, directory: Path, state_type: type[State] | None = None) -> None:
        self._directory = directory
        self._recovered = recovered_files(directory)
        self._state_type = state_type
        self._committed = b""
        # The state as it was validated last; empty from the begin of a transaction on.
        self._validated = b""
        # Each change replaces them: queries read those of the last commit.
        self._timers: dict[bytes, int] = {}
        self._rows: dict[bytes, bytes] = {}
        self._committed_timers, self._committed_rows = self._timers, self._rows

    @classmethod
    def check_types(cls, *arguments: Any) -> None:
        """Refuse a type that cannot be stored, or makes no first state.

        Args:
            arguments: of the class, as of ``JsonStore[Totals]``.

        Raises:
            ConfigurationError: the type cannot be used.
        """
        for of in arguments[:1]:
            json(of)
            try:
                inspect.signature(of).bind()
            except ValueError:
                continue  # a class in C may have no signature
            except TypeError as error:
                raise ConfigurationError(
                    f"{of!r} cannot be the type of a state, which is {of!r}() at first: {error};"
                    " give its fields default values"
                ) from error

    def __setitem__(self, key: Any, value: Any) -> None:
        self._entries()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._entries()[key]

    def discard(self, key: Any) -> None:
        """Remove a key if it is there."""
        self._entries().pop(key, None)

    def restore(self) -> Checkpoint:
        """Read the file; without one, start with an empty state.

        Returns:
            The stored checkpoint, or the empty one.

        Raises:
            ShardStoreError: the file is malformed, its state is not of the declared type, or the
                files are of another store.
        """
        self._validated = b""
        self._timers, self._rows = {}, {}
        try:
            stored = (self._directory / _STATE_PATH[1:]).read_bytes()
        except FileNotFoundError:
            refuse_other_files(self._recovered, "JsonStore")
            self.state = self._type()()
            self._committed = _document(self.state)
            return Checkpoint()
        lines = stored.splitlines(keepends=True)
        try:
            offsets, state, checkpoint, *further = lines
            restored = _decode_checkpoint(offsets, checkpoint)
            self._timers = _decode_timers(*further[:1])
            self._rows = _decode_rows(*further[1:])
            self.state = msgspec.json.decode(state, type=self._type())
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ShardStoreError(
                f"{_STATE_PATH} in {self._directory} is not the state that was declared ({error});"
                " declare the type that wrote it, or start a new recovery log"
            ) from error
        self._committed = state
        self._committed_timers, self._committed_rows = self._timers, self._rows
        return restored

    def begin(self) -> None:
        """Begin a transaction."""
        self._validated = b""

    def validate_state(self) -> None:
        """Check that a recovery will read the state as it is.

        The next ``start_commit`` writes what was checked.

        Raises:
            UnreadableStateError: it cannot be encoded, or would be decoded as another value.
        """
        try:
            document = _document(self.state)
            restored = msgspec.json.decode(document, type=self._type())
        except Exception as error:
            raise UnreadableStateError(
                f"the state cannot be encoded as JSON and decoded as the declared type ({error});"
                " keep values of that type (JSON has no NaN or infinity)"
            ) from error
        if not (restored == self.state or is_same(self.state, restored)):
            raise UnreadableStateError(
                "the state would not be recovered as it is: JSON has no NaN and no infinity, and"
                " without a declared type no sets, dates, objects, and keys but text; declare the"
                " type of the state, as JsonStore[Totals], and keep values of it"
            )
        self._validated = document

    def start_commit(self, checkpoint: Checkpoint) -> Sequence[FileChange]:
        """Replace the file.

        Args:
            checkpoint: the position after the transaction.

        Returns:
            The changes that put a new file in place of the old one.

        Raises:
            UnreadableStateError: the state would not be recovered as it is.
            ShardStoreError: the file cannot be written.
        """
        if not self._validated:
            self.validate_state()
        state, self._validated = self._validated, b""
        offsets = _document(dict(sorted(checkpoint.offsets.items())))
        documents = [offsets, state, _encode_checkpoint(checkpoint)]
        if self._timers or self._rows:
            documents.append(_encode_timers(self._timers))
        if self._rows:
            documents.append(_encode_rows(self._rows))
        try:
            next_file = self._directory / _NEXT_PATH[1:]
            next_file.write_bytes(b"".join(documents))
            next_file.replace(self._directory / _STATE_PATH[1:])
        except OSError as error:
            raise ShardStoreError(f"the state file cannot be written: {error}") from error
        self._committed = state
        self._committed_timers, self._committed_rows = self._timers, self._rows
        changes: list[FileChange] = [CreateFile(_NEXT_PATH)]
        offset = 0
        for document in documents:
            changes.append(WriteFile(_NEXT_PATH, offset, document))
            offset += len(document)
        changes.append(RenameFile(_NEXT_PATH, _STATE_PATH))
        return changes

    def finish_commit(self) -> None:
        """End the commit: nothing is to be done."""

    def open_timers(self) -> None:
        """Prepare to keep timers: nothing is to be done."""

    def put_timers(self, changes: Mapping[bytes, int | None]) -> None:
        """Put timers, just before ``start_commit``; None removes one."""
        changed = {**self._timers, **changes}
        self._timers = {key: due_us for key, due_us in changed.items() if due_us is not None}

    def open_rows(self) -> None:
        """Prepare to keep rows: nothing is to be done."""

    def row(self, key: bytes) -> bytes | None:
        """Return a row; see :class:`~gazette_sdk.shard.stores.base.RowStore`."""
        return self._rows.get(key)

    def rows_of(self, prefix: bytes) -> Sequence[tuple[bytes, bytes]]:
        """Return rows; see :class:`~gazette_sdk.shard.stores.base.RowStore`."""
        return _rows_of(self._rows, prefix)

    def put_rows(self, changes: Mapping[bytes, bytes | None]) -> None:
        """Put rows, just before ``start_commit``; None removes one."""
        changed = {**self._rows, **changes}
        self._rows = {key: row for key, row in changed.items() if row is not None}

    def rerecord(self, path: str) -> Sequence[FileChange]:
        """Return changes that record the file anew; nothing for another path."""
        file = self._directory / _STATE_PATH[1:]
        if path != _STATE_PATH or not file.exists():
            return ()
        return RemoveFile(path), CreateFile(path, file.read_bytes())

    @contextlib.contextmanager
    def committed(self) -> Iterator[JsonView[State]]:
        """Open a view of the last local commit, for a query on another thread.

        Yields:
            The view, with a copy of the state.

        Raises:
            ClosedError: the store is not restored yet.
        """
        if not self._committed:
            raise ClosedError("the store is not restored yet; call restore() first")
        state = msgspec.json.decode(self._committed, type=self._type())
        yield JsonView(state, self._committed_rows, self._committed_timers)

    def destroy(self) -> None:
        """Close the store: it holds no open file."""

    def _type(self) -> Any:
        if self._state_type is None:
            self._state_type = (*type_arguments(self), dict)[0]
        return self._state_type


def _document(value: object) -> bytes:
    """Return a value as Go's encoder writes it: one line, map keys sorted."""
    encoded = msgspec.json.encode(value, order="deterministic")
    return _escaped(encoded) + b"\n"


def _escaped(encoded: bytes) -> bytes:
    for plain, escaped in _ESCAPED.items():
        encoded = encoded.replace(plain, escaped)
    return encoded


def _encode_timers(timers: Mapping[bytes, int]) -> bytes:
    return _document({base64.b64encode(key).decode(): due_us for key, due_us in timers.items()})


def _decode_timers(document: bytes = b"{}") -> dict[bytes, int]:
    decoded = msgspec.json.decode(document, type=dict[str, int])
    return {base64.b64decode(key, validate=True): due_us for key, due_us in decoded.items()}


def _encode_rows(rows: Mapping[bytes, bytes]) -> bytes:
    encode = base64.b64encode
    return _document({encode(key).decode(): encode(state).decode() for key, state in rows.items()})


def _decode_rows(document: bytes = b"{}") -> dict[bytes, bytes]:
    decoded = msgspec.json.decode(document, type=dict[str, str])
    decode = base64.b64decode
    return {decode(key, validate=True): decode(state) for key, state in decoded.items()}


def _rows_of(rows: Mapping[bytes, bytes], prefix: bytes) -> Sequence[tuple[bytes, bytes]]:
    return sorted(row for row in rows.items() if row[0].startswith(prefix))


def _encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """Return the third document: names of the message's fields, zeros left out."""
    sources: dict[str, dict[str, Any]] = {}
    journals = {*checkpoint.offsets, *checkpoint.create_revisions, *checkpoint.times}
    journals.update(state.journal for state in checkpoint.producers)
    for journal in sorted(journals):
        offset = checkpoint.offsets.get(journal, 0)
        revision = checkpoint.create_revisions.get(journal, 0)
        sources[journal] = {
            **({"read_through": offset} if offset else {}),
            "producers": None,
            **({"create_revision": revision} if revision else {}),
            **(checkpoint.times[journal]._asdict() if journal in checkpoint.times else {}),
        }
    for journal, producer, last_ack, begin in checkpoint.producers:
        state = {"last_ack": last_ack, "begin": begin}
        entry = {
            "id": base64.b64encode(producer).decode(),
            "state": {name: number for name, number in state.items() if number},
        }
        if sources[journal]["producers"] is None:
            sources[journal]["producers"] = []
        sources[journal]["producers"].append(entry)
    message: dict[str, Any] = {"sources": sources}
    if checkpoint.ack_intents:
        message["ack_intents"] = {
            journal: base64.b64encode(intent).decode()
            for journal, intent in sorted(checkpoint.ack_intents.items())
        }
    if checkpoint.reset:
        message["reset"] = checkpoint.reset
    return _escaped(msgspec.json.encode(message)) + b"\n"


def _decode_checkpoint(offsets: bytes, checkpoint: bytes) -> Checkpoint:
    """Return the checkpoint of the first and third documents; the first one's offsets hold."""
    message = msgspec.json.decode(checkpoint)
    restored = Checkpoint(reset=message.get("reset") or "")
    for journal, source in (message.get("sources") or {}).items():
        restored.offsets[journal] = source.get("read_through", 0)
        if revision := source.get("create_revision", 0):
            restored.create_revisions[journal] = revision
        times = SourceTimes(source.get("watermark_us", 0), source.get("published_us", 0))
        if any(times):
            restored.times[journal] = times
        for entry in source.get("producers") or ():
            state = entry.get("state") or {}
            producer = base64.b64decode(entry["id"], validate=True)
            restored.producers.append(
                ProducerState(
                    journal,
                    producer[:PRODUCER_BYTES].ljust(PRODUCER_BYTES, b"\0"),
                    state.get("last_ack", 0),
                    state.get("begin", 0),
                )
            )
    for journal, intent in (message.get("ack_intents") or {}).items():
        restored.ack_intents[journal] = base64.b64decode(intent, validate=True)
    restored.offsets.update(msgspec.json.decode(offsets) or {})
    return restored

"""The contract of stores, as a check that any store can run on itself.

::

    def test_my_store_keeps_the_contract(tmp_path):
        store_contract.check(tmp_path, MyStore, write=put_number, read=lambda store: store.all())
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from gazette_sdk.message.checkpoint import Checkpoint, ProducerState, SourceTimes
from gazette_sdk.shard.recovery.hints import (
    CreateFile,
    FileChange,
    RemoveFile,
    RenameFile,
    SetProperty,
    WriteFile,
)
from gazette_sdk.shard.stores.base import Store

S = TypeVar("S", bound=Store)


class RecordedFiles:
    """Model of a recovery log: the files that a store's changes describe.

    Attributes:
        files: content by path.
        properties: content by path, of small files that stand in hints.
        append_written: paths that were written to after their creation, least recent first.
        bytes_recorded: content of all changes so far.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}
        self.properties: dict[str, str] = {}
        self.append_written: dict[str, None] = {}
        self.bytes_recorded = 0

    def apply(self, changes: Sequence[FileChange]) -> None:
        """Apply the changes of one commit, in order.

        Raises:
            AssertionError: a change does not fit what the changes before it made.
        """
        for change in changes:
            match change:
                case CreateFile(path, content):
                    self._remove(path)
                    self.files[path] = bytearray(content)
                    self.bytes_recorded += len(content)
                case WriteFile(path, offset, content):
                    assert path in self.files, f"{path} is written before it is created"
                    file = self.files[path]
                    file.extend(bytes(max(0, offset - len(file))))
                    file[offset : offset + len(content)] = content
                    self.append_written.setdefault(path)
                    self.bytes_recorded += len(content)
                case RenameFile(source, target):
                    assert source in self.files, f"{source} is renamed before it is created"
                    self._remove(target)
                    self.files[target] = self.files.pop(source)
                    self.append_written.pop(source, None)
                case RemoveFile(path):
                    assert path in self.files, f"{path} is removed before it is created"
                    self._remove(path)
                case SetProperty(path, content):
                    self.properties[path] = content

    def write_to(self, directory: Path) -> Path:
        """Write all files to a new directory, as a player restores them.

        Returns:
            ``directory``.
        """
        directory.mkdir(parents=True)
        contents = {path: bytes(content) for path, content in self.files.items()}
        contents |= {path: content.encode() for path, content in self.properties.items()}
        for path, content in contents.items():
            file = directory / path.removeprefix("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        return directory

    def _remove(self, path: str) -> None:
        self.files.pop(path, None)
        self.append_written.pop(path, None)


def checkpoint_of(number: int) -> Checkpoint:
    """Return a checkpoint with every kind of content, different for each number above 0."""
    journal = f"source/{number % 3}"
    return Checkpoint(
        offsets={journal: number * 1000, "source/other": number},
        producers=[ProducerState(journal, bytes([1, 2, 3, 4, 5, 7]), number, -1)],
        ack_intents={"output/one": b"<%d>\n" % number},
        create_revisions={journal: 17},
        times={journal: SourceTimes(number, number + 1)},
        reset=f"{number:x}",
    )


def check(
    directory: Path,
    new_store: Callable[[Path], S],
    *,
    write: Callable[[S, int], None],
    read: Callable[[S], object],
    commits: int = 12,
) -> None:
    """Check a store: commits, roll-backs, and recovery at every commit.

    Args:
        directory: empty; the check writes below it.
        new_store: makes the store in a directory that exists. A store that records no files ignores
            it, and finds the state of the one before.
        write: makes the changes of a transaction of that number. Each number changes the state.
        read: the whole state, uncommitted changes of the store included, as a value that can be
            compared.
        commits: number of transactions.

    Raises:
        AssertionError: names the rule that the store breaks.
    """
    recorded = RecordedFiles()
    empty = directory / "first"
    empty.mkdir(parents=True)
    store = new_store(empty)
    assert store.restore() == Checkpoint(), "a new store begins with the empty checkpoint"
    state = read(store)
    checkpoint = Checkpoint()
    for number in range(1, commits + 1):
        _roll_back(store, number, state, checkpoint, read=read, write=write)
        store.begin()
        write(store, number)
        state = read(store)
        checkpoint = checkpoint_of(number)
        recorded.apply(store.start_commit(checkpoint))
        store.finish_commit()
        assert read(store) == state, "a commit does not change what is read"
        if number % 4 == 0:
            _rerecord(store, recorded)
        if number % 3 == 0 or recorded.files:
            successor = new_store(recorded.write_to(directory / f"cut-{number}"))
            _recover(successor, state, checkpoint, read=read)
            if number % 3 == 0:
                store.destroy()
                store = successor
            else:
                successor.destroy()
    store.destroy()
    store.destroy()


def _roll_back(
    store: S,
    number: int,
    state: object,
    checkpoint: Checkpoint,
    *,
    read: Callable[[S], object],
    write: Callable[[S, int], None],
) -> None:
    store.begin()
    write(store, -number)
    assert read(store) != state, "a transaction reads its own changes"
    _recover(store, state, checkpoint, read=read)
    _recover(store, state, checkpoint, read=read)


def _recover(
    store: S, state: object, checkpoint: Checkpoint, *, read: Callable[[S], object]
) -> None:
    restored = store.restore()
    assert restored.to_bytes() == checkpoint.to_bytes(), "restore returns the last checkpoint"
    assert read(store) == state, "restore leaves the last commit's state, and nothing else"


def _rerecord(store: Store, recorded: RecordedFiles) -> None:
    before = {path: bytes(content) for path, content in recorded.files.items()}
    for path in list(before):
        recorded.apply(store.rerecord(path))
    after = {path: bytes(content) for path, content in recorded.files.items()}
    assert after == before, "to record a file anew does not change it"
    assert not store.rerecord("/no-such-file"), "an unknown path has nothing to record"

"""The directory in which a broker keeps its spools, so that they survive the process.

::

    ROOT/lock                                      locked while a broker uses the directory
    ROOT/lease                                     the lease of the last process (`LeaseNote`)
    ROOT/revision                                  last revision of Etcd (`etcd_history`)
    ROOT/unaccepted                                this Etcd lost what was seen (`etcd_history`)
    ROOT/accepted                                  an operator accepts it nevertheless
    ROOT/journals/NAME=DIGEST/head                 the greatest committed offset, and the registers
    ROOT/journals/NAME=DIGEST/head.unverified      a head that is not used yet
    ROOT/journals/NAME=DIGEST/head.forgotten       a head that was known, until another one is
    ROOT/journals/NAME=DIGEST/forgotten            serial of the last contested spool
    ROOT/journals/NAME=DIGEST/withheld             its files are of another history of Etcd
    ROOT/journals/NAME=DIGEST/BEGIN-SERIAL.log     commits of a spool (`CommitLog`)
    ROOT/journals/NAME=DIGEST/BEGIN-SERIAL.content its bytes (`ContentFile`)
    ROOT/journals/NAME=DIGEST/*.damaged            damaged files; never removed
    ROOT/journals/NAME=DIGEST/*.superseded         bytes that others wrote anew; likewise

A commit is acknowledged only when its record is written after its content. Killing the process then
loses nothing: both are in the page cache. With durability ``persisted`` both are also forced to
disk first. After a start :meth:`SpoolDirectory.recover` returns every committed byte. The package
`recovery` has the states of recovered heads and spools.

The head is kept also when the content is in a store and its files are removed. So a broker that
starts again continues the journal there, without an operator's `reset-head`.

The default directory is private, and of one broker of one cluster::

    TMP/gazette-spools-UID/CLUSTER-PREFIX/ZONE,SUFFIX

The temporary directory is shared by all users of the machine. So everything below it must belong to
this user, and be closed to all others: whoever prepares the directory could otherwise read content,
or have the broker serve content of theirs as recovered.

The lease note (:class:`LeaseNote`) says which lease the last process over the directory held. A
broker that was killed leaves its member key in Etcd until its lease ends. The next broker over the
same spool directory holds the directory's lock, so the process of the note has ended: its lease can
be revoked, and the next broker is announced at once.

The note is one line in ``ROOT/lease``: id of the Etcd cluster, lease, inode of ``ROOT/lock``, and
the member key. A copy of the directory has another lock, so its note does not count: the process
over the original may be alive.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import fcntl
import hashlib
import logging
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, TypeVar
from urllib.parse import quote

from gazette_sdk.broker.recovery.spools import (
    WithheldJournal,
    recover_journal,
    relabel_spool,
    serial_of,
)
from gazette_sdk.broker.recovery.states import HeadEffect, HeadInput, HeadState, head_step
from gazette_sdk.broker.spool.files import (
    ChunkThread,
    CommitLog,
    CompletedSpool,
    ContentFile,
    Head,
    Origin,
    SpoolDiskError,
    encode_head,
)
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.keyspace import HistoryMark
from gazette_sdk.errors import ConfigurationError, EtcdError, LeaseLostError

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_default_root(cluster_id: int, prefix: str, zone: str, suffix: str) -> Path:
    """Return the default directory of a broker's spools, and make it where it is missing. Blocks.

    Args:
        cluster_id: of the Etcd cluster.
        prefix: prefix of the cluster's keys in Etcd.
        zone: of the broker.
        suffix: of the broker.

    Raises:
        ConfigurationError: it is not private, or cannot be made.
    """
    path = Path(tempfile.gettempdir()).resolve()
    digest = hashlib.sha256(prefix.encode()).hexdigest()[:16]
    names = (
        f"gazette-spools-{os.geteuid()}",
        f"{cluster_id:016x}-{digest}",
        f"{quote(zone, safe='')},{quote(suffix, safe='')}",
    )
    try:
        _check_parent(path)
        for name in names:
            path /= name
            _make_private(path)
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from error
    return path


def _check_parent(path: Path) -> None:
    """Check that no other user can rename what this user makes in a directory."""
    found = path.stat()
    if found.st_uid not in {0, os.geteuid()}:
        raise _unusable(path, "another user owns it")
    if found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
        raise _unusable(path, "other users may rename what is in it")


def _make_private(path: Path) -> None:
    """Make a directory, or check the one that exists. Symbolic links are not followed."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise _unusable(path, "it is no directory") from None
        if found.st_uid != os.geteuid():
            raise _unusable(path, "another user owns it") from None
        if found.st_mode & _OTHERS:
            raise _unusable(path, "other users may use it (chmod 700 closes it)") from None


def _unusable(path: Path, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{path} cannot be used for spools: {why}; set --broker.spool-dir to a directory of the "
        "broker's own"
    )


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NotedLease:
    """Lease of a member of a cluster.

    Attributes:
        cluster_id: of the Etcd cluster.
        key: the member's key.
        lease: its lease.
    """

    cluster_id: int
    key: bytes
    lease: int


class LeaseNote:
    """File of a spool directory that names the lease of the last process over it.

    Only the process that holds the directory's lock may use it.

    Args:
        root: the spool directory.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / "lease"
        self._lock_path = root / "lock"

    def read(self) -> NotedLease | None:
        """Return the note; ``None`` if there is none, or it is of another directory. Blocks."""
        try:
            cluster_id, lease, lock, key = self._path.read_bytes().rstrip(b"\n").split(b" ", 3)
            noted = NotedLease(int(cluster_id, 16), key, int(lease, 16))
            return noted if int(lock) == self._lock_path.stat().st_ino else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _log.warning("%s cannot be used, and is written anew: %s", self._path, error)
            return None

    def write(self, noted: NotedLease) -> None:
        """Replace the note. Blocks.

        Without it the next start waits for the end of the lease, so an error is only logged.
        """
        fresh = self._path.with_suffix(".new")
        try:
            lock = self._lock_path.stat().st_ino
            line = f"{noted.cluster_id:x} {noted.lease:x} {lock} ".encode() + noted.key + b"\n"
            fresh.write_bytes(line)
            fresh.rename(self._path)
        except OSError as error:
            _log.warning("the lease cannot be noted in %s: %s", self._path, error)


async def revoke_noted(etcd: Etcd, noted: NotedLease | None) -> bool:
    """Revoke the lease of a note, if the member's key is still attached to it.

    Args:
        etcd: the client.
        noted: the note.

    Returns:
        True if it was revoked. An error is logged: then the lease ends by itself.
    """
    if noted is None or noted.cluster_id != etcd.cluster_id:
        return False
    key = noted.key.decode("utf-8", "backslashreplace")
    try:
        found = (await etcd.range(noted.key)).entries
        if not found or found[0].lease != noted.lease:
            return False
        await etcd.revoke(noted.lease)
    except LeaseLostError:
        return False  # it ended meanwhile
    except EtcdError as error:
        _log.warning(
            "the lease of the earlier process was not revoked, its key %s stays until the lease "
            "ends: %s",
            key,
            error,
        )
        return False
    _log.info("revoked the lease of an earlier process: %s is free", key)
    return True


_UNACCEPTED = "unaccepted"
_NAME_LENGTH = 120  # of a journal in the name of its directory; the digest makes it unique
_BACKGROUND_THREADS = 2  # compression shares two cores with everything else
_RECOVERY_THREADS = 8

T = TypeVar("T")


class Durability(enum.Enum):
    """Events that an acknowledged append survives on every replica."""

    REPLICATED = "replicated"
    """The end of the process: the append is in the page cache."""
    PERSISTED = "persisted"
    """The end of the machine: the append was forced to disk."""


class SpoolDirectory:
    """Directory of a broker's spools. One process at a time may use it.

    Args:
        root: the directory; made if it does not exist.
        durability: events that a commit has to survive.

    Raises:
        ConfigurationError: it cannot be used, or another process uses it.
    """

    def __init__(self, root: Path, *, durability: Durability = Durability.REPLICATED) -> None:
        self.root = root
        self.durability = durability
        self._heads: dict[str, Head] = {}
        self._unverified: dict[str, Head] = {}
        self._former: dict[str, Head] = {}  # forgotten, of journals without another head since
        self._heads_lock = threading.Lock()  # the loop changes heads, background threads write them
        self._unwritten: set[str] = set()  # journals whose head is only in logs of spools
        self._serial = 0
        self._cluster_id = 0  # of the recovery
        self._forgotten: dict[str, int] = {}  # content of each journal's file of this name
        self._withheld: dict[str, WithheldJournal] = {}
        try:
            (root / "journals").mkdir(parents=True, exist_ok=True)
            self._lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigurationError(
                f"cannot use {root} for spools: {error}; choose a writable directory"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigurationError(
                f"{root} is in use by another broker process: stop it, or choose another "
                "spool directory"
            ) from error
        self.writer = ChunkThread("spool writer")
        self.hashers = ChunkThread("spool hasher"), ChunkThread("append hasher")
        self._background: ThreadPoolExecutor | None = ThreadPoolExecutor(
            _BACKGROUND_THREADS, thread_name_prefix="spools"
        )

    def close(self) -> None:
        """Finish background work and unlock the directory. Blocks."""
        if self._background is not None:
            background, self._background = self._background, None
            self.writer.close()
            for hasher in self.hashers:
                hasher.close()
            background.shutdown(wait=True)
            os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------- journals

    def journal(self, name: str, *, create_revision: int, cluster_id: int) -> JournalSpools:
        """Return the storage of a journal's spools. Nothing is written before there is content.

        Args:
            name: the journal's, without metadata.
            create_revision: Etcd revision at which it was created.
            cluster_id: of the Etcd cluster.
        """
        return JournalSpools(self, name, create_revision, cluster_id)

    def head(self, name: str, *, create_revision: int, cluster_id: int) -> Head | None:
        """Return the greatest offset known to be committed of a journal.

        ``None`` if none is known, or only one of another journal of the same name.
        """
        head = self._heads.get(name)
        if head is None or (head.create_revision, head.cluster_id) != (create_revision, cluster_id):
            return None
        return head

    def heads(self) -> list[Head]:
        """Return the known heads of all journals."""
        return list(self._heads.values())

    def unverified_heads(self) -> list[Head]:
        """Return the heads that are not used before it is known that no one has more."""
        return list(self._unverified.values())

    def unverified_head(self, name: str) -> Head | None:
        """Return the unverified head of a journal; ``None`` if it has none."""
        return self._unverified.get(name)

    def head_end(self, name: str, create_revision: int) -> int:
        """Return the end of a journal's head, verified or not; 0 if it has none."""
        head = self._heads.get(name) or self._unverified.get(name)
        return head.end if head is not None and head.create_revision == create_revision else 0

    def has_former_head(self, name: str, create_revision: int) -> bool:
        """Return True if a head of a journal was known here, and is forgotten or unverified.

        Then the journal has content, and it is not known here where that ends.
        """
        former = self._unverified.get(name) or self._former.get(name)
        return former is not None and former.create_revision == create_revision

    def note_head(self, head: Head, reason: HeadInput = HeadInput.COMMITTED) -> None:
        """Note a head, if it is greater than the known one, and write it.

        With durability ``persisted`` the loop does not wait for the disk to close a fragment:
        :meth:`write_head` is called before the log, which has this head too, is removed.

        Args:
            head: the head.
            reason: what states it: by default, that a fragment was closed.

        Raises:
            OSError: it could not be written; it is known to this process only.
        """
        with self._heads_lock:
            known = self._heads.get(head.journal)
            if known is not None and known.cluster_id == head.cluster_id:
                if known.create_revision > head.create_revision:
                    return  # from a replica of the deleted journal, which still shuts down
                if known.create_revision == head.create_revision and (
                    known.end > head.end or known == head
                ):
                    return
            if head_step(self._state_of(head.journal), reason)[0] is not HeadEffect.WRITE:
                return
            self._heads[head.journal] = head
            self._unwritten.add(head.journal)
            self._unverified.pop(head.journal, None)
            self._former.pop(head.journal, None)
        if self.durability is Durability.REPLICATED or reason is not HeadInput.COMMITTED:
            self.write_head(head.journal)

    def verify_head(self, head: Head) -> None:
        """Use an unverified head: no one has bytes after it.

        Raises:
            OSError: it could not be written; it is known to this process only.
        """
        self.note_head(head, HeadInput.VERIFIED)

    def restore_head(self, spool: CompletedSpool) -> Head | None:
        """Write the end of a recovered spool as its journal's head, unless a head is known.

        Args:
            spool: the journal's last one, all of which is in use.

        Returns:
            the head that is written; ``None`` if one was known.

        Raises:
            OSError: it could not be written; it is known to this process only.
        """
        fragment = spool.fragment
        known = self._heads.get(fragment.journal) or self._unverified.get(fragment.journal)
        if known is not None and known.create_revision >= spool.create_revision:
            return None
        registers = spool.registers.SerializeToString(deterministic=True)
        head = Head(
            fragment.journal, fragment.end, registers, spool.create_revision, self._cluster_id
        )
        self.note_head(head, HeadInput.SPOOLS_IN_USE)
        return head

    def forget_head(self, name: str, reason: HeadInput = HeadInput.CONTINUED_BY_OTHERS) -> None:
        """Forget a journal's head, if it is known: its spools are contested from now on.

        Without Etcd's history the head becomes unverified.

        Args:
            name: the journal's.
            reason: what made the head outdated, or doubtful.

        Raises:
            OSError: it could not be recorded.
        """
        with self._heads_lock:
            effect, _ = head_step(self._state_of(name), reason)
            if effect is HeadEffect.NOTHING:
                return
            if effect is HeadEffect.CONTEST and not self._has_uncontested(name):
                return
            unverified = self._unverified.pop(name, None)
            head = self._heads.pop(name, None)
            self._unwritten.discard(name)
            directory = self._directory_of(name)
            is_synced = self.durability is Durability.PERSISTED
            if effect is HeadEffect.DOUBT:
                assert head is not None, "a head that is doubted was known"
                self._unverified[name] = head
                directory.mkdir(exist_ok=True)
                replace_file(self._unverified_path(name), encode_head(head), synced=is_synced)
            if directory.exists():  # recovery must not derive the head from spools there
                former = head or unverified
                if effect is HeadEffect.FORGET and former is not None:
                    self._former[name] = former
                    replace_file(self._former_path(name), encode_head(former), synced=is_synced)
                serial = f"{self._serial:08x}".encode()
                replace_file(directory / "forgotten", serial, synced=is_synced)
                if is_synced:
                    self.sync_names(name)
                self._forgotten[name] = self._serial
                (directory / "head").unlink(missing_ok=True)
                if effect is HeadEffect.FORGET:
                    self._unverified_path(name).unlink(missing_ok=True)

    def _has_uncontested(self, name: str) -> bool:
        """Return True if a spool of a journal was made since its head was last forgotten.

        As one that is kept though not all replicas have acknowledged it: it may be all there is.
        """
        forgotten = self._forgotten.get(name, 0)
        return any(serial_of(path) > forgotten for path in self._directory_of(name).glob("*-*.*"))

    def _state_of(self, name: str) -> HeadState:
        if name in self._heads:
            return HeadState.KNOWN
        return HeadState.UNVERIFIED if name in self._unverified else HeadState.ABSENT

    def _unverified_path(self, name: str) -> Path:
        return self._directory_of(name) / "head.unverified"

    def _former_path(self, name: str) -> Path:
        return self._directory_of(name) / "head.forgotten"

    def is_contested(self, spool: CompletedSpool) -> bool:
        """Return True if the head of a spool's journal was forgotten after it was written.

        This survives restarts for as long as the spool's files do.
        """
        return self.is_contested_file(spool.fragment.journal, spool.file)

    def is_contested_file(self, journal: str, file: ContentFile) -> bool:
        """Return True if a journal's head was forgotten after a spool's file was made."""
        return serial_of(file.path) <= self._forgotten.get(journal, 0)

    def sweep(self, exists: Callable[[str, int], bool]) -> None:
        """Forget the heads of deleted journals. Blocks.

        Args:
            exists: returns True if a journal of this name and create revision exists.
        """
        for head in [*self._heads.values(), *self._unverified.values()]:
            if not exists(head.journal, head.create_revision):
                self.forget_head(head.journal, HeadInput.JOURNAL_DELETED)

    # ------------------------------------------------------------- recovery

    def recover(self, cluster_id: int) -> list[CompletedSpool]:
        """Find the spools of an earlier process, and verify them. Blocks.

        Uncommitted bytes are cut off. Damaged content is renamed, and replaced by the longest
        beginning that matches a commit. Spools of other Etcd clusters are ignored.

        Args:
            cluster_id: of the Etcd cluster which this broker belongs to.

        Returns:
            every spool with committed content, by journal and offset. :meth:`head` and
            :meth:`journal` have the heads from now on.
        """
        self._cluster_id = cluster_id
        is_synced = self.durability is Durability.PERSISTED
        directories = [entry for entry in (self.root / "journals").iterdir() if entry.is_dir()]
        recovered: list[CompletedSpool] = []
        with ThreadPoolExecutor(_RECOVERY_THREADS, thread_name_prefix="recover") as pool:
            for found in pool.map(
                lambda directory: recover_journal(
                    directory, cluster_id, self._opened, synced=is_synced
                ),
                directories,
            ):
                self._serial = max(self._serial, found.serial)
                if found.withheld is not None:
                    self._withheld[found.withheld.journal] = found.withheld
                    continue
                recovered += found.spools
                if found.spools:
                    self._forgotten[found.spools[0].fragment.journal] = found.forgotten
                if found.head is not None:
                    self._heads[found.head.journal] = found.head
                    self._unwritten.add(found.head.journal)
                elif found.unverified is not None:
                    self._unverified[found.unverified.journal] = found.unverified
                elif found.former is not None:
                    self._former[found.former.journal] = found.former
        recovered.sort(key=lambda spool: (spool.fragment.journal, spool.fragment.begin))
        if recovered:
            _log.info("recovered %d spools of an earlier process in %s", len(recovered), self.root)
        return recovered

    # ------------------------------------------------------------- withheld

    def withhold_all(self, mark: HistoryMark) -> None:
        """Withhold the files of all journals from recovery, until :meth:`release`. Blocks.

        Args:
            mark: of the Etcd of now, which does not have their history.
        """
        for directory in (self.root / "journals").iterdir():
            if directory.is_dir():
                self._write_mark(directory / "withheld", mark)
        self._write_mark(self.root / _UNACCEPTED, mark)

    def unaccepted_revision(self) -> int:
        """Return the revision up to which routes may be older than ones that Etcd lost. Blocks.

        It is 0 if Etcd lost nothing, or an operator has accepted that.
        """
        try:
            cluster_id, revision = (self.root / _UNACCEPTED).read_text("ascii").split(" ")
        except FileNotFoundError:
            return 0
        return int(revision) if int(cluster_id) == self._cluster_id else 0

    def withhold(self, spools: Sequence[CompletedSpool], mark: HistoryMark) -> None:
        """Withhold the recovered spools, and the head, of one journal. Blocks."""
        name = spools[0].fragment.journal
        with self._heads_lock:
            self._unwritten.discard(name)
            head = self._heads.pop(name, None) or self._unverified.pop(name, None)
        self._write_mark(self._directory_of(name) / "withheld", mark)
        self._withheld[name] = WithheldJournal(
            name, spools[-1].create_revision, tuple(spools), head, mark
        )

    def withheld(self) -> Sequence[WithheldJournal]:
        """Return what is withheld of all journals."""
        return list(self._withheld.values())

    def is_withheld(self, name: str) -> bool:
        """Return True if the files of a journal are withheld."""
        return name in self._withheld

    def release(self, name: str, create_revision: int) -> Sequence[CompletedSpool]:
        """Release what is withheld of a journal: its head is unverified, its spools contested.

        They belong to the journal that now has this name, from then on. Blocks. A call that was
        interrupted may be repeated, also after a restart. The journal counts as withheld until the
        loop calls :meth:`end_withholding`, with which it takes them: a replica that began between
        would begin without them.

        Args:
            name: the journal's.
            create_revision: Etcd revision at which it was created.

        Raises:
            OSError: the files could not be written. They stay withheld.
        """
        withheld, directory = self._withheld[name], self._directory_of(name)
        is_synced = self.durability is Durability.PERSISTED
        spools = [
            relabel_spool(spool, create_revision, self._cluster_id, synced=is_synced)
            for spool in withheld.spools
        ]
        with self._heads_lock:
            if withheld.head is not None:
                head = replace(
                    withheld.head, create_revision=create_revision, cluster_id=self._cluster_id
                )
                replace_file(self._unverified_path(name), encode_head(head), synced=is_synced)
                self._unverified[name] = head
            serial = f"{self._serial:08x}".encode()
            replace_file(directory / "forgotten", serial, synced=is_synced)
            self._forgotten[name] = self._serial
            (directory / "head").unlink(missing_ok=True)
            (directory / "withheld").unlink(missing_ok=True)
            if is_synced:
                self.sync_names(name)
        return spools

    def end_withholding(self, name: str) -> None:
        """Withhold nothing of a journal any more: :meth:`release` has ended."""
        del self._withheld[name]

    def take_acceptance(self) -> bool:
        """Return True if an operator has accepted the Etcd of now; see :func:`accept_etcd`."""
        return (self.root / "accepted").exists()

    def end_acceptance(self) -> None:
        """Remove the note of an operator's acceptance, and that of what it accepts. Blocks."""
        (self.root / _UNACCEPTED).unlink(missing_ok=True)
        (self.root / "accepted").unlink(missing_ok=True)

    def _write_mark(self, path: Path, mark: HistoryMark) -> None:
        content = f"{mark.cluster_id} {mark.revision}".encode()
        replace_file(path, content, synced=self.durability is Durability.PERSISTED)

    async def in_background(self, work: Callable[[], T]) -> T:
        """Run blocking work, which :meth:`close` waits for even if the caller is cancelled."""
        return await asyncio.get_running_loop().run_in_executor(self._background, work)

    # ------------------------------------------------------------- internal

    def create(self, origin: Origin) -> tuple[ContentFile, CommitLog]:
        """Make the files of a new spool. Used by :class:`JournalSpools`.

        Raises:
            OSError: they cannot be made.
        """
        directory = self._directory_of(origin.journal)
        directory.mkdir(exist_ok=True)
        self._serial += 1
        stem = directory / f"{origin.begin:016x}-{self._serial:08x}"
        # The log is made first and removed first: content without a log is a partial removal.
        log = CommitLog(
            stem.with_suffix(".log"), origin, synced=self.durability is Durability.PERSISTED
        )
        try:
            file = ContentFile(
                stem.with_suffix(".content"),
                origin.codec,
                self.submit,
                lambda: self._remove(stem, origin.journal),
                create=True,
            )
        except OSError:
            log.close()
            stem.with_suffix(".log").unlink()
            raise
        return file, log

    def submit(self, work: Callable[[], None], *, is_needed: bool) -> None:
        """Run ``work`` in the background; after :meth:`close` in this thread, or not at all."""
        background = self._background
        if background is not None:
            background.submit(work)
        elif is_needed:
            work()

    def sync_names(self, journal: str) -> None:
        """Write the names of a journal's files through to disk. Blocks."""
        for path in (self._directory_of(journal), self.root / "journals"):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def write_head(self, journal: str) -> None:
        """Write a journal's head, if it is known, to its file. Blocks.

        With durability ``persisted`` it is on disk before it replaces the file, which holds the
        last head, and the lock is free meanwhile: the loop takes it.

        Raises:
            OSError: it is not written.
        """
        directory, is_synced = self._directory_of(journal), self.durability is Durability.PERSISTED
        while (head := self._unwritten_head(journal)) is not None:
            directory.mkdir(exist_ok=True)
            fd, fresh = tempfile.mkstemp(suffix=".new", dir=directory)
            with os.fdopen(fd, "wb") as file:
                file.write(encode_head(head))
                if is_synced:
                    file.flush()
                    os.fsync(fd)
            with self._heads_lock:
                if self._heads.get(journal) is not head:  # forgotten, or another one
                    Path(fresh).unlink()
                    continue
                Path(fresh).rename(directory / "head")
                if journal not in self._unverified:
                    self._unverified_path(journal).unlink(missing_ok=True)
                if journal not in self._former:
                    self._former_path(journal).unlink(missing_ok=True)
            if is_synced:
                self.sync_names(journal)
            with self._heads_lock:
                if self._heads.get(journal) is head:
                    self._unwritten.discard(journal)

    def head_is_written(self, journal: str) -> bool:
        """Return True if a journal's file has the head that is known of it, if one is."""
        return journal not in self._unwritten

    def _unwritten_head(self, journal: str) -> Head | None:
        with self._heads_lock:
            return self._heads.get(journal) if journal in self._unwritten else None

    def _opened(self, stem: Path, origin: Origin) -> ContentFile:
        return ContentFile(
            stem.with_suffix(".content"),
            origin.codec,
            self.submit,
            lambda: self._remove(stem, origin.journal),
        )

    def _directory_of(self, journal: str) -> Path:
        return self.root / "journals" / _safe_name(journal)

    def _remove(self, stem: Path, journal: str) -> None:
        """Remove a spool's files, after the head which they have is written to its own file."""
        self.write_head(journal)
        stem.with_suffix(".log").unlink(missing_ok=True)
        stem.with_suffix(".content").unlink(missing_ok=True)


class JournalSpools:
    """Storage of one journal's spools; see :meth:`SpoolDirectory.journal`.

    Attributes:
        name: the journal's.
        create_revision: Etcd revision at which it was created.
        persisted: True if a commit must be forced to disk.
        writer: thread that writes large chunks.
        hashers: threads that hash them, for their fragments and for their appends.
    """

    def __init__(
        self, directory: SpoolDirectory, name: str, create_revision: int, cluster_id: int
    ) -> None:
        self._directory = directory
        self._cluster_id = cluster_id
        self.name = name
        self.create_revision = create_revision
        self.persisted = directory.durability is Durability.PERSISTED
        self.writer = directory.writer
        self.hashers = directory.hashers

    @property
    def head(self) -> Head | None:
        """The greatest offset known to be committed of this very journal."""
        return self._directory.head(
            self.name, create_revision=self.create_revision, cluster_id=self._cluster_id
        )

    def create(self, begin: int, codec: int) -> tuple[ContentFile, CommitLog]:
        """Make the files of a new spool.

        Raises:
            OSError: they cannot be made.
        """
        return self._directory.create(
            Origin(self.name, begin, codec, self.create_revision, self._cluster_id)
        )

    def note_head(self, end: int, registers: bytes) -> None:
        """Write ``end`` as the head of the journal.

        An error is only logged: the logs of spools have the head, too.
        """
        head = Head(self.name, end, registers, self.create_revision, self._cluster_id)
        try:
            if self.head is not None or end > 0 or registers:
                self._directory.note_head(head)
        except OSError as error:
            _log.warning("cannot write the head of %s (%d): %s", self.name, end, error)

    def forget_head(self) -> None:
        """Forget the head: others continued the journal. See :meth:`SpoolDirectory.forget_head`."""
        self._directory.forget_head(self.name)

    def doubt_head(self) -> None:
        """Use the head no more before it is known that no one has bytes after it."""
        self._directory.forget_head(self.name, HeadInput.HISTORY_LOST)

    def was_forgotten(self, file: ContentFile | None, end: int) -> bool:
        """Return True if the head was forgotten since the current spool was begun.

        Then the end of that spool is no head, although closing it writes it as one.

        Args:
            file: the content of the spool; ``None`` if it has none yet.
            end: of the spool.
        """
        if file is not None:
            return self._directory.is_contested_file(self.name, file)
        return end > 0 and self.head is None

    def sync(self, file: ContentFile, log_fd: int, *, is_new: bool) -> None:
        """Force a spool's content and commits to disk, and its names if it is new. Blocks.

        Raises:
            OSError: they are not on disk.
        """
        os.fdatasync(file.fd)
        os.fdatasync(log_fd)
        if is_new:
            self._directory.sync_names(self.name)

    @property
    def head_is_written(self) -> bool:
        """True if the journal's file has the head that is known, if one is."""
        return self._directory.head_is_written(self.name)

    def write_head(self) -> None:
        """Write the head to its file. Blocks. See :meth:`SpoolDirectory.write_head`.

        Raises:
            OSError: it is not written.
        """
        self._directory.write_head(self.name)

    def disk_error(self, doing: str, error: OSError) -> SpoolDiskError:
        """Return the error that names the disk which refuses a spool's bytes, and the remedy."""
        remedy = (
            "free some space there"
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else "check that disk"
        )
        return SpoolDiskError(
            f"cannot {doing} of {self.name} in {self._directory.root}: {error.strerror}; {remedy}, "
            "and append again (nothing acknowledged is lost)",
            journal=self.name,
        )


# ------------------------------------------------------------------- on disk


def accept_etcd(root: Path) -> int | None:
    """Accept the present Etcd for the withheld spools of a directory. Blocks.

    The broker over the directory, or the next one, compares them with what others have, and uses
    them. It serves the journals of which only Etcd may have lost something, too.

    Args:
        root: a spool directory; a broker may use it.

    Returns:
        the number of journals of which something is withheld; ``None`` if there is nothing to
        accept: nothing is written.

    Raises:
        ConfigurationError: it is no spool directory, or cannot be written.
    """
    try:
        count = sum(1 for _ in (root / "journals").glob("*/withheld"))
        if not (root / "journals").is_dir():
            raise FileNotFoundError("it has no directory `journals`")
        if count == 0 and not (root / _UNACCEPTED).exists():
            return None
        (root / "accepted").touch()
    except OSError as error:
        raise ConfigurationError(
            f"{root} is no spool directory of a broker: {error}; give the one of "
            "--broker.spool-dir, which the broker's log names, too"
        ) from error
    return count


def _safe_name(journal: str) -> str:
    """Return a file name for a journal that is unique on case-insensitive disks, too."""
    digest = hashlib.sha256(journal.encode()).hexdigest()[:16]
    return f"{quote(journal, safe='')[:_NAME_LENGTH]}={digest}"


def replace_file(path: Path, content: bytes, *, synced: bool = False) -> None:
    """Replace a file, so that it has either the old content or all of the new.

    Args:
        path: the file.
        content: its new content.
        synced: force the content to disk first, so that this holds over a loss of power, too.
    """
    fresh = path.with_suffix(".new")
    with fresh.open("wb") as file:
        file.write(content)
        if synced:
            file.flush()
            os.fsync(file.fileno())
    fresh.rename(path)

"""Backup: what it has, and the file that holds it.

The file is a compressed tar. Its parts are lines of JSON, and its last member is the manifest, with
the SHA-256 of each part::

    journals.jsonl       specs, heads and registers
    shards.jsonl         specs and hints
    members.jsonl        brokers and processes of applications, with their versions
    manifest.json        format, time, Etcd, and the SHA-256, size and lines of the others

A file whose writing was interrupted has no manifest, and is not taken for a backup. Specs and hints
are the very bytes of Etcd, so that fields of other implementations are kept.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import os
import tarfile
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

import orjson
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from google.protobuf.message import DecodeError, Message

from gazette_sdk.errors import ConfigurationError, GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.shard_spec import recovery_log

T = TypeVar("T")

FORMAT: Final = 1
"""Version of the format. Files of later ones are refused."""

MANIFEST: Final = "manifest.json"
JOURNALS: Final = "journals.jsonl"
SHARDS: Final = "shards.jsonl"
MEMBERS: Final = "members.jsonl"

PART_BYTES_MAX: Final = 4 << 30
"""Greatest size of a part: a million journals have less."""


class BackupError(GazetteError):
    """A file is not a whole backup, or cannot be written or read.

    Remedy: use another backup, and look why this one was not written to its end.
    """


@dataclass(frozen=True, kw_only=True)
class SavedJournal:
    """Journal of a backup.

    Attributes:
        name: its name.
        spec_bytes: its spec, as Etcd has it.
        head: offset of its next byte; None if it was not known.
        begin: offset of its first byte; None if it was not known.
        create_revision: revision of Etcd at which it was created, or that of the journal which it
            continues; 0 if it was not known.
        registers: names and values of its registers.
        brokers: brokers that held it, as ZONE/ID, the primary first.
        guessed: fields of the spec that are guessed from stored content.
    """

    name: str
    spec_bytes: bytes
    head: int | None = None
    begin: int | None = None
    create_revision: int = 0
    registers: Sequence[tuple[str, str]] = ()
    brokers: Sequence[str] = ()
    guessed: Sequence[str] = ()

    @cached_property
    def spec(self) -> pb.JournalSpec:
        """Its spec; not to be changed."""
        return pb.JournalSpec.FromString(self.spec_bytes)


@dataclass(frozen=True, kw_only=True)
class SavedShard:
    """Shard of a backup.

    Attributes:
        application: prefix of its application in Etcd.
        id: its id.
        spec_bytes: its spec, as Etcd has it.
        hints: values of its keys of hints, by key.
    """

    application: str
    id: str
    spec_bytes: bytes
    hints: Mapping[str, bytes] = field(default_factory=dict)

    @cached_property
    def spec(self) -> cpb.ShardSpec:
        """Its spec; not to be changed."""
        return cpb.ShardSpec.FromString(self.spec_bytes)

    @property
    def log(self) -> str:
        """Its recovery log; empty without one."""
        return recovery_log(self.spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedMember:
    """Member of the cluster, or of an application.

    Attributes:
        prefix: prefix of its cluster or application in Etcd.
        id: ZONE/ID.
        endpoint: its address.
        version: of its package; empty if it was not known.
    """

    prefix: str
    id: str
    endpoint: str
    version: str = ""


@dataclass(frozen=True, kw_only=True)
class Backup:
    """Backup of a cluster.

    Attributes:
        source: ``etcd``, or the URLs of the stores from which it was gathered.
        created_s: Unix time, in seconds.
        prefix: prefix of the cluster in Etcd.
        cluster_id: of Etcd; 0 if it was gathered from stores.
        revision: of Etcd.
        journals: by name.
        shards: by application and id.
        members: brokers, and processes of applications.
        id: SHA-256 of the manifest, in hexadecimal; of a gathered one, of what it has.
    """

    source: str = "etcd"
    created_s: float = field(default_factory=time.time)
    prefix: str
    cluster_id: int = 0
    revision: int = 0
    journals: Sequence[SavedJournal] = ()
    shards: Sequence[SavedShard] = ()
    members: Sequence[SavedMember] = ()
    id: str = ""

    @property
    def brokers(self) -> Sequence[SavedMember]:
        """Its brokers."""
        return [each for each in self.members if each.prefix == self.prefix]

    @property
    def consumers(self) -> Sequence[SavedMember]:
        """Processes of applications."""
        return [each for each in self.members if each.prefix != self.prefix]


# ---------------------------------------------------------------- bytes


def encode(backup: Backup) -> bytes:
    """Return the file of a backup."""
    texts = {
        JOURNALS: _lines(map(_journal_row, backup.journals)),
        SHARDS: _lines(map(_shard_row, backup.shards)),
        MEMBERS: _lines(map(asdict, backup.members)),
    }
    manifest = {
        "format": FORMAT,
        "source": backup.source,
        "created_s": backup.created_s,
        "prefix": backup.prefix,
        "cluster_id": f"{backup.cluster_id:x}",
        "revision": backup.revision,
        "parts": {
            name: {
                "sha256": hashlib.sha256(text).hexdigest(),
                "bytes": len(text),
                "lines": text.count(b"\n"),
            }
            for name, text in texts.items()
        },
    }
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as archive:
        for name, text in (*texts.items(), (MANIFEST, orjson.dumps(manifest))):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.mode = len(text), int(backup.created_s), 0o600
            archive.addfile(entry, io.BytesIO(text))
    return written.getvalue()


def decode(content: bytes, name: str) -> Backup:
    """Return the backup that a file has, after a check of the sums of its parts.

    Args:
        content: of the file.
        name: of the file, for errors.

    Raises:
        BackupError: it is not a whole backup.
    """
    parts = _parts(content, name)
    manifest_bytes = parts.pop(MANIFEST, None)
    if manifest_bytes is None:
        raise BackupError(
            f"{name} is not whole: its manifest, which is written last, is missing; use another"
            " backup"
        )
    try:
        manifest = orjson.loads(manifest_bytes)
        if manifest["format"] > FORMAT:
            raise BackupError(
                f"{name} has format {manifest['format']}, which a later version wrote: upgrade"
                " gazette-sdk"
            )
        for part, stated in manifest["parts"].items():
            text = parts.get(part, b"")
            if hashlib.sha256(text).hexdigest() != stated["sha256"]:
                raise BackupError(
                    f"{name} is damaged: {part} does not have the SHA-256 of the manifest; use"
                    " another backup"
                )
        return Backup(
            source=manifest["source"],
            created_s=manifest["created_s"],
            prefix=manifest["prefix"],
            cluster_id=int(manifest["cluster_id"], 16),
            revision=manifest["revision"],
            journals=[_journal_of(row) for row in _rows(parts[JOURNALS])],
            shards=[_shard_of(row) for row in _rows(parts[SHARDS])],
            members=[SavedMember(**row) for row in _rows(parts[MEMBERS])],
            id=hashlib.sha256(manifest_bytes).hexdigest(),
        )
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, DecodeError) as error:
        raise BackupError(f"{name} is damaged: {error!r}; use another backup") from error


def _parts(content: bytes, name: str) -> dict[str, bytes]:
    parts: dict[str, bytes] = {}
    try:
        text = gzip.decompress(content)  # to its end, of which a reader of the tar needs no more
        with tarfile.open(fileobj=io.BytesIO(text), mode="r:") as archive:
            for entry in archive:
                file = archive.extractfile(entry) if entry.size <= PART_BYTES_MAX else None
                if file is not None:
                    parts[entry.name] = file.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise BackupError(f"{name} is not a whole backup: {error}; use another one") from error
    return parts


def _lines(rows: Iterable[object]) -> bytes:
    return b"".join(orjson.dumps(row) + b"\n" for row in rows)


def _rows(text: bytes) -> Iterable[dict[str, Any]]:
    return map(orjson.loads, text.splitlines())


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _journal_row(journal: SavedJournal) -> dict[str, object]:
    row = {each: getattr(journal, each) for each in ("name", "head", "begin", "registers")}
    row |= {each: getattr(journal, each) for each in ("create_revision", "brokers", "guessed")}
    return row | {"spec": _text(journal.spec_bytes)}


def _journal_of(row: dict[str, Any]) -> SavedJournal:
    spec = base64.b64decode(row.pop("spec"), validate=True)
    row["registers"] = tuple((name, value) for name, value in row["registers"])
    row |= {each: tuple(row[each]) for each in ("brokers", "guessed")}
    journal = SavedJournal(spec_bytes=spec, **row)
    if journal.spec.name != journal.name:
        raise ValueError(f"the spec of {journal.name} is that of {journal.spec.name}")
    return journal


def _shard_row(shard: SavedShard) -> dict[str, object]:
    hints = {key: _text(value) for key, value in shard.hints.items()}
    spec = _text(shard.spec_bytes)
    return {"application": shard.application, "id": shard.id, "spec": spec, "hints": hints}


def _shard_of(row: dict[str, Any]) -> SavedShard:
    shard = SavedShard(
        application=row["application"],
        id=row["id"],
        spec_bytes=base64.b64decode(row["spec"], validate=True),
        hints={key: base64.b64decode(value) for key, value in row["hints"].items()},
    )
    if shard.spec.id != shard.id:
        raise ValueError(f"the spec of {shard.id} is that of {shard.spec.id}")
    return shard


def identity(backup: Backup) -> str:
    """Return the identity of a gathered backup: the same stores give the same one."""
    digest = hashlib.sha256(backup.source.encode())
    for spec in (each.spec_bytes for each in backup.journals):
        digest.update(spec)
    for spec in (each.spec_bytes for each in backup.shards):
        digest.update(spec)
    return digest.hexdigest()


# ---------------------------------------------------------------- files


def write(url: str, backup: Backup) -> int:
    """Write a backup to a new file, and return its size in bytes. It blocks.

    Args:
        url: path of the file, or a URL of any file system of fsspec.
        backup: the backup.

    Raises:
        BackupError: the file exists, or cannot be written.
    """
    content = encode(backup)

    def store() -> None:
        files, path = url_to_fs(url)
        if files.exists(path):
            raise BackupError(
                f"{url} exists, and a backup replaces nothing: give another name, such as one with"
                " the date"
            )
        if isinstance(files, LocalFileSystem):
            _write_local(Path(path), content)
        else:
            files.pipe_file(path, content)
        if files.cat_file(path) != content:
            raise BackupError(f"{url} was written, and has other bytes now: write it elsewhere")

    _with_files(url, store)
    return len(content)


def _write_local(path: Path, content: bytes) -> None:
    """Write a file under another name first. Only its owner may read it: stores have secrets."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(partial, path)  # unlike a rename, it replaces nothing
    finally:
        partial.unlink(missing_ok=True)


def read(url: str) -> Backup:
    """Read a backup, and check the sums of its parts. It blocks.

    Args:
        url: path of the file, or a URL of any file system of fsspec.

    Raises:
        BackupError: it cannot be read, or is not a whole backup.
    """

    def fetch() -> bytes:
        files, path = url_to_fs(url)
        content: bytes = files.cat_file(path)
        return content

    return decode(_with_files(url, fetch), url)


def _with_files(url: str, work: Callable[[], T]) -> T:
    try:
        return work()
    except GazetteError:
        raise
    except ImportError as error:
        raise ConfigurationError(f"{url}: {error}; install that package") from error
    except ValueError as error:
        raise ConfigurationError(f"{url}: {error}; give a path, or a URL such as s3://…") from error
    except Exception as error:  # each file system of fsspec raises errors of its own
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise BackupError(f"{url}: {reason}; check its name, and this tool's rights") from error


def spec_of(message: Message) -> bytes:
    """Return the bytes of a spec that was made here."""
    return message.SerializeToString(deterministic=True)

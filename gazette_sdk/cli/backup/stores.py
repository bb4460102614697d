"""Backup that is gathered from fragment stores, where there is no other one.

Brokers with `--broker.mirror-specs` write specs, hints and members beside the fragments
(`broker.mirror`). Without mirrors, names of journals and codecs are those of their fragments, and
the content type is a guess from the first bytes. What is guessed is marked.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import orjson
from google.protobuf.message import DecodeError

from gazette_sdk.broker.mirror import MEMBERS, ROOT, SHARD, SPEC
from gazette_sdk.cli.backup.archive import (
    Backup,
    BackupError,
    SavedJournal,
    SavedMember,
    SavedShard,
    identity,
    spec_of,
)
from gazette_sdk.cli.backup.capture import LISTINGS_MAX
from gazette_sdk.cli.formats import Progress
from gazette_sdk.errors import GazetteError, ValidationError
from gazette_sdk.fragment.content import decode_fragment
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.fragment.stores.base import Store
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.durations import SECOND_NS, from_ns
from gazette_sdk.protocol.fragments import content_path, length_of, parse_content_path
from gazette_sdk.protocol.labels import CONTENT_TYPE, RECOVERY_LOG, set_value
from gazette_sdk.protocol.names import JOURNAL_LENGTH_BYTES, validate_path_component
from gazette_sdk.transport.loop import for_each

SAMPLE_BYTES: Final = 4096
"""Bytes of a journal from which its content type is guessed."""

OBJECT_BYTES_MAX: Final = 64 << 20
"""Greatest size of an object of a mirror."""

FRAGMENT_BYTES: Final = 256 << 20
"""Length of fragments of guessed specs."""

REPLICATION_MAX: Final = 3
"""Replication of guessed specs, at most."""

_POSTFIX = re.compile(r"(?:date|year|month|day|hour|minute|utc_date|utc_hour)=[^/]*")
"""Part of a path that a postfix template makes, rather than the name of a journal."""

_FRAME_MAGIC = b"\x66\x33\x93\x36"


async def gather(
    urls: Sequence[str],
    stores: StoreRegistry,
    *,
    prefix: str,
    brokers: int,
    progress: Progress,
    incarnation: str = "",
    without: str = "",
) -> Backup:
    """Return a backup of what stores have.

    Args:
        urls: of the stores.
        stores: opens them.
        prefix: of the cluster that is restored, in Etcd.
        brokers: number of its brokers, for guessed specs.
        progress: shows the steps.
        incarnation: name of the mirror to use; by default the latest one.
        without: name of the mirror of the present Etcd, which is not used.

    Raises:
        BackupError: the stores have neither mirrors nor fragments.
        StoreError: a store failed.
    """
    progress.begin("Listings of stores", len(urls))
    mirrored: dict[str, list[tuple[Store, str]]] = {}
    opened = [await stores.aget(url) for url in urls]
    for number, store in enumerate(opened):
        for path in await asyncio.to_thread(_paths, store, f"{ROOT}/"):
            name, _, rest = path.partition("/")
            if rest:
                mirrored.setdefault(name, []).append((store, f"{ROOT}/{path}"))
        progress.advance(number + 1)
    mirrored.pop(without, None)
    source = f"stores {' '.join(urls)}"
    if incarnation and incarnation not in mirrored:
        raise BackupError(
            f"no store has the mirror {incarnation}; there are: {', '.join(sorted(mirrored))}"
        )
    if mirrored:
        name = incarnation or max(mirrored)  # names begin with their time
        found = await _mirrored(f"{source} {name}", mirrored[name], prefix, progress)
    else:
        found = await _guessed(source, opened, prefix, brokers, progress)
    if not found.journals:
        raise BackupError(f"{source} have neither mirrors of specs nor fragments: check the URLs")
    return Backup(
        source=found.source,
        prefix=prefix,
        journals=found.journals,
        shards=found.shards,
        members=found.members,
        id=identity(found),
    )


def _paths(store: Store, directory: str) -> list[str]:
    return [each.path for each in store.list(directory)]


def _load(store: Store, path: str) -> bytes:
    content = store.open(path)
    with content.raw as file:
        return file.read(OBJECT_BYTES_MAX)


# ---------------------------------------------------------------- mirrors


async def _mirrored(
    source: str, objects: Sequence[tuple[Store, str]], prefix: str, progress: Progress
) -> Backup:
    progress.begin("Mirrors", len(objects))
    done = 0

    async def load(found: tuple[Store, str]) -> dict[str, Any]:
        nonlocal done
        store, path = found
        content = await asyncio.to_thread(_load, store, path)
        done += 1
        progress.advance(done)
        try:
            row: dict[str, Any] = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise BackupError(
                f"{store.url}: {path} is damaged ({error}): remove it, or use another mirror"
            ) from error
        return row

    def of_kind(kind: str) -> list[tuple[Store, str]]:
        return [found for found in objects if found[1].rpartition("/")[2] == kind]

    specs = await for_each(of_kind(SPEC), load, LISTINGS_MAX)
    shards = await for_each(of_kind(SHARD), load, LISTINGS_MAX)
    members = await for_each(of_kind(MEMBERS), load, LISTINGS_MAX)
    try:
        return Backup(
            source=source,
            prefix=prefix,
            journals=[
                SavedJournal(
                    name=row["name"],
                    spec_bytes=base64.b64decode(row["spec"]),
                    create_revision=row["create_revision"],
                )
                for row in _latest(specs, lambda row: row["name"])
            ],
            shards=[
                SavedShard(
                    application=row["application"],
                    id=row["id"],
                    spec_bytes=base64.b64decode(row["spec"]),
                    hints={key: base64.b64decode(each) for key, each in row["hints"].items()},
                )
                for row in _latest(shards, lambda row: (row["application"], row["id"]))
            ],
            members=[
                SavedMember(prefix=prefix, id=each["id"], endpoint=each["endpoint"])
                for row in _latest(members, lambda _: "")
                for each in row["members"]
            ],
        )
    except (KeyError, TypeError, ValueError, DecodeError) as error:
        raise BackupError(f"{source}: a mirror is malformed ({error!r})") from error


def _latest(rows: Iterable[Mapping[str, Any]], key: Any) -> list[Mapping[str, Any]]:
    """Return the row of each key that is of the latest revision: a store may have an older one."""
    latest: dict[object, Mapping[str, Any]] = {}
    for row in rows:
        known = latest.get(key(row))
        if known is None or row["mod_revision"] > known["mod_revision"]:
            latest[key(row)] = row
    return [latest[each] for each in sorted(latest)]  # type: ignore[type-var]


# ---------------------------------------------------------------- guesses


async def _guessed(
    source: str, stores: Sequence[Store], prefix: str, brokers: int, progress: Progress
) -> Backup:
    """Return journals that are guessed from names and first bytes of fragments."""
    first: dict[str, tuple[pb.Fragment, Store]] = {}
    in_stores: dict[str, dict[str, None]] = {}
    for store in stores:
        for path in await asyncio.to_thread(_paths, store, ""):
            fragment = _fragment_of(path)
            if fragment is None:
                continue
            name = fragment.journal
            in_stores.setdefault(name, {})[store.url] = None
            known = first.get(name)
            if known is None or fragment.begin < known[0].begin:
                first[name] = fragment, store
    progress.begin("First bytes of journals", len(first))
    replication = min(REPLICATION_MAX, max(1, brokers - 1))

    async def guess(name: str) -> SavedJournal:
        fragment, store = first[name]
        content_type = await asyncio.to_thread(_content_type, fragment, store)
        spec = pb.JournalSpec(name=name, replication=replication)
        spec.fragment.length = FRAGMENT_BYTES
        spec.fragment.compression_codec = fragment.compression_codec
        spec.fragment.stores.extend(in_stores[name])
        spec.fragment.refresh_interval.CopyFrom(from_ns(60 * SECOND_NS))
        guessed = ["replication", "fragment", "labels"]
        if content_type:
            set_value(spec.labels, CONTENT_TYPE, content_type)
            guessed.append(f"content-type {content_type}")
        if fragment.path_postfix:
            guessed.append("path_postfix_template")
        return SavedJournal(name=name, spec_bytes=spec_of(spec), guessed=tuple(guessed))

    journals = await for_each(sorted(first), guess, LISTINGS_MAX)
    return Backup(source=source, prefix=prefix, journals=journals)


def _fragment_of(path: str) -> pb.Fragment | None:
    """Return the fragment that a path names; its journal's name is a guess. None for others."""
    if path.startswith((f"{ROOT}/", ".test/")):
        return None
    directory, _, final = path.rpartition("/")
    parts = directory.split("/")
    at = next((at for at, part in enumerate(parts) if _POSTFIX.fullmatch(part)), len(parts))
    name, postfix = "/".join(parts[:at]), "/".join(parts[at:])
    try:
        validate_path_component(name, "name", *JOURNAL_LENGTH_BYTES)
        return parse_content_path(name, f"{postfix}/{final}" if postfix else final)
    except ValidationError:
        return None


def _content_type(fragment: pb.Fragment, store: Store) -> str:
    """Return the content type that the first bytes of a fragment suggest; empty for none."""
    try:
        content = store.open(content_path(fragment))
        reader = decode_fragment(content, fragment, fragment.begin, source=store.url)
        try:
            sample = reader.read(min(SAMPLE_BYTES, length_of(fragment)))
        finally:
            reader.close()
    except (GazetteError, OSError):
        return ""
    if sample.startswith(_FRAME_MAGIC):
        is_log = "recovery" in fragment.journal
        return RECOVERY_LOG if is_log else "application/x-protobuf-fixed"
    if sample.lstrip().startswith(b"{"):
        return "application/x-ndjson"
    line = sample.partition(b"\n")[0]
    return "text/csv" if line.isascii() and line.count(b",") else ""

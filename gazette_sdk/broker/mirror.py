"""Mirror of specs and hints in fragment stores, for an Etcd that is lost without a backup.

The broker that allocates writes them (`--broker.mirror-specs`), each when it has changed, into the
store of the journal that they are about::

    .gazette/INCARNATION/journals/JOURNAL/@spec.json      spec of a journal, in its first store
    .gazette/INCARNATION/shards/APPLICATION/SHARD/@shard.json   spec and hints, beside its log
    .gazette/INCARNATION/members.json                     members of the cluster, in each store

An incarnation is one life of Etcd's data. Its name is in a key of Etcd, and begins with its time.
With an Etcd that begins anew, brokers write beside what is mirrored of the one before, and never
over it. No journal can have these paths, as its name has no ``@``; a listing of a journal shows
only what is below its own name.

Journals that are read-only are left out, since their stores are those of another cluster. A journal
that is deleted while the same broker allocates is removed from the mirror.
"""

from __future__ import annotations

import asyncio
import base64
import io
import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import orjson
from google.protobuf.message import DecodeError

from gazette_sdk.cluster.allocator.state import leader_of
from gazette_sdk.cluster.broker_keys import BrokerKeySpace
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Compare, KeyValue, Put, prefix_end
from gazette_sdk.errors import FragmentNotFoundError, GazetteError
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.journal_spec import may_write
from gazette_sdk.protocol.labels import continued_revision
from gazette_sdk.protocol.shard_spec import hint_keys, recovery_log
from gazette_sdk.retries import Outage
from gazette_sdk.transport.loop import LoopSlices, for_each

ROOT: Final = ".gazette"
"""Directory of all mirrors, in a store."""

SPEC, SHARD, MEMBERS = "@spec.json", "@shard.json", "members.json"

PAUSE_S: Final = 5.0
"""Time between two looks for changes of journals and members."""

SHARDS_ROUNDS: Final = 3
"""Looks between two reads of specs and hints of shards, which are not in the broker's memory."""

PUTS_MAX: Final = 8
"""Writes at a time: content of journals goes first."""

GONE_MAX: Final = 10
"""Mirrors that are removed at a time, or else half of all."""

STORES_MAX: Final = 64
"""Stores that get the list of members, at most."""

PAGE_KEYS: Final = 500

_log = logging.getLogger(__name__)


def journal_path(incarnation: str, journal: str) -> str:
    """Return the path of the mirror of a journal."""
    return f"{ROOT}/{incarnation}/journals/{journal}/{SPEC}"


def shard_path(incarnation: str, application: str, shard: str) -> str:
    """Return the path of the mirror of a shard.

    Args:
        incarnation: of Etcd.
        application: prefix of the application in Etcd.
        shard: id of the shard.
    """
    return f"{ROOT}/{incarnation}/shards/{application.strip('/')}/{shard}/{SHARD}"


def members_path(incarnation: str) -> str:
    """Return the path of the list of members."""
    return f"{ROOT}/{incarnation}/{MEMBERS}"


def incarnation_key(root: str) -> bytes:
    """Return the key of the name of an incarnation."""
    return f"/gazette_sdk/incarnation{root.rstrip('/')}".encode()


class _Object(NamedTuple):
    """Object of the mirror.

    Attributes:
        stores: URLs of the stores that get it.
        version: changes with its content.
        content: its content.
    """

    stores: Sequence[str]
    version: object
    content: bytes


class SpecMirror:
    """Mirror of one broker, which writes while this broker allocates.

    Args:
        etcd: the client.
        keyspace: mirror of the cluster.
        stores: of the process.
        local_id: this broker.
        consumers_prefix: prefix in Etcd below which applications have their keys.
    """

    def __init__(
        self,
        etcd: Etcd,
        keyspace: BrokerKeySpace,
        stores: StoreRegistry,
        local_id: pb.ProcessSpec.ID,
        consumers_prefix: str,
    ) -> None:
        self._etcd = etcd
        self._keyspace = keyspace
        self._stores = stores
        self._local_id = local_id
        self._consumers = f"{consumers_prefix}/".encode()
        self._incarnation = ""
        self._written: dict[str, _Object] = {}  # by path, without content
        self._shards: Mapping[str, _Object] = {}
        self._round = 0

    async def run(self) -> None:
        """Write what has changed, until cancelled."""
        outage = Outage(_log, "mirror of specs in fragment stores")
        while True:
            await asyncio.sleep(PAUSE_S)
            member = self._keyspace.member(self._local_id.zone, self._local_id.suffix)
            if member is None or leader_of(self._keyspace.members()) is not member:
                self._written, self._round = {}, 0  # another broker writes
                continue
            try:
                await self.write()
            except (GazetteError, OSError) as error:
                outage.failed(str(error))
            else:
                outage.ended()

    async def write(self) -> None:
        """Write what has changed since the last call.

        Raises:
            GazetteError: Etcd did not answer, or a store refused an object. The others are written.
            OSError: likewise.
        """
        self._incarnation = await self._current_incarnation()
        if self._round % SHARDS_ROUNDS == 0:
            self._shards = await self._read_shards()
        self._round += 1
        slices = LoopSlices()
        changed: list[tuple[str, _Object]] = []
        wanted: set[str] = set()
        for path, found in (*self._journals(), *self._shards.items(), *self._members()):
            await slices.rest()
            wanted.add(path)
            written = self._written.get(path)
            if written is None or (written.version, written.stores) != (
                found.version,
                found.stores,
            ):
                changed.append((path, found))
        failed = [error for error in await for_each(changed, self._put, PUTS_MAX) if error]
        # Keys that vanish together with our own are not deleted journals, but a lost Etcd.
        member = self._keyspace.member(self._local_id.zone, self._local_id.suffix)
        gone = [path for path in self._written if path not in wanted] if member else []
        if len(gone) > max(GONE_MAX, len(self._written) // 2):
            _log.warning(
                "%d of %d mirrored specs are not in Etcd any more: their mirrors are kept, as this"
                " may be an accident; remove them by hand if it is not",
                len(gone), len(self._written),
            )  # fmt: skip
            for path in gone:
                del self._written[path]
            gone = []
        failed += [error for error in await for_each(gone, self._remove, PUTS_MAX) if error]
        if failed:
            raise failed[0]

    def _journals(self) -> Iterator[tuple[str, _Object]]:
        for item in self._keyspace.items():
            spec = item.value
            if may_write(spec) and spec.fragment.stores:
                row = {
                    "name": item.id,
                    "create_revision": continued_revision(spec.labels) or item.create_revision,
                    "mod_revision": item.mod_revision,
                    "spec": _text(item.raw),
                }
                yield (
                    journal_path(self._incarnation, item.id),
                    _Object(spec.fragment.stores[:1], item.mod_revision, orjson.dumps(row)),
                )

    def _members(self) -> Iterator[tuple[str, _Object]]:
        members = [
            {"id": f"{each.zone}/{each.suffix}", "endpoint": each.value.process_spec.endpoint}
            for each in self._keyspace.members()
        ]
        urls = dict.fromkeys(
            url
            for item in self._keyspace.items()
            if may_write(item.value)
            for url in item.value.fragment.stores[:1]
        )
        row = {"mod_revision": self._keyspace.revision, "members": members}
        found = _Object(list(urls)[:STORES_MAX], members, orjson.dumps(row))
        yield members_path(self._incarnation), found

    async def _current_incarnation(self) -> str:
        """Return the name of Etcd's incarnation; it gets one if it has none."""
        key = incarnation_key(self._keyspace.root)
        while not (entries := (await self._etcd.range(key)).entries):
            made = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) + f"-{secrets.token_hex(4)}"
            await self._etcd.txn([Compare.create_revision(key, 0)], [Put(key, made.encode())])
        return entries[0].value.decode()

    async def _read_shards(self) -> Mapping[str, _Object]:
        """Read specs and hints of all shards, page by page."""
        found: dict[str, _Object] = {}
        begin, end = self._consumers, prefix_end(self._consumers)
        has_more = True
        while has_more:
            page = await self._etcd.range(begin, end, limit=PAGE_KEYS)
            for kv in page.entries:
                root, separator, name = kv.key.partition(b"/items/")
                if separator:
                    shard = await self._shard(root.decode(), name.decode(), kv)
                    if shard is not None:
                        path = shard_path(self._incarnation, root.decode(), name.decode())
                        found[path] = shard
            has_more = page.has_more
            begin = page.entries[-1].key + b"\0" if page.entries else end
        return found

    async def _shard(self, application: str, name: str, kv: KeyValue) -> _Object | None:
        try:
            spec = cpb.ShardSpec.FromString(kv.value)
        except DecodeError as error:
            _log.warning("the shard %s is not mirrored: %s", name, error)
            return None
        beside = recovery_log(spec) or next((each.journal for each in spec.sources), "")
        item = self._keyspace.item(beside.partition(";")[0])
        if item is None or not item.value.fragment.stores:
            return None
        hints, revisions = {}, [kv.mod_revision]
        for key in hint_keys(spec):
            for entry in (await self._etcd.range(key.encode())).entries:
                hints[key] = _text(entry.value)
                revisions.append(entry.mod_revision)
        row = {
            "application": application,
            "id": name,
            "mod_revision": kv.mod_revision,
            "spec": _text(kv.value),
            "hints": hints,
        }
        return _Object(item.value.fragment.stores[:1], tuple(revisions), orjson.dumps(row))

    async def _put(self, changed: tuple[str, _Object]) -> Exception | None:
        path, found = changed
        failure: Exception | None = None
        for url in found.stores:
            content = io.BytesIO(found.content)
            try:
                store = await self._stores.aget(url)
                await asyncio.to_thread(
                    store.put, path, content, len(found.content), overwrite=True
                )
            except (GazetteError, OSError) as error:
                failure = error
        if failure is None:
            self._written[path] = found._replace(content=b"")
        return failure

    async def _remove(self, path: str) -> Exception | None:
        try:
            for url in self._written[path].stores:
                store = await self._stores.aget(url)
                await asyncio.to_thread(store.remove, path)
        except FragmentNotFoundError:
            pass  # it is gone already
        except (GazetteError, OSError) as error:
            return error
        del self._written[path]
        return None


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()

"""Whether the heads which a broker remembers are still the heads of their journals.

A broker that starts again knows from its spool directory where its journals ended. That is only
good if nobody else went on with them in between. Content is appended to a journal only after its
primary wrote the synchronized route into the journal's assignments, and whoever is in that route
has every byte. So a remembered head is old exactly if a route without us was written since.

Etcd's history tells: :func:`succeeded_journals` reads the changes of assignments since the revision
which the earlier process noted last. Where Etcd does not keep that history any more, no head can
be trusted, and the operator has to say so by `reset-head`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

from google.protobuf.message import DecodeError

from gazette_sdk.cluster import keys
from gazette_sdk.cluster.broker_keys import BrokerKeySpace
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.errors import EtcdCompactedError
from gazette_sdk.protocol import broker_pb2 as pb

__all__ = ["RevisionNote", "is_without", "succeeded_journals"]

HISTORY_TIMEOUT_S = 10.0
"""Bound of reading the history; what it takes longer for counts as lost."""

NOTE_DELAY_S = 1.0
"""A revision is noted this long after it came, so that bursts of changes cost one note."""

_log = logging.getLogger(__name__)


class RevisionNote:
    """The last revision of Etcd at which this broker's process was a member, in a file.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._header = pb.Header.Etcd()
        self._timer: asyncio.TimerHandle | None = None

    def read(self, cluster_id: int) -> int:
        """The revision noted; 0 if there is none of this Etcd cluster."""
        try:
            noted_cluster, revision = map(int, self._path.read_text("ascii").split())
        except FileNotFoundError:
            return 0
        except ValueError:
            _log.warning("%s holds no revision; it is made anew", self._path)
            return 0
        return revision if noted_cluster == cluster_id else 0

    def note(self, header: pb.Header.Etcd) -> None:
        """Note a revision, soon."""
        self._header = header
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(NOTE_DELAY_S, self.flush)

    def flush(self) -> None:
        """Write down what was to be noted, now."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        fresh = self._path.with_suffix(".new")
        try:
            fresh.write_text(f"{self._header.cluster_id} {self._header.revision}\n", "ascii")
            fresh.rename(self._path)
        except OSError as error:
            # An older note only makes the next start look at more of the history.
            _log.warning("cannot note the revision of Etcd: %s", error)


def is_without(route: pb.Route, local_id: pb.ProcessSpec.ID) -> bool:
    """Whether an assignment's value is a synchronized route which lacks this broker."""
    return len(route.members) > 0 and local_id not in route.members


async def succeeded_journals(
    etcd: Etcd,
    keyspace: BrokerKeySpace,
    local_id: pb.ProcessSpec.ID,
    since_revision: int,
) -> set[str] | None:
    """Journals with which others went on after a revision, and we have not caught up since.

    Args:
        etcd: the client.
        keyspace: the mirror, just loaded at the revision of our announcement.
        local_id: this broker.
        since_revision: when this broker was a member last; 0 for not known.

    Returns:
        their names; ``None`` if Etcd's history does not reach back that far.
    """
    succeeded: dict[str, bool] = {}
    try:
        async with asyncio.timeout(HISTORY_TIMEOUT_S):
            async for journal, route in _routes_since(etcd, keyspace, since_revision + 1):
                succeeded[journal] = is_without(route, local_id)
    except (EtcdCompactedError, TimeoutError) as error:
        _log.warning(
            "Etcd does not tell what happened since revision %d (%s): offsets remembered from "
            "before are not used; run `gazctl journals reset-head` where appends are refused",
            since_revision,
            error,
        )
        return None
    return {journal for journal, is_succeeded in succeeded.items() if is_succeeded}


async def _routes_since(
    etcd: Etcd, keyspace: BrokerKeySpace, first_revision: int
) -> AsyncIterator[tuple[str, pb.Route]]:
    """Synchronized routes that were written from a revision up to what is loaded, in order."""
    last = keyspace.revision
    if first_revision > last:
        return
    prefix = keys.assignments_prefix(keyspace.root)
    # All of the mirror's prefix is watched: its last revision, that of our own member key, is
    # where the history ends.
    async with aclosing(etcd.watch(keyspace.root.encode(), first_revision)) as batches:
        async for batch in batches:
            for event in batch.events:
                if event.kv.mod_revision > last:
                    return
                if event.is_delete or not event.kv.key.startswith(prefix) or not event.kv.value:
                    continue
                try:
                    section = event.kv.key[len(prefix) :].decode()
                    journal = keys.parse_assignment(section)[0]
                    yield journal, pb.Route.FromString(event.kv.value)
                except (ValueError, DecodeError) as error:
                    _log.warning("%r in Etcd's history is passed over: %s", event.kv.key, error)
            if batch.events and batch.events[-1].kv.mod_revision >= last:
                return

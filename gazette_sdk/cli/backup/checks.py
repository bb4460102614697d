"""Checks before a restore: what could do harm, and processes that are there or should be."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from gazette_sdk.cli.backup.archive import Backup, SavedMember
from gazette_sdk.cli.backup.capture import Keys
from gazette_sdk.cli.formats import Progress
from gazette_sdk.cli.program import CommandFailedError
from gazette_sdk.errors import CallError, GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authorizer
from gazette_sdk.shard.consumer.client import ShardClient
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.connect import connect
from gazette_sdk.transport.listing import list_journals
from gazette_sdk.transport.loop import for_each
from gazette_sdk.transport.wire import Tls

ANSWER_TIMEOUT_S: Final = 3.0
"""Longest time of a call to find out whether a process is there."""

CALLS_MAX: Final = 32
"""Calls at once."""

NAMED_MAX: Final = 5

ALL: Final = "all"
"""Stands for all brokers of a backup."""

_REFUSED = "refused:"
"""Begin of the answer of a broker that does not take a call."""

_NO_JOURNAL = pb.Label(name="name", value="no/journal/has/this/name")
"""Selects no journal: only the header of the answer is of interest."""


class RestoreRefusedError(CommandFailedError):
    """A restore is refused, because it could do harm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreChecks:
    """Checks before the restore of a backup.

    Args:
        backup: what is restored.
        prefix: of the cluster in Etcd.
        lost: brokers whose spool directories are lost, as ZONE/ID, or :data:`ALL`.
        authorizer: signs calls; None for none.
        tls: certificates.
        progress: shows the steps.
    """

    backup: Backup
    prefix: str
    lost: Collection[str] = ()
    authorizer: Authorizer | None = field(default=None, repr=False)
    tls: Tls = field(default_factory=Tls)
    progress: Progress = field(default_factory=Progress)

    async def check(self, keys: Keys, *, continues: bool) -> None:
        """Check what is in Etcd, and which processes are there.

        Args:
            keys: of Etcd.
            continues: True if a restore that was interrupted is continued.

        Raises:
            RestoreRefusedError: the restore could do harm.
        """
        self._check_empty(keys, continues=continues)
        await self._check_brokers(keys)
        await self._check_former(keys)

    def _check_empty(self, keys: Keys, *, continues: bool) -> None:
        """Refuse a restore over a cluster, or beside processes that would disturb it."""
        applications = {each.application for each in self.backup.shards}
        shards = [name for root, name, _ in keys.shards if root in applications]
        if not continues and (keys.journals or shards):
            what = f"{len(keys.journals)} journals and {len(shards)} shards"
            raise RestoreRefusedError(
                f"Etcd is not empty: below {self.prefix} and the prefixes of applications it has"
                f" {what}; a cluster is restored into an Etcd that has none"
            )
        if keys.consumers:
            raise RestoreRefusedError(
                f"processes of applications run: {named(each.id for each in keys.consumers)};"
                " stop them until the restore is done, since they create shards without hints"
            )

    async def _check_brokers(self, keys: Keys) -> None:
        """Refuse unless the brokers of the backup are there, and all of Etcd's serve."""
        self.progress.begin("Members", len(self.backup.members) + len(keys.brokers))
        if not keys.brokers:
            raise RestoreRefusedError(
                f"no broker is announced below {self.prefix}: start all brokers over their spool"
                " directories first, so that they claim the journals of which they have the last"
                " bytes"
            )
        present = {each.id for each in keys.brokers}
        known = {each.id for each in self.backup.brokers}
        unknown = set(self.lost) - known - {ALL}
        if unknown:
            raise RestoreRefusedError(
                f"--lost: the backup has no broker {named(sorted(unknown))}; it has"
                f" {named(sorted(known))}"
            )
        absent = known - present - (known if ALL in self.lost else set(self.lost))
        if absent:
            raise RestoreRefusedError(
                f"brokers of the backup are absent: {named(sorted(absent))}; start each over its"
                " spool directory, which may have acknowledged bytes that are in no store. If such"
                " a directory is lost, give --lost ZONE/ID"
            )

        ours = f"{keys.cluster_id:x}"
        served = await for_each(keys.brokers, self._cluster_of, CALLS_MAX)
        for member, cluster in zip(keys.brokers, served, strict=True):
            if not cluster:
                raise RestoreRefusedError(
                    f"broker {member.id} is announced, and does not answer at {member.endpoint}:"
                    " wait until it serves"
                )
            if cluster.startswith(_REFUSED):
                raise RestoreRefusedError(
                    f"broker {member.id} does not take the call ({cluster}): give the keys of the"
                    " brokers with --broker.auth-keys, or a token with --broker.auth-token"
                )
            if cluster != ours:
                raise RestoreRefusedError(
                    f"a broker of another Etcd cluster answers at {member.endpoint}: stop it, or"
                    " correct the address of Etcd"
                )

    async def _check_former(self, keys: Keys) -> None:
        """Refuse if a member of the old cluster answers."""
        endpoints = {each.endpoint for each in keys.brokers}
        former = [each for each in self.backup.brokers if each.endpoint not in endpoints]
        answers = await for_each(former, self._cluster_of, CALLS_MAX)
        for member, cluster in zip(former, answers, strict=True):
            if cluster:
                raise RestoreRefusedError(
                    f"broker {member.id} of the old cluster answers at {member.endpoint}: two"
                    " clusters over the same stores would give offsets twice; stop it"
                )
        for each in await for_each(self.backup.consumers, self._answers, CALLS_MAX):
            if each:
                raise RestoreRefusedError(
                    f"a process of {each.prefix} answers at {each.endpoint}: stop it until the"
                    " restore is done"
                )

    async def _cluster_of(self, member: SavedMember) -> str:
        """Return the id of the Etcd cluster of a broker; empty if no broker answers.

        A refusal of the call is an answer, too: of an unknown cluster.
        """
        try:
            async with (
                asyncio.timeout(ANSWER_TIMEOUT_S),
                self.open_transport(member.endpoint) as transport,
            ):
                selector = pb.LabelSelector(include=pb.LabelSet(labels=[_NO_JOURNAL]))
                listing = await list_journals(transport, selector)
        except (TimeoutError, OSError):
            return ""
        except CallError as error:
            return "" if error.code == "UNAVAILABLE" else f"{_REFUSED} {error}"
        return f"{listing.header.etcd.cluster_id:x}"

    async def _answers(self, member: SavedMember) -> SavedMember | None:
        """Return a process of an application if it answers."""
        client = ShardClient(
            member.endpoint,
            authorizer=self.authorizer,
            tls=self.tls,
            connect_timeout_s=ANSWER_TIMEOUT_S / 2,
        )
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S), aclosing(client):
                await client.list()
        except TimeoutError:
            return None
        except GazetteError as error:
            return None if getattr(error, "code", "UNAVAILABLE") == "UNAVAILABLE" else member
        return member

    def open_transport(self, endpoint: str) -> Transport:
        """Return a transport to a broker, which fails soon if it is not there."""
        return connect(
            endpoint,
            authorizer=self.authorizer,
            tls=self.tls,
            cache_size=0,
            connect_timeout_s=ANSWER_TIMEOUT_S / 2,
        )


def named(names: Iterable[str]) -> str:
    """Return the first of some names."""
    known = list(names)
    more = f" and {len(known) - NAMED_MAX} more" if len(known) > NAMED_MAX else ""
    return ", ".join(known[:NAMED_MAX]) + more

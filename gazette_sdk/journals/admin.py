"""Journals of a cluster: create, list, update and delete them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar, Unpack

from gazette_sdk.errors import (
    ConfigurationError,
    DeadlineExceededError,
    JournalNotFoundError,
    ValidationError,
    check_number,
)
from gazette_sdk.journals.changes import (
    Change,
    apply_in_transactions,
    create_journals,
    list_named,
    retried,
)
from gazette_sdk.journals.journal import Journal, JournalOptions, apply_options, check_options
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.base import Transport, check_transport
from gazette_sdk.transport.connect import connect
from gazette_sdk.transport.listing import list_journals
from gazette_sdk.transport.loop import on_loop, run

T = TypeVar("T")
Names: TypeAlias = list[str]
Listed: TypeAlias = list[Journal]

TIMEOUT_S = 30.0
"""Default limit of a call, which takes some tenths of a second."""


class Journals:
    """Journals of a cluster, for plain code and coroutines.

    Create the partitions of a topic, and publish to them::

        Journals().create("rides", partitions=3)
        with Publisher(mapping=mapping.random("topic=rides")) as publisher:
            publisher.publish({"minutes": 12})

    Each method has an asynchronous form: ``acreate``, ``alist``, ``aupdate`` and ``adelete``.

    Args:
        transport: how to reach the cluster; by default each call connects to ``GAZETTE_ADDRESS``.
        timeout_s: limit of a call, in seconds.

    Raises:
        ConfigurationError: ``transport`` is none, or ``timeout_s`` is no number.
    """

    def __init__(self, transport: Transport | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        check_transport(transport)
        check_number("timeout_s", timeout_s)
        self._transport = transport
        self._timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"Journals({self._transport or 'connect()'!s})"

    def create(
        self,
        name: str,
        *,
        partitions: int = 1,
        continues: bool = False,
        force: bool = False,
        **options: Unpack[JournalOptions],
    ) -> Names:
        """Create the partitions of a topic: ``rides/part-000``, ``rides/part-001`` and so on.

        Partitions that exist, and have the given values, stay as they are. With more partitions
        than exist it adds the missing ones, which take values that are not given from the first.
        It returns when brokers serve the new ones, or after 5 s.

        Defaults of a new topic: label ``topic`` with the name, content type JSON lines, gzip,
        fragments of 64 MiB that are stored after ten minutes at the latest, three replicas (with
        fewer than four brokers one less than there are, and at least one), and the store that the
        cluster's journals use. If there are no journals yet, it is ``file:///``, the directory of
        the brokers. A warning is logged where ``replication`` leaves no broker to spare.

        Args:
            name: name of the topic.
            partitions: number of partitions; 0 for one journal of exactly this name.
            continues: True if partitions continue after the fragments that earlier journals of
                their names have left in the store. Otherwise such fragments are an error.
            force: True to create journals with more replicas than there are brokers, which refuse
                appends until there are more.
            options: values of the journals, see :class:`JournalOptions`.

        Returns:
            The names of the partitions.

        Raises:
            JournalExistsError: a partition exists, and a given value differs; or the store has
                fragments of an earlier one, and a partition was created that refuses appends.
            ConfigurationError: there is no default store, or a value cannot be used.
            ValidationError: a name or a value breaks a rule.
            DeadlineExceededError: the call took longer than ``timeout_s``.
            GazetteError: a call to the broker failed.
        """
        return self._wait(
            self.acreate(name, partitions=partitions, continues=continues, force=force, **options)
        )

    async def acreate(
        self,
        name: str,
        *,
        partitions: int = 1,
        continues: bool = False,
        force: bool = False,
        **options: Unpack[JournalOptions],
    ) -> Names:
        """Create the partitions of a topic, see :meth:`create`."""

        async def work(transport: Transport) -> Names:
            made = await create_journals(
                transport, name, partitions, options, continues=continues, force=force
            )
            return [change.name for change in made]

        return await self._call(work)

    def list(self, selector: str | Iterable[str] = "") -> Listed:
        """Return the journals that match, in the order of their names.

        Args:
            selector: label selector (``"topic=rides"``), name of a journal, or several names;
                empty for all journals.

        Raises:
            JournalNotFoundError: one of several names does not exist.
            ValidationError: the selector is malformed.
            GazetteError: the call failed.
        """
        return self._wait(self.alist(selector))

    async def alist(self, selector: str | Iterable[str] = "") -> Listed:
        """Return the journals that match, see :meth:`list`."""
        wanted = _selection(selector)

        async def work(transport: Transport) -> Listed:
            return [Journal.of(each) for each in await _select(transport, wanted)]

        return await self._call(work)

    def update(self, selector: str | Iterable[str], **options: Unpack[JournalOptions]) -> Names:
        """Change the given values of journals; the others stay as they are.

        Labels that are given replace their former values; an empty list removes a label. A change
        by another process at the same time is not lost: the update reads the journal again.

        Args:
            selector: label selector, name of a journal, or several names.
            options: values to change, see :class:`JournalOptions`.

        Returns:
            The names of the journals that match.

        Raises:
            JournalNotFoundError: a named journal does not exist; no journal was changed.
            ValidationError: the selector or a value breaks a rule; no journal was changed.
            GazetteError: the call failed.
        """
        return self._wait(self.aupdate(selector, **options))

    async def aupdate(
        self, selector: str | Iterable[str], **options: Unpack[JournalOptions]
    ) -> Names:
        """Change the given values of journals, see :meth:`update`."""
        check_options(options)

        def update(listed: pb.ListResponse.Journal) -> Change:
            change = Change(upsert=listed.spec, expect_mod_revision=listed.mod_revision)
            apply_options(change.upsert, options)
            return change

        return await self._change(selector, update)

    def delete(self, selector: str | Iterable[str]) -> Names:
        """Delete journals. Fragments that are stored stay in their stores.

        A new journal of the same name has these fragments, and is created with ``continues=True``;
        `gazctl journals delete --with-fragments` removes them, too. Content that brokers have not
        stored yet is lost.

        Args:
            selector: label selector, name of a journal, or several names.

        Returns:
            The names of the deleted journals; empty if no journal matches the selector.

        Raises:
            JournalNotFoundError: a named journal does not exist; no journal was deleted.
            ConfigurationError: the selector is empty, and would match all journals.
            GazetteError: the call failed.
        """
        return self._wait(self.adelete(selector))

    async def adelete(self, selector: str | Iterable[str]) -> Names:
        """Delete journals, see :meth:`delete`."""

        def delete(listed: pb.ListResponse.Journal) -> Change:
            return Change(delete=listed.spec.name, expect_mod_revision=listed.mod_revision)

        return await self._change(selector, delete)

    async def _change(
        self,
        selector: str | Iterable[str],
        change: Callable[[pb.ListResponse.Journal], Change],
    ) -> Names:
        wanted = _selection(selector)
        if wanted == "":
            raise ConfigurationError(
                "an empty selector matches all journals; give a label selector or names"
            )

        async def work(transport: Transport) -> Names:
            found = await _select(transport, wanted, requires_name=True)
            changes = [change(each) for each in found]
            changed = [
                made
                for made, each in zip(changes, found, strict=True)
                if made.delete or made.upsert != each.spec
            ]
            await apply_in_transactions(transport, changed)
            return [each.spec.name for each in found]

        return await self._call(lambda transport: retried(lambda: work(transport)))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return run(work, loop=self._transport.loop if self._transport is not None else None)

    async def _call(self, work: Callable[[Transport], Awaitable[T]]) -> T:
        """Do work with a transport, on its event loop, within the limit."""

        async def bounded() -> T:
            async with asyncio.timeout(self._timeout_s):
                if self._transport is not None:
                    return await work(self._transport)
                async with connect() as transport:
                    return await work(transport)

        loop = self._transport.loop if self._transport is not None else None
        try:
            return await (on_loop(loop, bounded()) if loop is not None else bounded())
        except TimeoutError:
            raise DeadlineExceededError(
                f"the call did not end within {self._timeout_s:g} s; check the address of the "
                "broker (GAZETTE_ADDRESS, or transport=) and its log, or raise timeout_s="
            ) from None


def _selection(selector: str | Iterable[str]) -> str | Sequence[str]:
    """Return a selector, or the sorted names of journals.

    Raises:
        ValidationError: it is neither.
    """
    if isinstance(selector, str):
        return selector
    names = list(selector) if isinstance(selector, Iterable) else [selector]
    for name in names:
        if not isinstance(name, str):
            raise ValidationError(
                f"{name!r} is no journal: give a label selector, such as 'topic=rides', a name, or"
                " several names"
            )
    return sorted(set(names))


async def _select(
    transport: Transport, wanted: str | Sequence[str], *, requires_name: bool = False
) -> Sequence[pb.ListResponse.Journal]:
    """Return the journals that a selector, a name or several names select.

    A bare word may be a name, or the selector of a label's existence. It is a name if such a
    journal exists.

    Args:
        transport: how to reach the cluster.
        wanted: selector, name or names.
        requires_name: True if a bare word with a slash must match.

    Raises:
        JournalNotFoundError: a name does not exist.
    """
    if isinstance(wanted, str):
        is_word = bool(wanted) and not any(operator in wanted for operator in "=!, ()")
        if is_word and (named := await list_named(transport, [wanted])):
            return list(named.values())
        matching = (await list_journals(transport, wanted)).journals
        if is_word and "/" in wanted and requires_name and not matching:
            raise JournalNotFoundError(journal=wanted)
        return matching
    found = await list_named(transport, wanted)
    for name in wanted:
        if name not in found:
            raise JournalNotFoundError(journal=name)
    return [found[name] for name in wanted]

"""From messages to the outboxes of their journals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gazette_sdk.errors import MappingError
from gazette_sdk.message.mapping import Direct, Mapping, Partitions, SelectorMapping
from gazette_sdk.message.publishing.bulk import Routed
from gazette_sdk.message.publishing.outbox import Outbox
from gazette_sdk.message.publishing.rows import known_keys
from gazette_sdk.message.publishing.sender import Sender
from gazette_sdk.protocol.names import validate_journal
from gazette_sdk.transport.loop import run

__all__ = ["Routes"]


class Routes:
    """Asks mappings, and finds or opens the outboxes of the journals they name.

    Plain code waits for what is not listed yet. On the publisher's loop nothing can wait: there the
    methods return None, and :meth:`know` is awaited before they are asked again.

    Args:
        sender: has the outboxes.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._outboxes = sender.outboxes
        self._listed: dict[str, Partitions] = {}  # the connection's, once there is one

    def of(self, message: Any, mapping: Mapping | SelectorMapping) -> Outbox | None:
        """The outbox of a message's journal; None if that must be awaited.

        Raises:
            MappingError: the message maps to no journal.
            FramingError: the journal's content type has no framing.
        """
        if isinstance(mapping, SelectorMapping):
            partitions = self._listed.get(mapping.selector) or self._partitions(mapping)
            if partitions is None:
                return None
            journal = mapping.pick(message, partitions)
            return self._outboxes.get(journal) or self._open_listed(journal, partitions)
        journal = mapping(message)
        if type(journal) is not str or journal not in self._outboxes:
            return self._open_named(_named(journal, mapping))
        return self._outboxes[journal]

    def of_many(self, messages: Sequence[Any], mapping: Mapping | SelectorMapping) -> Routed | None:
        """The outboxes of messages, at least one; None if that must be awaited.

        Raises:
            MappingError: a message maps to no journal.
            FramingError: a journal's content type has no framing.
        """
        if isinstance(mapping, SelectorMapping):
            return self._of_many_listed(messages, mapping)
        if isinstance(mapping, Direct):
            outbox = self.of_journal(mapping.journal)
            return None if outbox is None else Routed([outbox])
        names = list(map(mapping, messages))
        if set(map(type, names)) != {str}:
            names = [_named(name, mapping) for name in names]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        outboxes = []
        for name in numbers:
            opened = self.of_journal(_named(name, mapping))
            if opened is None:
                return None
            outboxes.append(opened)
        if len(outboxes) == 1:
            return Routed(outboxes)
        return Routed(outboxes, np.array(list(map(numbers.__getitem__, names)), dtype=np.intp))

    def of_journal(self, journal: str) -> Outbox | None:
        """The outbox of a journal by its name; None if that must be awaited.

        Raises:
            MappingError: there is no such journal.
            FramingError: its content type has no framing.
        """
        return self._outboxes.get(journal) or self._open_named(journal)

    async def know(
        self, messages: Iterable[Any], mapping: Mapping | SelectorMapping | None
    ) -> None:
        """Learn all that :meth:`of` and :meth:`of_many` must know of these messages' journals.

        Args:
            messages: the messages, or, without a mapping, names of journals.
            mapping: which journal a message goes to.

        Raises:
            MappingError: no listing came in time, or there is no such journal.
            FramingError: a journal's content type has no framing.
        """
        watches = self._sender.connection().watches
        if isinstance(mapping, SelectorMapping):
            await watches.partitions(mapping)
            return
        for message in messages:
            journal = message if mapping is None else _named(mapping(message), mapping)
            if journal not in self._outboxes:
                self._sender.open(journal, await watches.content_type(journal))

    # ---------------------------------------------------------------- pieces

    def _partitions(self, mapping: SelectorMapping) -> Partitions | None:
        watches = self._sender.connection().watches
        self._listed = watches.current
        partitions = watches.current.get(mapping.selector)
        if partitions is None and not self._sender.is_on_loop:
            partitions = run(watches.partitions(mapping), loop=self._sender.connection().loop)
        return partitions

    def _of_many_listed(self, messages: Sequence[Any], mapping: SelectorMapping) -> Routed | None:
        partitions = self._partitions(mapping)
        if partitions is None:
            return None
        keys = None if mapping.key is None else known_keys(messages, mapping.key)
        picked = mapping.pick_many(messages, partitions, keys)
        indexes: npt.NDArray[Any] = (
            np.frombuffer(picked, dtype=np.uint8)
            if isinstance(picked, bytes)
            else np.array(picked, dtype=np.intp)
        )
        used = np.flatnonzero(np.bincount(indexes)).tolist()
        outboxes = [
            self._outboxes.get(journal) or self._open_listed(journal, partitions)
            for journal in map(partitions.names.__getitem__, used)
        ]
        if len(outboxes) == 1:
            return Routed(outboxes)
        if used[-1] >= len(used):
            indexes = np.searchsorted(np.array(used), indexes)
        return Routed(outboxes, indexes)

    def _open_listed(self, journal: str, partitions: Partitions) -> Outbox:
        return self._sender.open(journal, partitions.content_types[journal])

    def _open_named(self, journal: str) -> Outbox | None:
        if self._sender.is_on_loop:
            return None
        connection = self._sender.connection()
        content_type = run(connection.watches.content_type(journal), loop=connection.loop)
        return self._sender.open(journal, content_type)


def _named(journal: object, mapping: object) -> str:
    if not isinstance(journal, str):
        raise MappingError(
            f"the mapping {mapping!r} returned {journal!r}: a mapping returns a journal's name"
        )
    validate_journal(journal)
    return journal

"""Mappings of messages to journals (message section 9).

A mapping is any callable from a message to the name of a journal. The mappings of this module
choose among the journals that match a label selector, which a publisher watches: new partitions are
used as soon as they are listed. Keys are hashed as in other implementations, so that all write a
key to the same partition::

    by_key = mapping.modulo("topic=orders", key=attrgetter("customer"))

A key is a str (its UTF-8 bytes), bytes (as they are), or an int (its decimal text).

:class:`Watches` follows the journals among which mappings choose. It belongs to the publisher's
event loop, but for :attr:`Watches.current`, which any thread may look at.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    GazetteError,
    JournalNotFoundError,
    MappingError,
    UnauthenticatedError,
    UnavailableError,
    ValidationError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import CONTENT_TYPE, parse_selector, topic_hint, value_of
from gazette_sdk.protocol.names import validate_journal
from gazette_sdk.retries import Outage, retrying
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.listing import NO_ANSWER, WatchedList, get_journal
from gazette_sdk.user_code import call, call_each, text_of

Key: TypeAlias = str | bytes | int
"""Key of a message."""

_Hashes: TypeAlias = npt.NDArray[np.uint32]

_KEYS_KNOWN_MAX = 1 << 16
"""Limit of the keys whose journals are cached, beside those of the current batch."""

_BYTE_VALUES = 256

_PLAIN_KEYS = frozenset({str, bytes, int})
"""Classes of keys that are equal only if their bytes are."""


# --------------------------------------------------------------------- hash


def fnv1a32(content: bytes) -> int:
    """Return the 32-bit FNV-1a hash of ``content``."""
    state = 2166136261
    for byte in content:
        state = (state ^ byte) * 16777619 & 0xFFFF_FFFF
    return state


def fnv1a32_many(contents: Sequence[bytes]) -> _Hashes:
    """Return the hash of each of ``contents``, by one step for each byte position."""
    lengths = np.fromiter(map(len, contents), dtype=np.int64, count=len(contents))
    order = np.argsort(-lengths, kind="stable")
    ascending = lengths[order][::-1]
    begins = np.concatenate(([0], np.cumsum(lengths)[:-1]))[order] if len(order) else order
    joined = np.frombuffer(b"".join(contents), dtype=np.uint8)
    states = np.full(len(contents), 2166136261, dtype=np.uint32)
    for position in range(int(lengths.max(initial=0))):
        # The longest are first: count those that have a byte at this position.
        count = len(ascending) - int(np.searchsorted(ascending, position, side="right"))
        states[:count] ^= joined[begins[:count] + position]
        states[:count] *= np.uint32(16777619)
    hashes = np.empty_like(states)
    hashes[order] = states
    return hashes


def key_bytes(key: Key) -> bytes:
    """Return the bytes of a key that are hashed.

    Raises:
        MappingError: the key is of another type, or a text that UTF-8 cannot hold.
    """
    if isinstance(key, str):
        try:
            return key.encode()
        except UnicodeEncodeError as error:
            raise MappingError(
                f"a mapping key {key!r} has no bytes: {error}; let the key function return text"
                " without lone surrogates, or bytes"
            ) from error
    if isinstance(key, bytes | bytearray | memoryview):
        return bytes(key)
    if isinstance(key, int) and not isinstance(key, bool):
        return str(key).encode()
    raise MappingError(
        f"a mapping key of type {type(key).__name__} has no agreed bytes; let the key function"
        " return str, bytes or int"
    )


# --------------------------------------------------------------- partitions


class Partitions:
    """Journals that match a selector, as of one listing.

    Args:
        specs: their specs, in any order.

    Attributes:
        names: their names, in ascending byte order: mappings depend on it.
        content_types: each one's ``content-type`` label, ``""`` where it has none.
    """

    def __init__(self, specs: Iterable[pb.JournalSpec]) -> None:
        found = sorted(specs, key=lambda spec: spec.name.encode())
        self.names = tuple(spec.name for spec in found)
        self.content_types = {spec.name: value_of(spec.labels, CONTENT_TYPE) for spec in found}

    @functools.cached_property
    def hashes(self) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        """Return the hashes of the names."""
        return np.array([fnv1a32(name.encode()) for name in self.names], dtype=np.uint32)


# ----------------------------------------------------------------- mappings


class SelectorMapping:
    """Mapping over the journals that match a label selector.

    A publisher watches the selector and asks :meth:`pick`. To use one on its own, list the
    journals first: ``by_key.pick(message, Partitions(specs))``.

    Args:
        selector: label selector, as ``"topic=orders"``.
        choose: returns the index of a message's journal among the journals, at least one.

    Attributes:
        selector: its text.
        label_selector: the parsed selector.
        key: the function from a message to its key; None where messages have no keys.
        is_by_names: True if the choice depends on the names of journals, and not on their number.

    Raises:
        ValidationError: the selector is malformed.
    """

    __slots__ = ("_choose", "is_by_names", "key", "label_selector", "selector")

    def __init__(self, selector: str, choose: Callable[[Any, Partitions], int]) -> None:
        self.selector = selector
        self.label_selector = parse_selector(selector)
        self.key: Callable[[Any], Key] | None = None
        self.is_by_names = False
        self._choose = choose

    def pick(self, message: Any, partitions: Partitions) -> str:
        """Return the journal of ``message``.

        Raises:
            MappingError: no journal matches the selector.
            UserCodeError: a function of the mapping raised StopIteration or alike.
        """
        return self._names(partitions)[call(self._choose, message, partitions)]

    def pick_many(
        self, messages: Sequence[Any], partitions: Partitions, keys: list[Any] | None = None
    ) -> Sequence[int]:
        """Return the index of each message's journal in ``partitions.names``.

        Args:
            messages: the messages.
            partitions: the journals.
            keys: the messages' keys, where they are known.

        Raises:
            MappingError: no journal matches the selector, or a key has a wrong type.
            UserCodeError: a function of the mapping raised StopIteration or alike.
        """
        del keys  # used only by mappings with keys
        self._names(partitions)
        return call_each(lambda message: self._choose(message, partitions), messages)

    def _names(self, partitions: Partitions) -> tuple[str, ...]:
        if not partitions.names:
            raise MappingError(
                f"no journal matches the selector {self.selector!r} (empty ListResponse); create"
                " one with `Journals().create`, `gazctl journals create` or `gazctl journals"
                f" apply`, or check its labels{topic_hint(self.selector)}"
            )
        return partitions.names


class _KeyedMapping(SelectorMapping):
    """Mapping by the hash of a key.

    Args:
        selector: label selector of the journals.
        key: returns the key of a message.
        choose: returns an index for a hash and the journals.
        choose_many: returns indices for an array of hashes and the journals.

    Raises:
        ConfigurationError: the key is no function.
        ValidationError: the selector is malformed.
    """

    __slots__ = ("_choose_by_hash", "_choose_by_hashes", "_key", "_known")

    def __init__(
        self,
        selector: str,
        key: Callable[[Any], Key],
        choose: Callable[[int, Partitions], int],
        choose_many: Callable[[_Hashes, Partitions], npt.NDArray[Any]],
    ) -> None:
        _check_key(key)
        super().__init__(
            selector,
            lambda message, partitions: choose(fnv1a32(key_bytes(call(key, message))), partitions),
        )
        self.key = self._key = key
        self._choose_by_hash = choose
        self._choose_by_hashes = choose_many
        self._known: tuple[Partitions | None, dict[Any, int]] = (None, {})

    def pick(self, message: Any, partitions: Partitions) -> str:
        """See :meth:`SelectorMapping.pick`. Each distinct key is hashed once."""
        key = call(self._key, message)
        listed, known = self._known
        if type(key) not in _PLAIN_KEYS:
            return self._names(partitions)[
                self._choose_by_hash(fnv1a32(key_bytes(key)), partitions)
            ]
        index = known.get(key) if listed is partitions else None
        if index is None:
            self._names(partitions)
            index = self._add_keys([key], partitions, known if listed is partitions else {})[key]
        return partitions.names[index]

    def pick_many(
        self, messages: Sequence[Any], partitions: Partitions, keys: list[Any] | None = None
    ) -> Sequence[int]:
        """See :meth:`SelectorMapping.pick_many`. Each distinct key is hashed once."""
        self._names(partitions)
        assert self.key is not None
        found = call_each(self.key, messages) if keys is None else keys
        if not _PLAIN_KEYS.issuperset(map(type, found)):  # others may be equal with other bytes
            return [self._choose_by_hash(fnv1a32(key_bytes(key)), partitions) for key in found]
        listed, known = self._known
        if listed is not partitions:
            known = {}
        # Indices in bytes are grouped without conversion.
        made: Callable[[Iterable[int]], Sequence[int]]
        made = bytes if len(partitions.names) <= _BYTE_VALUES else list
        try:
            return made(map(known.__getitem__, found))
        except KeyError:
            return made(map(self._add_keys(found, partitions, known).__getitem__, found))

    def _add_keys(
        self, keys: list[Any], partitions: Partitions, known: dict[Any, int]
    ) -> dict[Any, int]:
        """Return the cached indices with those of ``keys``; empty the cache first if it is full."""
        fresh = set(keys).difference(known)
        if len(known) + len(fresh) > _KEYS_KNOWN_MAX:
            known, fresh = {}, set(keys)
        if len(fresh) == 1:
            [key] = fresh
            known[key] = self._choose_by_hash(fnv1a32(key_bytes(key)), partitions)
        else:
            added = list(fresh)
            hashes = fnv1a32_many([key_bytes(key) for key in added])
            indexes = self._choose_by_hashes(hashes, partitions).tolist()
            known.update(zip(added, indexes, strict=True))
        self._known = (partitions, known)
        return known


def _check_key(key: object) -> None:
    """Refuse a key that is no function, such as the name of a field.

    Raises:
        ConfigurationError: it is none.
    """
    if not callable(key):
        raise ConfigurationError(
            f"key={key!r} is no function of a message; use key=attrgetter({key!r}), or"
            f" key=itemgetter({key!r}) where messages are dicts (from operator)"
        )


def check_mapping(mapping: object) -> None:
    """Refuse what is no mapping, such as the name of a journal.

    Raises:
        ConfigurationError: it is none.
    """
    if not callable(mapping) and not isinstance(mapping, SelectorMapping):
        raise ConfigurationError(
            f"mapping={mapping!r} is no mapping; for one journal use mapping.direct(NAME), for the"
            " journals of a selector mapping.random(SELECTOR) or mapping.modulo(SELECTOR, key=…)"
        )


def checked_journal(journal: object, mapping: object) -> str:
    """Return the name that a mapping returned.

    Raises:
        MappingError: it is no name.
    """
    if not isinstance(journal, str):
        raise MappingError(
            f"the mapping {text_of(mapping)} returned {text_of(journal, repr)}: a mapping returns a"
            " journal's name"
        )
    validate_journal(journal)
    return journal


Mapping: TypeAlias = Callable[[Any], str] | SelectorMapping
"""Mapping of messages to journals: a function that returns a name, or one over a selector."""


class Direct:
    """Mapping of every message to one journal.

    Raises:
        ValidationError: ``journal`` is no valid name.
    """

    def __init__(self, journal: str) -> None:
        if not isinstance(journal, str):
            raise ValidationError(
                f"a journal's name is a text, such as 'orders/part-000', and not {journal!r}",
                kind="type",
                path="journal",
            )
        validate_journal(journal)
        self.journal = journal

    def __call__(self, message: Any) -> str:
        """Return the journal."""
        del message
        return self.journal


def modulo(selector: str, *, key: Callable[[Any], Key]) -> SelectorMapping:
    """Map by the hash of the key modulo the number of journals. Adding journals moves most keys.

    Args:
        selector: label selector of the journals.
        key: returns the key of a message.
    """

    def choose(hashed: int, partitions: Partitions) -> int:
        return hashed % len(partitions.names)

    def choose_many(hashes: _Hashes, partitions: Partitions) -> npt.NDArray[Any]:
        return hashes % np.uint32(len(partitions.names))

    return _KeyedMapping(selector, key, choose, choose_many)


def rendezvous(selector: str, *, key: Callable[[Any], Key]) -> SelectorMapping:
    """Map by rendezvous hashing of key and journal names. Adding one of N moves 1/N of the keys.

    Args:
        selector: label selector of the journals.
        key: returns the key of a message.
    """

    def choose(hashed: int, partitions: Partitions) -> int:
        # The first of equal maxima, so that ties go to the lowest index.
        return int((partitions.hashes ^ np.uint32(hashed)).argmax())

    def choose_many(hashes: _Hashes, partitions: Partitions) -> npt.NDArray[Any]:
        indexes: npt.NDArray[np.intp] = (hashes[:, None] ^ partitions.hashes).argmax(axis=1)
        return indexes

    made = _KeyedMapping(selector, key, choose, choose_many)
    made.is_by_names = True
    return made


def random(selector: str, *, source: Random | None = None) -> SelectorMapping:
    """Map to a random journal, all with equal probability.

    Args:
        selector: label selector of the journals.
        source: source of randomness; a new one by default.
    """
    drawn_from = source or Random()  # noqa: S311 - spreads load, guards nothing
    return SelectorMapping(
        selector, lambda _, partitions: drawn_from.randrange(len(partitions.names))
    )


def direct(journal: str) -> Direct:
    """Map every message to one journal.

    Args:
        journal: its name.
    """
    return Direct(journal)


_FINAL = (ClosedError, ConfigurationError)
"""After these a watch has ended: the transport will not carry any call any more."""

_HOPELESS = (UnauthenticatedError, UnavailableError, ValidationError, *_FINAL)
"""Failures of a first listing that are raised at once: waiting does not mend them, or the transport
has waited already. The next call looks again."""

ATTEMPT_S = 5.0
"""Bound of one look-up of a journal, where they are repeated without end."""

_log = logging.getLogger(__name__)


class Watches:
    """Watched listings of one publisher, one for each selector.

    Args:
        transport: how to reach the cluster.
        timeout_s: bound of a wait for a first listing; None to wait without end, also while no
            broker can be reached.

    Attributes:
        current: the last listing for each selector's text; none before the first came.
    """

    def __init__(self, transport: Transport, timeout_s: float | None) -> None:
        self.current: dict[str, Partitions] = {}
        self._transport = transport
        self._timeout_s = timeout_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._errors: dict[str, GazetteError] = {}
        self._is_ended = False

    async def partitions(self, mapping: SelectorMapping) -> Partitions:
        """The mapping's journals; waits for the first listing.

        Raises:
            MappingError: no listing came in time; says why.
            UnavailableError: no broker can be reached, and the wait has a bound.
            ClosedError: :meth:`end` was called.
            GazetteError: the listing was refused.
        """
        selector = mapping.selector
        if selector not in self._tasks and not self._is_ended:
            task = asyncio.create_task(self._follow(mapping), name=f"partitions of {selector}")
            self._tasks[selector] = task
        elif isinstance(self._errors.get(selector), UnavailableError):
            del self._errors[selector]
        try:
            async with asyncio.timeout(self._timeout_s):
                while selector not in self.current:
                    self._check_open()
                    error = self._errors.get(selector)
                    if isinstance(error, _HOPELESS) and not self._outlasts(error):
                        raise error
                    await self._changed.wait()
        except TimeoutError:
            error = self._errors.get(selector)
            raise MappingError(
                f"the journals of selector {selector!r} could not be listed within "
                f"{self._timeout_s:g} s: {error or self._no_answer()}; check the address of the"
                " broker (GAZETTE_ADDRESS, or transport=)"
            ) from error
        return self.current[selector]

    async def content_type(self, journal: str) -> str:
        """The content type of a journal, by its name.

        Raises:
            MappingError: there is no such journal, or no answer in time.
            UnavailableError: no broker can be reached, and the wait has a bound.
            ClosedError: :meth:`end` was called.
        """
        try:
            found = await (
                self._look_up_patiently(journal)
                if self._timeout_s is None
                else self._look_up(journal, self._timeout_s)
            )
        except JournalNotFoundError as error:
            raise MappingError(
                f"the mapping returned the journal {journal!r}, which does not exist; create it"
                " with `Journals().create`, `gazctl journals create` or `gazctl journals apply`, or"
                " correct the mapping",
                journal=journal,
            ) from error
        except TimeoutError:
            raise MappingError(
                f"the journal {journal!r} could not be looked up within {self._timeout_s:g} s: "
                f"{self._no_answer()}; check the address of the broker (GAZETTE_ADDRESS, or "
                "transport=)",
                journal=journal,
            ) from None
        return value_of(found.spec.labels, CONTENT_TYPE)

    async def _look_up(self, journal: str, timeout_s: float) -> pb.ListResponse.Journal:
        async with asyncio.timeout(timeout_s):
            return await get_journal(self._transport, journal)

    async def _look_up_patiently(self, journal: str) -> pb.ListResponse.Journal:
        """Look a journal up, again and again while no broker answers."""

        async def look_up() -> pb.ListResponse.Journal:
            self._check_open()
            return await self._look_up(journal, ATTEMPT_S)

        outage = Outage(_log, f"look-up of {journal}")
        return await retrying(look_up, (*NO_ANSWER, TimeoutError), outage=outage)

    def _outlasts(self, error: GazetteError) -> bool:
        """Return True if the wait continues after a failure of the watch, which tries again."""
        return self._timeout_s is None and isinstance(error, UnavailableError)

    def _check_open(self) -> None:
        if self._is_ended:
            raise ClosedError(
                "the publisher is closed while it waits for a listing of journals; use another one"
            )

    def _no_answer(self) -> str:
        address = getattr(self._transport, "address", None)
        return f"no answer of {address}" if address else "no answer"

    def end(self) -> None:
        """End all waits with an error."""
        self._is_ended = True
        self._changed.set()

    async def aclose(self) -> None:
        """Stop watching."""
        self.end()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _follow(self, mapping: SelectorMapping) -> None:
        selector = mapping.selector
        async with WatchedList(self._transport, mapping.label_selector) as watched:
            while True:
                try:
                    await watched.changed()
                except GazetteError as error:
                    self._errors[selector] = error
                    if isinstance(error, _FINAL):
                        self.current.pop(selector, None)
                        self._changed.set()
                        return
                else:
                    assert watched.snapshot is not None
                    self._errors.pop(selector, None)
                    specs = [journal.spec for journal in watched.snapshot.journals]
                    self.current[selector] = Partitions(specs)
                self._changed.set()
                self._changed = asyncio.Event()

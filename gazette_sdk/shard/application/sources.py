"""Sources of an application: the journals that its shards read, and which of them one shard reads.

Sources are a label selector, names of journals, or :func:`partitions` of several topics. Of a
selector and of names each journal has a shard of its own. Of partitions the journals of each topic
are numbered in the order of their names, as mappings by a key's hash number them
(:func:`~gazette_sdk.message.mapping.modulo`); those of one number have one shard. So a key's
messages of all topics are in one shard, if the topics have equally many journals.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from gazette_sdk.errors import ConfigurationError, ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.journal_spec import may_read
from gazette_sdk.protocol.labels import (
    CONTENT_TYPE,
    NAME,
    RECOVERY_LOG,
    label_set,
    matches_journal,
    parse_selector,
    value_of,
)
from gazette_sdk.protocol.names import strip_meta, validate_journal

SHOWN_MAX = 3
"""Journals that an error names."""


class JoinedTopics:
    """Topics of which one shard reads the partitions of one number.

    Attributes:
        topics: their label selectors, as they were written.
        selectors: the same, parsed.

    Raises:
        ConfigurationError: these are not several different selectors.
        ValidationError: a selector is malformed.
    """

    __slots__ = ("selectors", "topics")

    def __init__(self, topics: Sequence[str]) -> None:
        self.topics = tuple(topics)
        for topic in self.topics:
            if not isinstance(topic, str) or not _is_selector(topic):
                raise ConfigurationError(
                    f"shard.partitions takes label selectors, as 'topic=rides', and not {topic!r}"
                )
        if len(self.topics) < 2 or len(set(self.topics)) < len(self.topics):
            raise ConfigurationError(
                f"shard.partitions takes several different topics, and not {self.topics!r}; one"
                " selector alone is sources='topic=rides'"
            )
        self.selectors = tuple(map(parse_selector, self.topics))

    def __repr__(self) -> str:
        return f"partitions({', '.join(map(repr, self.topics))})"


Sources: TypeAlias = str | Sequence[str] | JoinedTopics
"""Label selector of source journals, names of journals, or partitions of topics."""


def partitions(*topics: str) -> JoinedTopics:
    """Return sources of which one shard reads the partitions of one number: a join.

    ::

        @shard.handler(
            message={"topic=rides": Ride, "topic=drivers": Driver},
            sources=shard.partitions("topic=rides", "topic=drivers"),
            store=shard.RocksStore[str, str],
        )
        def join(txn: shard.Transaction, message: Ride | Driver) -> None: ...

    The topics need equally many journals, to which messages are mapped by the hash of the same key
    (``mapping.modulo``).

    Args:
        topics: label selectors.

    Raises:
        ConfigurationError: these are not several different selectors.
        ValidationError: a selector is malformed.
    """
    return JoinedTopics(topics)


def check_sources(application: str, sources: object) -> None:
    """Refuse declared sources that cannot be used.

    Args:
        application: name of the application, for the error.
        sources: what is declared.

    Raises:
        ConfigurationError: they cannot be used.
        ValidationError: a selector is malformed.
    """
    if sources is None or isinstance(sources, JoinedTopics):
        return
    if not isinstance(sources, str | Iterable):
        raise ConfigurationError(
            f"{application}: sources={sources!r}; use a selector as 'topic=orders', or names of"
            " journals"
        )
    if not sources:
        raise ConfigurationError(f"{application}: sources is empty; leave it out, or name journals")
    if isinstance(sources, str) and _is_selector(sources):
        parse_selector(sources)
        return
    for journal in (sources,) if isinstance(sources, str) else sources:
        try:
            validate_journal(journal, "sources")
        except ValidationError as error:
            raise ConfigurationError(
                f"{application}: {error}; use a selector as 'topic=orders', or names of journals"
            ) from error


def topics_of(sources: Sources | None) -> tuple[str, ...]:
    """Return the label selectors of sources, as they are written; none of names of journals."""
    if isinstance(sources, JoinedTopics):
        return sources.topics
    return (sources,) if isinstance(sources, str) and _is_selector(sources) else ()


def names_of(sources: Sources | None) -> tuple[str, ...]:
    """Return the names of journals that are declared as sources; none if labels select them."""
    if sources is None or topics_of(sources):
        return ()
    assert not isinstance(sources, JoinedTopics)
    return (sources,) if isinstance(sources, str) else tuple(sources)


def selectors_of(sources: Sources | None) -> tuple[pb.LabelSelector, ...]:
    """Return the selectors whose journals are listed: one for each topic, or one for all names."""
    if isinstance(sources, JoinedTopics):
        return sources.selectors
    if names := names_of(sources):
        labels = label_set((NAME, name) for name in sorted(set(names)))
        return (pb.LabelSelector(include=labels),)
    return tuple(map(parse_selector, topics_of(sources)))


def source_of(sources: Sources | None, journal: pb.JournalSpec) -> str:
    """Return the topic of a journal, as its selector is written; its name if it is declared by it.

    Raises:
        ConfigurationError: it is of none of several topics.
    """
    if not isinstance(sources, JoinedTopics):
        return next(iter(topics_of(sources)), strip_meta(journal.name))
    for topic, selector in zip(sources.topics, sources.selectors, strict=True):
        if matches_journal(selector, journal):
            return topic
    raise ConfigurationError(
        f"the journal {journal.name} is of none of {', '.join(sources.topics)}: restore its labels,"
        " or delete its shard"
    )


class Groups(NamedTuple):
    """Source journals, by shard.

    Attributes:
        groups: specs of the journals of each shard, in the order of the topics.
        fault: error because of which partitions have no shard; None if there is none.
    """

    groups: list[list[pb.JournalSpec]]
    fault: ConfigurationError | None = None


def group_journals(sources: Sources | None, listings: Sequence[Iterable[pb.JournalSpec]]) -> Groups:
    """Return which journals one shard reads.

    Args:
        sources: the declared sources.
        listings: specs of the journals of each selector. Recovery logs, and journals that cannot be
            read, are left out.
    """
    topics = [_partitions_of(listing) for listing in listings]
    if not isinstance(sources, JoinedTopics):
        return Groups([[journal] for topic in topics for journal in topic])
    if not all(topics):
        return Groups([])
    if fault := _fault_of(sources.topics, topics):
        return Groups([], ConfigurationError(fault))
    return Groups([list(group) for group in zip(*topics, strict=True)])


def _partitions_of(listing: Iterable[pb.JournalSpec]) -> list[pb.JournalSpec]:
    """Return the journals of a topic by their numbers."""
    found = [
        spec
        for spec in listing
        if may_read(spec) and value_of(spec.labels, CONTENT_TYPE) != RECOVERY_LOG
    ]
    return sorted(found, key=lambda spec: spec.name.encode())


def _fault_of(names: Sequence[str], topics: Sequence[Sequence[pb.JournalSpec]]) -> str:
    """Return why the journals of topics cannot be joined by their numbers; empty if they can."""
    counts = [len(topic) for topic in topics]
    if len(set(counts)) > 1:
        most = max(counts)
        missing = [name for name, count in zip(names, counts, strict=True) if count < most]
        of_counts = ", ".join(
            f"{name} has {count} partition{'s' * (count != 1)}"
            for name, count in zip(names, counts, strict=True)
        )
        return (
            f"topics that are joined need equally many partitions: {of_counts}. Those of one number"
            f" are read together, and no further ones are read until {' and '.join(missing)}"
            f" {'has' if len(missing) == 1 else 'have'} {most}: add them, as with `gazctl journals"
            f" create NAME --partitions {most}`"
        )
    seen: dict[str, str] = {}
    for name, topic in zip(names, topics, strict=True):
        for spec in topic:
            if spec.name in seen:
                return (
                    f"the journal {spec.name} is of {seen[spec.name]} and of {name}: topics that"
                    " are joined have no journals in common; use narrower selectors"
                )
            seen[spec.name] = name
    return ""


def shown(journals: Sequence[str]) -> str:
    """Return names of journals for an error: a few of them, and how many more there are."""
    more = len(journals) - SHOWN_MAX
    return ", ".join(journals[:SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")


_SELECTOR_CHARACTERS = frozenset("=!,() ")


def _is_selector(text: str) -> bool:
    return not _SELECTOR_CHARACTERS.isdisjoint(text)

"""Sources of an application: the journals that its shards read, and which of them one shard reads.

Sources are a label selector, names of journals, or :func:`partitions` of several topics. Of a
selector and of names each journal has a shard of its own. Of partitions the journals of each topic
are numbered in the order of their names, as mappings by a key's hash number them
(:func:`~gazette_sdk.message.mapping.modulo`); those of one number have one shard. So a key's
messages of all topics are in one shard, if the topics have equally many journals. Beside them each
shard may read all journals of small topics (:func:`broadcast`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from gazette_sdk.errors import ConfigurationError, ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.journal_spec import may_read
from gazette_sdk.protocol.labels import (
    CONTENT_TYPE,
    NAME,
    RECOVERY_LOG,
    format_selector,
    label_set,
    matches_journal,
    parse_selector,
    value_of,
)
from gazette_sdk.protocol.names import strip_meta, validate_journal

SHOWN_MAX = 3
"""Journals that an error names."""


class Broadcast:
    """Topic of which every shard reads all partitions.

    Attributes:
        topic: its label selector, as it was written.

    Raises:
        ConfigurationError: it is no selector.
    """

    __slots__ = ("topic",)

    def __init__(self, topic: str) -> None:
        if not isinstance(topic, str) or not _is_selector(topic):
            raise ConfigurationError(
                f"shard.broadcast takes a label selector, as 'topic=rates', and not {topic!r}"
            )
        self.topic = topic

    def __repr__(self) -> str:
        return f"broadcast({self.topic!r})"


class JoinedTopics:
    """Topics of which one shard reads the partitions of one number, or all partitions.

    Attributes:
        declared: the topics as they were declared.
        topics: their label selectors, as they were written.
        selectors: the same, parsed.
        broadcast: those of which every shard reads all partitions.
        partitioned: the others.

    Raises:
        ConfigurationError: these are not several different selectors, or all are broadcast.
        ValidationError: a selector is malformed.
    """

    __slots__ = ("broadcast", "declared", "partitioned", "selectors", "topics")

    def __init__(self, topics: Sequence[str | Broadcast]) -> None:
        self.declared = tuple(topics)
        whole = [each.topic for each in topics if isinstance(each, Broadcast)]
        self.topics = tuple(each.topic if isinstance(each, Broadcast) else each for each in topics)
        for topic in self.topics:
            if not isinstance(topic, str) or not _is_selector(topic):
                raise ConfigurationError(
                    f"shard.partitions takes label selectors, as 'topic=rides', and not {topic!r}"
                )
        if len(whole) == len(self.topics) > 0:
            raise _broadcast_alone(whole[0])
        self.selectors = tuple(map(parse_selector, self.topics))
        if not 2 <= len(self.topics) == len(set(map(format_selector, self.selectors))):
            raise ConfigurationError(
                f"shard.partitions takes several different topics, and not {self.declared!r}; one"
                " selector alone is sources='topic=rides'"
            )
        self.broadcast = tuple(whole)
        self.partitioned = tuple(each for each in self.topics if each not in whole)

    def __repr__(self) -> str:
        return f"partitions({', '.join(map(repr, self.declared))})"


def _broadcast_alone(topic: str) -> ConfigurationError:
    return ConfigurationError(
        f"broadcast({topic!r}) is read beside partitions, each of which has a shard: use"
        f" sources=shard.partitions('topic=rides', shard.broadcast({topic!r}));"
        f" sources={topic!r} has one shard for each of its partitions"
    )


Sources: TypeAlias = str | Sequence[str] | JoinedTopics
"""Label selector of source journals, names of journals, or partitions of topics."""


def broadcast(topic: str) -> Broadcast:
    """Return a topic of which every shard reads all partitions, beside partitions of its own.

    ::

        sources=shard.partitions("topic=rides", shard.broadcast("topic=rates"))
        rates = shard.table(shard.broadcast("topic=rates"), key=attrgetter("name"), message=Rate)

    Each shard consumes, or keeps as a table, all of its messages: it is for small topics. It may
    have any number of partitions. Those that are added later are read from their begin.

    Args:
        topic: label selector of its journals.

    Raises:
        ConfigurationError: it is no selector.
    """
    return Broadcast(topic)


def partitions(*topics: str | Broadcast) -> JoinedTopics:
    """Return sources of which one shard reads the partitions of one number: a join.

    ::

        @shard.handler(
            message={"topic=rides": Ride, "topic=drivers": Driver},
            sources=shard.partitions("topic=rides", "topic=drivers"),
            store=shard.RocksStore[str, str],
        )
        def join(txn: shard.Transaction, message: Ride | Driver) -> None: ...

    The topics need equally many journals, to which messages are mapped by the hash of the same key
    (``mapping.modulo``), but for those in ``shard.broadcast``.

    Args:
        topics: label selectors.

    Raises:
        ConfigurationError: these are not several different selectors, or all are broadcast.
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
    if isinstance(sources, Broadcast):
        raise _broadcast_alone(sources.topic)
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


def declared_of(sources: Sources | None) -> tuple[str | Broadcast, ...]:
    """Return the topics of sources as they were declared; none of names of journals."""
    return sources.declared if isinstance(sources, JoinedTopics) else topics_of(sources)


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
        whole: specs of the journals that every shard reads, by topic.
    """

    groups: list[list[pb.JournalSpec]]
    fault: ConfigurationError | None = None
    whole: Mapping[str, list[pb.JournalSpec]] = {}


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
    found = dict(zip(sources.topics, topics, strict=True))
    whole = {topic: found[topic] for topic in sources.broadcast}
    if missing := [topic for topic, journals in whole.items() if not journals]:
        return Groups([], _without_partitions(missing[0]), whole)
    joined = [found[topic] for topic in sources.partitioned]
    if not all(joined):
        return Groups([], None, whole)
    if fault := _different_counts(sources.partitioned, joined) or _in_common(found):
        return Groups([], ConfigurationError(fault), whole)
    return Groups([list(group) for group in zip(*joined, strict=True)], None, whole)


def _without_partitions(topic: str) -> ConfigurationError:
    return ConfigurationError(
        f"{topic}, which every shard reads, has no partitions, and no shard is created before it"
        f" has: create it, as with `gazctl journals create NAME --partitions 1`"
    )


def _partitions_of(listing: Iterable[pb.JournalSpec]) -> list[pb.JournalSpec]:
    """Return the journals of a topic by their numbers."""
    found = [
        spec
        for spec in listing
        if may_read(spec) and value_of(spec.labels, CONTENT_TYPE) != RECOVERY_LOG
    ]
    return sorted(found, key=lambda spec: spec.name.encode())


def _different_counts(names: Sequence[str], topics: Sequence[Sequence[pb.JournalSpec]]) -> str:
    """Return that topics have different numbers of partitions; empty if they have not."""
    counts = [len(topic) for topic in topics]
    if len(set(counts)) == 1:
        return ""
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


def _in_common(topics: Mapping[str, Sequence[pb.JournalSpec]]) -> str:
    """Return that topics have a journal in common; empty if they have none."""
    seen: dict[str, str] = {}
    for name, topic in topics.items():
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

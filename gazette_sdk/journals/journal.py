"""A listed journal, as a plain dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.durations import to_seconds
from gazette_sdk.protocol.journal_spec import is_suspended
from gazette_sdk.protocol.labels import CONTENT_TYPE, pairs_of

__all__ = ["Journal"]


@dataclass(frozen=True, slots=True)
class Journal:
    """A journal and its settings, as of one listing.

    Attributes:
        name: its name.
        replication: number of brokers that keep a replica.
        stores: URLs of its fragment stores; new fragments go to the first.
        codec: compression of new fragments, such as ``gzip``.
        length: size in bytes at which a fragment is closed.
        labels: values by label name; a tuple where a label has several.
        refresh_interval_s: seconds between two listings of its stores.
        flush_interval_s: greatest age of a fragment that is not stored, in seconds; 0 for no
            limit.
        retention_s: age at which ``gazctl journals prune`` removes fragments; 0 for never.
        max_append_rate: limit of appends, in bytes per second; 0 for none.
        suspended: True if it has fewer replicas until the next append.
        brokers: brokers that serve it now, as ``zone/id``, the primary first.
        revision: revision of Etcd that changed its settings last.
        create_revision: revision of Etcd that created it. A journal that is deleted and created
            again has another.
    """

    name: str
    replication: int
    stores: tuple[str, ...]
    codec: str
    length: int
    labels: Mapping[str, str | tuple[str, ...]]
    refresh_interval_s: float
    flush_interval_s: float
    retention_s: float
    max_append_rate: int
    suspended: bool = False
    brokers: tuple[str, ...] = ()
    revision: int = 0
    create_revision: int = 0

    @property
    def content_type(self) -> str:
        """Content type of its messages; empty if it has none."""
        value = self.labels.get(CONTENT_TYPE, "")
        return value if isinstance(value, str) else value[0]

    @classmethod
    def of(cls, listed: pb.ListResponse.Journal) -> Journal:
        """Return the journal of an entry of a listing."""
        spec, fragment = listed.spec, listed.spec.fragment
        labels: dict[str, str | tuple[str, ...]] = {}
        for name, value in pairs_of(spec.labels):
            before = labels.get(name, ())
            labels[name] = value
            if before:
                labels[name] = (*((before,) if isinstance(before, str) else before), value)
        primary = listed.route.primary
        members = sorted(enumerate(listed.route.members), key=lambda item: item[0] != primary)
        return cls(
            name=spec.name,
            replication=spec.replication,
            stores=tuple(fragment.stores),
            codec=pb.CompressionCodec.Name(fragment.compression_codec).lower(),
            length=fragment.length,
            labels=labels,
            refresh_interval_s=to_seconds(fragment.refresh_interval),
            flush_interval_s=to_seconds(fragment.flush_interval),
            retention_s=to_seconds(fragment.retention),
            max_append_rate=spec.max_append_rate,
            suspended=is_suspended(spec),
            brokers=tuple(f"{member.zone}/{member.suffix}" for _, member in members),
            revision=listed.mod_revision,
            create_revision=listed.create_revision,
        )

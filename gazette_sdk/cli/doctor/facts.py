"""Facts about a cluster: what its members, its Etcd and this machine say.

Facts come from several sources. One that cannot be asked is missing, with the reason: its checks
are unknown, and all others are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from gazette_sdk.cluster.etcd import EtcdStatus
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.labels import CONTENT_TYPE, RECOVERY_LOG, value_of


class Source(StrEnum):
    """Source of facts."""

    REPORT = "report"
    """Report of a broker."""
    MEMBERS = "members"
    """Brokers and consumers, as they describe themselves."""
    JOURNALS = "journals"
    """Specs of journals, and where their replicas are."""
    SHARDS = "shards"
    """Shards of applications, with their hints and recovery logs."""
    ETCD = "etcd"
    """Members of Etcd, and keys of other clusters."""
    QUOTA = "etcd-metrics"
    """Metrics of Etcd."""
    METRICS = "metrics"
    """Metrics of members."""
    CERTIFICATES = "certificates"
    """Certificates of members, of Etcd, and of files that options name."""
    LIFECYCLE = "lifecycle"
    """Lifecycle rules of the buckets of recovery logs."""
    MACHINE = "machine"
    """Spool directory of a broker on this machine."""


@dataclass(frozen=True, slots=True)
class JournalFacts:
    """Journal of the cluster.

    Attributes:
        spec: its spec.
        members: brokers that hold it, as ``zone/id``.
    """

    spec: pb.JournalSpec
    members: Sequence[str]

    @property
    def content_type(self) -> str:
        """Value of its label ``content-type``; empty without one."""
        return value_of(self.spec.labels, CONTENT_TYPE)

    @property
    def is_recovery_log(self) -> bool:
        """True for the recovery log of a shard."""
        return self.content_type == RECOVERY_LOG


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts:
    """Shard of an application.

    Attributes:
        spec: its spec.
        application: its application.
        has_log: True if it has a recovery log.
        has_hints: True if it has hints of a recovery; None if that is not known.
        log_bytes: bytes of its log that are kept; None if that is not known.
        recovery_bytes: bytes of its log that a recovery reads; None if that is not known.
    """

    spec: cpb.ShardSpec
    application: str
    has_log: bool = False
    has_hints: bool | None = None
    log_bytes: int | None = None
    recovery_bytes: int | None = None

    @property
    def id(self) -> str:
        """Id of the shard."""
        return self.spec.id


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdFacts:
    """Etcd of the cluster.

    Attributes:
        members: states of its members.
        latency_s: median time of reads that all members agree upon.
        shared_stores: stores that journals of other clusters in this Etcd have, too, with the
            prefix of one of them.
    """

    members: Sequence[EtcdStatus] = ()
    latency_s: float = 0.0
    shared_stores: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaFacts:
    """Size of a member's database.

    Attributes:
        address: address of the member.
        size_bytes: its size.
        in_use_bytes: what a defragmentation leaves of it.
        quota_bytes: size from which on Etcd refuses writes.
    """

    address: str
    size_bytes: float
    in_use_bytes: float
    quota_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """Metrics of a member.

    Attributes:
        name: the member, as ``zone/id``.
        open_files: files that it has open.
        open_files_max: its limit of them.
        audit_failing_s: time for which its audit journal has taken no records that wait for it.
        audit_dropped: audit records that did not get into its audit journal.
    """

    name: str
    open_files: float
    open_files_max: float
    audit_failing_s: float = 0.0
    audit_dropped: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFacts:
    """Certificate.

    Attributes:
        place: endpoint or file that has it.
        ends_at: Unix time of its end.
    """

    place: str
    ends_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolFacts:
    """Spool directory of a broker.

    Attributes:
        directory: the directory.
        free_bytes: free bytes of its disk.
        total_bytes: size of its disk.
        filesystem: type of its file system, such as ``ext4``.
        damaged: damaged files, by their paths below the directory.
        superseded: superseded files.
        oldest_s: age of the oldest spool that is kept, in seconds; None without spools.
        oldest: its path.
    """

    directory: str
    free_bytes: int
    total_bytes: int
    filesystem: str = ""
    damaged: Sequence[str] = ()
    superseded: Sequence[str] = ()
    oldest_s: float | None = None
    oldest: str = ""


@dataclass(slots=True, kw_only=True)
class Facts:
    """Facts about a cluster, at one moment. Those of a missing source are empty.

    Attributes:
        now: Unix time of this machine.
        broker: address of the broker that was asked.
        missing: sources that could not be asked, and why.
        report: report of the broker.
        clock_ahead_s: seconds by which the broker's clock is ahead of that of this machine.
        members: brokers and consumers.
        journals: journals.
        shards: shards.
        etcd: Etcd.
        quotas: databases of the members of Etcd.
        processes: metrics of members.
        certificates: certificates.
        expiring: recovery logs whose fragments a lifecycle rule removes.
        spools: spool directory on this machine.
    """

    now: float = 0.0
    broker: str = ""
    missing: dict[Source, str] = field(default_factory=dict)
    report: clpb.ReportResponse = field(default_factory=clpb.ReportResponse)
    clock_ahead_s: float = 0.0
    members: Sequence[clpb.Member] = ()
    journals: Sequence[JournalFacts] = ()
    shards: Sequence[ShardFacts] = ()
    etcd: EtcdFacts = field(default_factory=EtcdFacts)
    quotas: Sequence[QuotaFacts] = ()
    processes: Sequence[ProcessFacts] = ()
    certificates: Sequence[CertificateFacts] = ()
    expiring: Sequence[str] = ()
    spools: SpoolFacts | None = None

    @property
    def brokers(self) -> Sequence[clpb.Member]:
        """Members that are brokers."""
        return [each for each in self.members if each.component == "broker"]

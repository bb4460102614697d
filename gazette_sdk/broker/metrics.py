"""Metrics of the broker (broker section 19), without those of stores and of the allocator.

The metrics of appends are plain numbers, see :mod:`gazette_sdk.meters`. Two of the names end in
``_totals``, to which Prometheus' client would append ``_total``.
"""

from __future__ import annotations

from prometheus_client import Counter

from gazette_sdk.meters import PlainHistogram, PlainMetric, ReadMetric, Tally
from gazette_sdk.protocol.rules import RPCS_BY_NAME
from gazette_sdk.server.metrics import meters_of


class CarriedBytes:
    """Bytes that one broker carried for clients since it started. Only the event loop changes it.

    Attributes:
        appended: bytes of appends to journals that it leads.
        read: bytes of reads that it served.
    """

    __slots__ = ("appended", "read")

    def __init__(self) -> None:
        self.appended = 0
        self.read = 0


SERVER_STARTED = PlainMetric(
    "gazette_journal_server_started_totals", "Calls started.", ("operation",)
)
SERVER_COMPLETED = PlainMetric(
    "gazette_journal_server_completed_totals",
    "Calls completed; status is ok, <error>, or the name of a status.",
    ("operation", "status"),
)
WRITE_HEAD = PlainMetric(
    "gazette_write_head", "Offset of the next byte to be appended.", ("journal",), kind="gauge"
)

UNSTORED_MISSING = PlainMetric(
    "gazette_unstored_missing_bytes",
    "Bytes of a journal in no store which this replica lacks; +Inf until others have reported it.",
    ("journal",),
    kind="gauge",
)

SPOOL_COMMITS = Tally("gazette_spool_commits", "Commits to spools.")
SPOOL_COMMIT_BYTES = Tally("gazette_spool_commit_bytes", "Bytes committed to spools.")
SPOOL_ROLLBACKS = Tally("gazette_spool_rollbacks", "Rollbacks of spools with content.")
SPOOL_ROLLBACK_BYTES = Tally("gazette_spool_rollback_bytes", "Bytes rolled back in spools.")
SPOOLS_COMPLETED = Tally("gazette_spool_completed", "Spools to be uploaded, or dropped.")
RETENTION_FRAGMENTS = Tally(
    "gazette_retention_removed_fragments", "Stored fragments removed since they were too old."
)
RETENTION_BYTES = Tally(
    "gazette_retention_removed_bytes", "Bytes of journals removed since they were too old."
)
SPOOLS_PERSISTED = Counter(
    "gazette_spool_persisted", "Spools uploaded, found in their store, or dropped."
)

APPEND_SECONDS = PlainHistogram(
    "gazette_append_seconds",
    "Time of appends by stage: wait for the journal, sync of replicas where that was needed, "
    "replicate until all peers have acknowledged, and total, of those that failed, too.",
    "stage",
)
_APPEND = RPCS_BY_NAME["Append"]
# The stream wire and gRPC take the time of each call, so that an append is not timed twice.
APPEND_SECONDS.include(
    "total", meters_of(_APPEND.path, _APPEND.client_streams, _APPEND.server_streams).seconds
)
PEER_FAILURES = PlainMetric(
    "gazette_replication_peer_failures_total",
    "Replicate streams to a peer that broke.",
    ("peer",),
    kind="counter",
)
TOPIC_APPEND_BYTES = PlainMetric(
    "gazette_topic_append_bytes_total",
    "Bytes appended to journals by their label topic, at their primaries.",
    ("topic",),
    kind="counter",
)
AUDIT_DROPPED = Tally(
    "gazette_audit_dropped_records",
    "Audit records that are in the log only: the audit journal did not take them in time.",
)
AUDIT_FAILING_SECONDS = ReadMetric(
    "gazette_audit_journal_failing_seconds",
    "Time for which the audit journal has taken no record that waits for it; 0 if it works.",
    combine=max,
)


def show_journals(*, each: bool) -> None:
    """Expose metrics of each journal, or only those by topic.

    Args:
        each: True for a series of each journal.
    """
    for metric in (WRITE_HEAD, UNSTORED_MISSING):
        metric.is_hidden = not each

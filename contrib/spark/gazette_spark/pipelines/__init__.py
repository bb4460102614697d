"""Pipelines on Spark, each a plain function over a session: what ``gazette spark NAME`` runs.

- ``lake``: journals to Parquet by date, hour and batch, incrementally (``export``), and many
  exported batches of an hour to one (``compact``)
- ``backfill``: files of Parquet or JSON to journals
- ``reconcile``: what two sets of journals do not have in common
- ``word_count``: words of all history
"""

from gazette_spark.pipelines.backfill import BackfilledFiles, backfill
from gazette_spark.pipelines.lake import CompactedHour, ExportedBatch, compact, export
from gazette_spark.pipelines.reconcile import Reconciliation, reconcile
from gazette_spark.pipelines.word_count import word_count

__all__ = [
    "BackfilledFiles",
    "CompactedHour",
    "ExportedBatch",
    "Reconciliation",
    "backfill",
    "compact",
    "export",
    "reconcile",
    "word_count",
]

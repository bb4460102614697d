"""Pipelines on Spark, each a plain function over a session: what ``gazette spark NAME`` runs.

- ``lake``: journals to Parquet by date, hour and batch, incrementally (``export``), and many
  exported batches of an hour to one (``compact``)
- ``batch``: batch jobs: files of Parquet or JSON to journals (``backfill``), what two sets of
  journals do not have in common (``reconcile``), and words of all history (``word_count``)
"""

from gazette_spark.pipelines.batch import (
    BackfilledFiles,
    Reconciliation,
    backfill,
    reconcile,
    word_count,
)
from gazette_spark.pipelines.lake import CompactedHour, ExportedBatch, compact, export

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

"""``gazette spark``: pipelines of :mod:`gazette_spark.pipelines` on any Spark cluster.

- ``commands``: The commands of ``gazette spark``.
- ``driver``: Program that ``spark-submit`` runs: one pipeline, its progress and its summary.
- ``transactions``: ``gazette spark transactions``: care of the logs of sinks. No Spark is
  started.
"""

"""``gazette spark``: pipelines of :mod:`gazette_spark.pipelines` on any Spark cluster.

- ``commands``: The commands of ``gazette spark``.
- ``driver``: Program that ``spark-submit`` runs: one pipeline, its progress and its summary.
"""

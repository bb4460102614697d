"""``gazette spark``: pipelines of :mod:`gazette_spark.pipelines` on any Spark cluster.

- ``settings``: the options; ``commands``: the commands
- ``submit``: runs ``spark-submit`` of the installed PySpark
- ``driver``: the program that it runs: one pipeline, its progress and its summary
"""

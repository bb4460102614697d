"""``gazette spark``: pipelines of :mod:`gazette_spark.pipelines` on any Spark cluster.

- ``settings``: the options; ``commands``: the commands
- ``submit``: runs ``spark-submit`` of the installed PySpark
- ``transactions``: care of the transaction logs of sinks
- ``driver``: the program that it runs: one pipeline, its progress and its summary
"""

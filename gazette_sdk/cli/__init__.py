"""The programs ``gazette`` and ``gazctl``.

Options, environment variables, INI sections and keys, defaults, exit statuses and machine-readable
output are those of Gazette's own tools (cli sections 1 to 9). Their grammar has dotted names
(``--broker.address``), values attached to short options, options of a parent command on either side
of the sub-command, and INI files that win over the environment. Command-line frameworks support
none of these; :mod:`gazette_sdk.server.options`, which servers use, does.

Commands name their functions by import path, so that help and errors in a command line do not
import gRPC.

In reading order:

- ``entry``: Entry points of the programs, which Ctrl-C ends quietly also while they are imported.
- ``formats``: Output formats: tables for people, JSON and protobuf text for programs (cli 4.1).
- ``program``: Programs with commands: parsing of command lines, and exit statuses (cli section
  1).
- ``client``: Connections of tools to brokers and consumer processes, and their options (cli
  section 2).
- ``completion``: ``completion``: scripts with which shells complete command lines.
- ``serve``: ``gazette serve``: a production broker (cli section 3.1).
- ``processes``: Members of a cluster on one machine: a parent process, and a child for each.
- ``bench``: ``gazette bench``: measure a cluster as its users see it, and verify every message.
- ``settings``: Options of commands, and those that several commands share.
- ``dev``: ``gazette dev``: a complete local cluster in the foreground.
- ``journals``: The commands of ``gazctl journals`` (cli section 5).
- ``spark``: ``gazette spark``: pipelines of :mod:`gazette_spark.pipelines` on any Spark cluster.
- ``allocator``: The commands of ``gazette allocator``.
- ``drain``: ``gazctl brokers drain``: brokers that drain and start again, one after the other.
- ``capacity``: ``gazette capacity``: the size of a cluster for a load, on paper.
- ``run_consumer``: ``gazette run-consumer``: a process that runs shards of an application (shard
  section 13).
- ``shards``: Commands of ``gazctl shards`` (cli section 8).
- ``gazctl``: ``gazctl``: the tool of operators (cli section 4).
- ``gazette``: ``gazette``: brokers (cli section 3), clusters for development, benchmarks and dry
  runs.
"""

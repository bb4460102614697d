"""The programs ``gazette`` and ``gazctl``.

Names of options, environment variables, INI sections and keys, defaults, exit statuses and
output for machines are those that operators' scripts and manifests already use (cli sections
1 to 9). Their grammar has dotted names (``--broker.address``), values attached to short options,
options of a parent command on either side of the sub-command, and INI files that win over the
environment; all of that comes from the tables of options which servers use
(:mod:`gazette_sdk.server.options`), and not from a command-line framework, which would have to be
bent at every one of these points.

Commands say their options in light modules, and name by import path what runs them, so that help
and mistakes do not wait for gRPC to load.

In reading order:

- ``gazctl`` and ``gazette``: the two programs, each a table of commands
- ``command``: what a command is; ``program``: from a command line to a command that runs;
  ``usage``: help texts; ``failure``: what a user sees when something failed;
  ``settings`` and ``configuration``: options of commands that stand alone, ``print-config``
- ``client``: options of a tool which calls a broker, and the call; ``formats``: tables, JSON,
  protobuf text; ``progress``: bars on a terminal
- ``journals``: the commands of ``gazctl journals``; ``edit_loop``: how specs are edited
- ``attach_uuids``: ``gazctl attach-uuids``
- ``serve``: ``gazette serve``; ``dev``: ``gazette dev``; ``bench``: ``gazette bench``
"""

"""The programs ``gazette`` and ``gazctl``.

Options, environment variables, INI sections and keys, defaults, exit statuses and machine-readable
output are those of Gazette's own tools (cli sections 1 to 9). Their grammar has dotted names
(``--broker.address``), values attached to short options, options of a parent command on either side
of the sub-command, and INI files that win over the environment. Command-line frameworks support
none of these; :mod:`gazette_sdk.server.options`, which servers use, does.

Commands name their functions by import path, so that help and errors in a command line do not
import gRPC.

In reading order:

- ``entry``: what the scripts ``gazette`` and ``gazctl`` call
- ``gazctl`` and ``gazette``: the two programs, each a table of commands
- ``command``: commands; ``program``: parsing of command lines; ``usage``: help texts;
  ``failure``: error messages; ``configuration``: ``print-config``; ``completion``: scripts for
  shells; ``settings``: options of ``print-config``, ``dev`` and ``attach-uuids``
- ``client``: connections to brokers; ``concurrency``: concurrent calls; ``documents``: YAML
  documents; ``formats``: tables, JSON and protobuf text; ``progress``: progress bars
- ``journals``: the commands of ``gazctl journals``; ``edit_loop``: editing of specs
- ``attach_uuids``: ``gazctl attach-uuids``
- ``serve``: ``gazette serve``; ``dev``: ``gazette dev``; ``bench``: ``gazette bench``
"""

"""Commands of ``gazctl shards`` (cli section 8).

In reading order:

- ``settings`` and ``commands``: options, help, and the table of commands.
- ``selection``: the shards that a command works on.
- ``list`` and ``lag``: what there is, and how far it has come.
- ``apply`` and ``edit``: changes of specs.
- ``generate``: shards of an application's sources.
- ``unassign``: a new start of shards.
- ``recover`` and ``prune``: recovery logs.
"""

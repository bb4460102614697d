"""The commands of ``gazctl journals`` (cli section 5).

``commands`` is the table of the commands, and ``settings`` has their options. Each command has a
module of its own name, which is imported when the command runs:

- ``commands``: Table of the commands of ``gazctl journals``: names, help, and functions.
- ``list``: ``gazctl journals list``, and what the commands of journals share.
- ``fragments``: ``gazctl journals fragments``, ``prune``, ``check-store-health`` and ``reset-
  head``.
- ``store_move``: Moves of journals in use to another fragment store: ``gazctl journals
  move-store``.
- ``read``: ``gazctl journals read``.
- ``redrive``: ``gazctl journals redrive``.
- ``specs``: ``gazctl journals apply``, ``create``, ``edit``, ``delete`` and ``suspend``.
- ``append``: ``gazctl journals append``, and ``gazctl attach-uuids``, which prepares what it
  appends.
"""

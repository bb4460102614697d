"""The commands of ``gazctl journals`` (cli section 5).

``commands`` is the table of the commands, and ``settings`` has their options. Each command has
a module of its own name, which is imported when the command runs:

- ``list``, with ``extents`` (write heads and sizes); ``create``, ``delete``
- ``apply``, ``edit``: apply specs, and edit them in an editor; ``outcomes`` shows the outcomes
- ``read``, with ``reads`` (concurrent reads of journals), ``messages`` (cuts content into messages,
  to count them and to find their times) and ``offsets`` (files of offsets)
- ``append``, with ``records`` (cuts input into records) and ``input`` (files and pipes)
- ``fragments``, ``prune``: list fragments, and remove old ones
- ``reset_head``, ``suspend``, ``store_health``: for operators
- ``selection``: the journals that names or a selector select
"""

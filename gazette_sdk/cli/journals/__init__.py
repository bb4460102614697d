"""The commands of ``gazctl journals`` (cli section 5).

``commands`` says what they are, and ``settings`` what their options are; both are light. Each
command has a module of its own name which runs it, and which is loaded only then:

- ``list``, ``apply``, ``edit``: specs of journals, shown, changed, and changed in an editor
- ``read``, with ``pump`` (the reads) and ``offsets`` (files of offsets); ``append``, with
  ``records`` (input to records) and ``input`` (a pipe or file, block by block)
- ``fragments`` and ``prune``: what is stored
- ``reset_head``, ``suspend``, ``store_health``: for operators
- ``selection``: the journals that a selector means, for all of them
"""

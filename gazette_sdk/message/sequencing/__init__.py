"""Sequencing: which messages are committed (message section 13). Pure.

In reading order:

- ``run``: messages of a journal as arrays
- ``sequencer``: :class:`Sequencer`, over ``machine`` (message by message), ``plain_runs`` (in
  bulk), ``state`` (of each producer) and ``metrics``
- ``checkpoint``: positions to go on from
"""

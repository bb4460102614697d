"""Appends of the client.

Read in this order:

- `service`: appenders of many journals, which share a lock, a transport and a bound of memory.
- `appender`: the appender of one journal, which drives its queue.
- `queue`: what may be sent, and what follows from an answer. Pure.
- `linger`: the pause before a further append of a journal that is being streamed to. Pure.
- `pending`: the future of an append.
- `route`: the way of a journal's appends to its broker.
- `append`: one append whose content is streamed, and the errors of all appends.
"""

"""``gazette bench``: what a cluster does for its users, measured from where they stand.

It publishes and reads through the SDK's public face and nothing else, over the address that a
program would use. Its figures come with a proof: every message has a number and a content that
follows from it, and what is read back has to be what was acknowledged, message by message.

In reading order:

- ``settings``: the options; ``command``: the phases of a run, and what is cleaned up behind them
- ``content``: message number *n*; ``verify``: what was acknowledged, and whether it is what was
  read: lost, duplicated, reordered and changed messages, and a hash chain over all of them
- ``schedule``: when messages of a fixed rate are due, whatever happened to those before them;
  ``histogram``: latencies, in bounded memory
- ``site``: the cluster, its own or an existing one, and the journals that a run makes and
  removes; ``embedded``: a cluster in a process of its own;
  ``child``: such processes
- ``publish``, ``tail``, with ``tailer`` (the process that reads), and ``catch_up``: the phases
- ``display``: progress on a terminal; ``report``: tables for people, JSON for programs
"""

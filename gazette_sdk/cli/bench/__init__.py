"""``gazette bench``: measure a cluster as its users see it, and verify every message.

It publishes and reads with the SDK's public interface, over the address that a program would use.
Each message has a number, which determines its content. All messages are read and compared with
those that were acknowledged.

In reading order:

- ``settings``: the options; ``command``: the phases of a run
- ``content``: message number *n*; ``verify``: lost, duplicated, reordered and changed messages
- ``schedule``: due times of messages of a fixed rate; ``histogram``: latencies in bounded memory
- ``site``: the cluster and the journals of a run; ``child``: child processes
- ``publish``, ``tail`` with ``tailer`` (the process that reads), and ``catch_up``: the phases
- ``report``: tables for people, JSON for programs
"""

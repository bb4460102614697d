"""``gazette bench``: measure a cluster as its users see it, and verify every message.

It publishes and reads with the SDK's public interface, over the address that a program would use.
Each message has a number, which determines its content. All messages are read and compared with
those that were acknowledged.

In reading order:

- ``site``: Site of a run: a cluster, and journals that exist for the run.
- ``verify``: Comparison of the messages that were read with those that were acknowledged.
- ``report``: Report of a run: tables for people, one JSON object for programs.
- ``phases``: Phases of ``gazette bench``.
"""

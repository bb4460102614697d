"""Sums of streams: chunks of many streams are published, summed by shards, and verified.

- ``messages``: the messages, and what a sum is
- ``summer``: the application, which sums the chunks of each stream
- ``chunker``: the program that publishes chunks, and verifies the sum of each stream

See ``README.md`` for the commands.
"""

"""Data model of journals that brokers, clients and tools share. Pure: no I/O, no clock.

Specs, fragments, routes and headers *are* the generated messages of ``broker_pb2``; the modules
here are rules about them and functions over them. In reading order:

- ``durations``: Durations: Go's duration strings, ``google.protobuf.Duration``, and integers of
  nanoseconds.
- ``names``: Names, tokens and path components (protocol section 4).
- ``labels``: Label sets: sorted multi-maps from names to values (protocol sections 5.1 and 16).
- ``strict_yaml``: Strict YAML: documents whose every key and type is known.
- ``authorization``: Bearer tokens: capabilities and the journals they allow (protocol section
  12).
- ``signatures``: Signatures of tokens: JSON web signatures by HMAC (protocol section 12).
- ``fragments``: Fragments: their names in stores, their sums, their rules (protocol section 7).
- ``journal_spec``: Rules of journal specs, and set operations over them (protocol section 6).
- ``journalspace``: Journal space: specs of many journals as a tree, and as YAML (protocol section
  14).
- ``rules``: Rules of requests, responses, routes and headers; the table of calls; their status
  codes.
- ``shard_spec``: Rules of shard specs, consumer specs and replica statuses, and functions over
  them.
- ``stream_frames``: Frames of the stream transport: encoding and decoding.
- ``shardspace``: Shard space: specs of many shards with their common part, and as YAML (shard
  section 12).
- ``stream_calls``: Calls on the stream transport: which frame may come when, and what it means.
  Pure.
- ``served_calls``: Server's state of the calls on one connection.

Rules raise :class:`gazette_sdk.errors.ValidationError` with the dotted path of the field. The rule
that fails first is part of the contract with other implementations; texts are not. Import the
modules themselves: the package re-exports nothing, so that importing one stays cheap.
"""

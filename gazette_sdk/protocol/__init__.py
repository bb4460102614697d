"""Data model of journals that brokers, clients and tools share. Pure: no I/O, no clock.

Specs, fragments, routes and headers *are* the generated messages of ``broker_pb2``; the modules
here are rules about them and functions over them. In reading order:

- ``names``: names of journals, tokens, clean paths.
- ``labels``: label sets and their operations; well-known label names.
- ``selectors``: label selectors, their text, and what they match.
- ``durations``: Go's duration strings.
- ``journal_spec``: rules of specs, effective replication, set operations over specs.
- ``postfix`` (with ``gotime``): templates of the extra path that fragments get in stores.
- ``fragments``: names of fragments in stores, sums, codecs' extensions.
- ``urls``: URLs of fragment stores and of processes.
- ``routes``: process ids, routes, headers.
- ``rpc``: rules of every request and response.
- ``service``: the table of calls.
- ``non_null_fields``: sub-messages that are encoded even when empty.
- ``varint``: variable-length integers of protobuf's encoding.
- ``shard_spec``, ``shard_rpcs``, ``shardspace``: the same of shards: rules, set operations, YAML.
- ``strict_yaml``: YAML documents whose every key and type is known.
- ``consumer_pb2``: specs, statuses, checkpoints and calls of consumers.
- ``authorization``: capabilities and bearer tokens.
- ``journalspace``: trees of specs, and their YAML.
- ``stream_frames`` and ``stream_calls``: frames and calls of the stream transport.

Rules raise :class:`gazette_sdk.errors.ValidationError` with the dotted path of the field. The rule
that fails first is part of the contract with other implementations; texts are not. Import the
modules themselves: the package re-exports nothing, so that importing one stays cheap.
"""

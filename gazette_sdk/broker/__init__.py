"""Broker: takes appends, replicates them, stores fragments and serves reads.

The journal service is a plain async object without gRPC and HTTP; thin fronts carry it. In
reading order:

- ``metrics``: Metrics of the broker (broker section 19), without those of stores and of the
  allocator.
- ``listing``: Listings and stores: List with its watch, Apply, ListFragments and
  FragmentStoreHealth (broker section 14).
- ``failover``: Fail-over before a lease ends: dead brokers are deposed, cut or frozen replicas
  replaced.
- ``spool``: Spools: the fragments that are being written, as files that survive the process.
- ``read``: Serves the reads of a replica (broker section 13).
- ``api``: Fronts of the journal service: in process, stream transport, gRPC, HTTP and JSON.
- ``fragments``: Fragments of a journal: their index, listings of the stores, and uploads.
- ``mirror``: Mirror of specs and hints in fragment stores, for an Etcd that is lost without a
  backup.
- ``replica``: Replica of one journal at one broker, for as long as the journal is assigned to it.
- ``recovery``: Recovery of heads and spools after the end of a process.
- ``resolver``: Resolver: the route of a journal, and this broker's replicas (broker section 3).
- ``append``: Appends at their primary (broker sections 5, 8 and 9).
- ``replication``: Replication of appends from a primary to its peers (broker section 6).
- ``service``: The journal service: the calls of a broker, the same for all fronts.
- ``views``: Views of a cluster: what people and tools see of it, and no data path needs.
- ``process``: Broker: its parts, the order of its start, and the order of its end (broker section
  17).
"""

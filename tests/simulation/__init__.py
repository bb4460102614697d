"""Simulation of clusters: whole brokers on a virtual clock, a virtual network and a model of Etcd.

One seed is one run. It decides the cluster, the workload, the schedule of faults and the order of
all messages; the same seed gives the same run. The models are FoundationDB and TigerBeetle.

::

    PYTHONPATH=tests python -m simulation.run 1-1000        # violations with their seeds
    PYTHONPATH=tests python -m simulation.run 4711          # replays one seed, with its log

The service objects are the product's: :class:`~gazette_sdk.broker.process.Broker` with its spools
on real files, resolver, append machine, pipelines, quarantine, allocator, persister, Etcd client
and routed transport. These shells cannot run on the virtual clock, and are replaced:

- sockets and what speaks on them (the listener, the stream and gRPC fronts, the connections of the
  stream wire, gRPC's channels): the kernel and gRPC's threads wait in real time. `wire` carries the
  calls of a transport to service objects, `etcd_channel` those of the Etcd client to `etcd_model`.
- threads (executors, health checks): `threads` runs their work on the loop, after a virtual delay.
- the thread that renews a lease: `etcd_channel` runs its coroutine on the loop, over connections of
  its own as in the product. A loop that is stuck while its thread runs is left to tests of threads.
- stores over a network: `store` is one in memory, which fails, lags and heals.

In reading order: `loop` (clock, nodes, kills, pauses), `threads`, `network`, `etcd_model`,
`etcd_channel`, `wire`, `store`, `disk` (losses of a power failure), `cluster` (brokers), `schedule`
(faults of a seed), `workload` (clients), `checker` (promises), `plants` (planted bugs), `scenario`
(one run), `run` (the program).
"""

"""Broker: takes appends, replicates them, stores fragments and serves reads.

The journal service is a plain async object without gRPC and HTTP; thin fronts carry it. In
reading order:

- `service`: all calls: authorize, validate, resolve, serve or proxy; with `authorize`, `listing`
  (List and Apply), `read` and `fragments.rpc`.
- `resolver`, `replica`, `slot`: the route of a journal, and this broker's replica of it.
- `append`: the append state machine and its driver, from the client's stream to the answer.
- `replication`: the streams from a primary to its peers, and their other end.
- `spool`: the fragment that is being written, as files that survive the process.
- `recovery`: heads and spools of an earlier process: verified, in quarantine, used or truncated.
- `fragments`: the index of a journal's bytes, listings of its stores, and uploads.
- `api`: the fronts: in process, stream transport, gRPC, HTTP and JSON.
- `config`, `process`: a whole broker: start, drain, stop. `departure`: the last one leaves.
  `metrics`: their counters.
"""

"""Recovery of heads and spools after the end of a process.

In reading order:

- `states`: the state machine of a head and of a recovered spool, as tables; pure.
- `spools`: verifies the spools in a directory.
- `last_routes`: the last route of each journal, from Etcd's mirror, history, and
  `recorded_routes`: keys without a lease, which `route_recorder` completes.
- `etcd_history`: forgets heads of journals that others continued.
- `quarantine`: decides about verified spools, with
  `peer_inventory` (bytes that peers and stores have) and `reconcile` (comparison; pure).
- `truncate`: truncates a spool's files, or renames them to ``*.superseded``.
- `unagreed`: closed spools of this process which some replica may lack.
- `waiting_journals`: takes over journals that wait for this broker.
"""

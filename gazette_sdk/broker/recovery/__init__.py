"""Recovery of heads and spools after the end of a process.

In reading order:

- `states`: the state machine of a head and of a recovered spool, as tables; pure.
- `spools`: verifies the spools in a directory.
- `etcd_history`: forgets heads of journals that others continued.
- `beginning`: where a replica begins while spools of its journal are in quarantine; pure.
- `quarantine`: decides about verified spools, with
  `peer_inventory` (bytes that peers and stores have) and `reconcile` (comparison; pure).
- `truncate`: truncates a spool's files, or renames them to ``*.superseded``.
"""

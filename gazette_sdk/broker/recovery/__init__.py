"""Recovery of spools that an earlier process left behind.

- `spools`: finds and verifies spools.
- `etcd_history`: decides by the history of Etcd whether remembered heads are still valid.
- `quarantine`: keeps recovered spools apart until it is known how much of them is valid.
- `peer_inventory`, `reconcile`: content that peers and stores have, and the decision.
- `truncate`: removes the part of a spool that others wrote anew.
"""

"""``gazette doctor``: what is wrong with a cluster, and what may go wrong next.

In reading order:

- ``facts``: Facts about a cluster: what its members, its Etcd and this machine say.
- ``checks``: Checks of facts, as a table. Pure.
- ``gather``: Gathering of facts, from all that can be reached.
- ``command``: The command: findings for people and for programs, and the bundle for a report.
"""

"""Fail-over before a lease ends: dead brokers are deposed, cut or frozen replicas replaced.

Brokers that may be dead are verified as all members are (:mod:`gazette_sdk.cluster.verification`).

- `failover`: the parts of one broker, and how they get evidence
- `pause_guard`: finds out if this process was stopped for longer than its lease may last
- `links`: since when a link to a peer has not worked
- `replacement`: what a primary does about a replica that it does not reach, as a pure decision
- `rebuilder`: the driver of replacements
"""

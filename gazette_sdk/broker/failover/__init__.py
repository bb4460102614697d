"""Fail-over before a lease ends: dead brokers are deposed, cut or frozen replicas replaced.

- `failover`: the parts of one broker, and how they are told of evidence
- `decision`: the verification of a suspect, as a pure table
- `probe`: dials of a broker's endpoint
- `challenges`: challenges in Etcd, which every living broker answers
- `verifier`: the driver: from evidence to the revocation of a dead broker's lease
- `pause_guard`: finds out if this process was stopped for longer than its lease may last
- `links`: since when a link to a peer has not worked
- `replacement`: what a primary does about a replica that it does not reach, as a pure decision
- `rebuilder`: the driver of replacements
"""

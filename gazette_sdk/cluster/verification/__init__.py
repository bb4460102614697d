"""Verification of members that may be dead, brokers and consumers: a dead one loses its lease.

- `decision`: the verification of a suspect, as a pure table
- `probe`: dials of a member's endpoint
- `challenges`: challenges in Etcd, which every living member answers
- `neighbours`: connections between members, whose end is evidence
- `verifier`: the driver: from evidence to the revocation of a dead member's lease
"""

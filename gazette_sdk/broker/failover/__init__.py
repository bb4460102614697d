"""Fail-over before a lease ends: dead brokers are deposed, cut or frozen replicas replaced.

Brokers that may be dead are verified as all members are (:mod:`gazette_sdk.cluster.verification`).

- ``decision``: Replacement of replicas that their primary does not reach, as a pure decision.
- ``pause_guard``: Guard against commits of a process that did not run for longer than its lease
  may last.
- ``failover``: Fail-over of one broker: its parts, and how they get evidence.
"""

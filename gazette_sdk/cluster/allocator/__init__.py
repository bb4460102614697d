"""The allocator: which members of a cluster hold which items.

Every member runs the loop; the one announced first computes and writes assignments. Solving says
who shall hold what; convergence gets there in steps that never drop a replica which is needed.

In reading order:

* :mod:`~.codec`: what the allocator asks of items and members,
* :mod:`~.state`: what it derives from a state of the mirror,
* :mod:`~.solver`, on :mod:`~.push_relabel` and :mod:`~.placement`: who shall hold what,
* :mod:`~.converge`: one round from current towards desired assignments,
* :mod:`~.txn`: writing a round in few transactions,
* :mod:`~.loop`: rounds as the cluster changes,
* :mod:`~.metrics`.
"""

from gazette_sdk.cluster.allocator.codec import Allocation
from gazette_sdk.cluster.allocator.loop import run_allocator
from gazette_sdk.cluster.allocator.solver import solve
from gazette_sdk.cluster.allocator.state import State

__all__ = ["Allocation", "State", "run_allocator", "solve"]

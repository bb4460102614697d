"""Allocator: assignment of a cluster's items to its members.

Every member runs the loop; the one announced first computes and writes assignments. The solver
computes the desired assignments; convergence reaches them in steps that never remove a replica that
is needed.

In reading order:

* :mod:`~.codec`: interface of the allocator to values of items and members,
* :mod:`~.state`: snapshot of the mirror with derived values,
* :mod:`~.solver`, on :mod:`~.push_relabel`, :mod:`~.placement` and :mod:`~.moves`: desired
  assignments,
* :mod:`~.converge`: one round from current towards desired assignments,
* :mod:`~.txn`: writing a round in few transactions,
* :mod:`~.loop`: rounds as the cluster changes,
* :mod:`~.metrics`,
* :mod:`~.description` and :mod:`~.simulation`: what would move if the cluster changed.
"""

from gazette_sdk.cluster.allocator.loop import run_allocator
from gazette_sdk.cluster.allocator.solver import solve
from gazette_sdk.cluster.allocator.state import Allocation, State

__all__ = ["Allocation", "State", "run_allocator", "solve"]

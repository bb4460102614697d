"""Allocator: assignment of a cluster's items to its members.

Every member runs the loop; the one announced first computes and writes assignments. The solver
computes the desired assignments; convergence reaches them in steps that never remove a replica that
is needed.

In reading order:

- ``state``: Snapshot of the mirror, with values that the allocator derives from it (allocator
  section 3).
- ``moves``: Placements of items on members, and the moves from the current to the desired one.
- ``solver``: Solver of the desired assignments of items to members (allocator sections 6 and 7).
- ``loop``: The allocation loop: every member runs it, one of them leads (allocator section 5).
- ``simulation``: Simulation of the allocator: what would move if a cluster changed.
"""

from gazette_sdk.cluster.allocator.loop import run_allocator
from gazette_sdk.cluster.allocator.solver import solve
from gazette_sdk.cluster.allocator.state import Allocation, State

__all__ = ["Allocation", "State", "run_allocator", "solve"]

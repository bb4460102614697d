"""State of a cluster: Etcd, its local mirror, membership, the allocator.

The state of a cluster is stored in Etcd under one prefix: items (journals), members (brokers) and
assignments of items to members. Each process announces itself there under a lease, mirrors the
prefix in memory, and follows its changes; the member announced first also allocates.

In reading order:

* :mod:`~gazette_sdk.cluster.etcd_server`, :mod:`~gazette_sdk.cluster.etcd_server`,
  :mod:`~gazette_sdk.cluster.child_process`: a real etcd as a child process, for embedded and local
  clusters,
* :mod:`~gazette_sdk.cluster.etcd`: the Etcd client, on
  :mod:`~gazette_sdk.cluster.etcd_messages` and :mod:`~gazette_sdk.cluster.etcd_connections`,
* :mod:`~gazette_sdk.cluster.etcd_connections`, :mod:`~gazette_sdk.cluster.etcd_connections`: the
  members of Etcd, and the connection in use,
* :mod:`~gazette_sdk.cluster.lease`, :mod:`~gazette_sdk.cluster.lease`: when a lease is
  renewed, on which thread, and over which connection,
* :mod:`~gazette_sdk.cluster.keyspace`: the mirror of a prefix,
* :mod:`~gazette_sdk.cluster.keys`, :mod:`~gazette_sdk.cluster.items`: items, members and
  assignments; their keys, their mirror and its look-ups,
* :mod:`~gazette_sdk.cluster.broker_keys`, :mod:`~gazette_sdk.cluster.consumer_keys`: the values
  that brokers and consumers store there,
* :mod:`~gazette_sdk.cluster.membership`: a process's lease and announcement,
* :mod:`~gazette_sdk.cluster.items`, :mod:`~gazette_sdk.cluster.items`: who this process is
  in the cluster, and what it runs for the items that are assigned to it,
* :mod:`~gazette_sdk.cluster.items`: creation, change and deletion of items,
* :mod:`~gazette_sdk.cluster.allocator`: assignment of items to members,
* :mod:`~gazette_sdk.cluster.membership`: all of them together, for one process.
"""

from gazette_sdk.cluster.allocator import Allocation, run_allocator
from gazette_sdk.cluster.broker_keys import BrokerKeySpace, JournalAllocation
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Compare, Delete, Get, Put
from gazette_sdk.cluster.etcd_server import EtcdServer, find_etcd
from gazette_sdk.cluster.items import AssignmentEntry, ItemEntry, ItemKeySpace, MemberEntry
from gazette_sdk.cluster.keyspace import Change, Entry, KeySpace
from gazette_sdk.cluster.membership import Membership

__all__ = [
    "Allocation",
    "AssignmentEntry",
    "BrokerKeySpace",
    "Change",
    "Compare",
    "Delete",
    "Entry",
    "Etcd",
    "EtcdServer",
    "Get",
    "ItemEntry",
    "ItemKeySpace",
    "JournalAllocation",
    "KeySpace",
    "MemberEntry",
    "Membership",
    "Put",
    "find_etcd",
    "run_allocator",
]

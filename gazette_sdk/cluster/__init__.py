"""State of a cluster: Etcd, its local mirror, membership, the allocator.

The state of a cluster is stored in Etcd under one prefix: items (journals), members (brokers) and
assignments of items to members. Each process announces itself there under a lease, mirrors the
prefix in memory, and follows its changes; the member announced first also allocates.

In reading order:

- ``child_process``: Child process that dies with this process, also if that is killed.
- ``etcd_messages``: Requests to Etcd and its responses, as plain dataclasses.
- ``etcd_connections``: Connections to the members of an Etcd cluster: one is in use, another one
  replaces it.
- ``etcd_server``: Embedded etcd: a child process, for embedded clusters and tests.
- ``lease``: Lease of a process in Etcd: its life on the clock since boot, and its renewals.
- ``etcd``: Etcd client: ranges at a revision, transactions, leases, watches.
- ``keyspace``: KeySpace: a local mirror of all keys of Etcd under one prefix (allocator section
  2).
- ``items``: Items of a cluster: their key space, their changes, and those of this process.
- ``allocator``: Allocator: assignment of a cluster's items to its members.
- ``verification``: Verification of members that may be dead, brokers and consumers: a dead one
  loses its lease.
- ``broker_keys``: Keys and values of brokers in Etcd: journals, brokers, and assignments of
  journals to brokers.
- ``consumer_keys``: Keys and values of consumers in Etcd: shards, processes, and assignments of
  shards to processes.
- ``membership``: Membership of a process in its cluster (allocator section 4).
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

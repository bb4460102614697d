"""Cluster on this machine, with a process for each broker and each member of Etcd.

``gazette dev --brokers 3`` and :func:`gazette_sdk.testing.gazette_cluster` use it. In contrast to
:mod:`gazette_sdk.embedded`, brokers can be killed, paused and drained one by one.

- ``cluster``: the cluster
- ``broker``: a broker of it
- ``etcd_members``: its Etcd
- ``control``: control of a running cluster by other processes
- ``view``: waiting for a condition of its keys in Etcd
- ``ports``: ports that no outgoing connection takes
- ``names``: names of brokers over a directory
- ``leases``: leases of brokers that do not serve any more
- ``specs``: specs that are applied at any revision
"""

from gazette_sdk.local_cluster.broker import BrokerState, LocalBroker
from gazette_sdk.local_cluster.cluster import LocalCluster
from gazette_sdk.local_cluster.etcd_members import EtcdMembers

__all__ = ["BrokerState", "EtcdMembers", "LocalBroker", "LocalCluster"]

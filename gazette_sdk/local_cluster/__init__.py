"""Cluster on this machine, with a process for each broker and each member of Etcd.

``gazette dev --brokers 3`` and :func:`gazette_sdk.testing.gazette_cluster` use it. In contrast to
:mod:`gazette_sdk.embedded`, brokers can be killed, paused and drained one by one.

- ``broker``: Broker of a local cluster: one ``gazette serve`` process at a time.
- ``cluster``: Local cluster: Etcd, brokers in processes of their own, a fragment store in files,
  and its control by other processes.
"""

from gazette_sdk.local_cluster.broker import BrokerState, LocalBroker
from gazette_sdk.local_cluster.cluster import EtcdMembers, LocalCluster

__all__ = ["BrokerState", "EtcdMembers", "LocalBroker", "LocalCluster"]

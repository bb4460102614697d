"""Views of a cluster: what people and tools see of it, and no data path needs.

- ``heads``: Heads of journals: how far they reach, what of them is in no store, how fast they grow.
- ``page``: Pages of journals: sorted, searched and filtered, with the numbers by state; and the
  calls of these views.
- ``events``: Events of a cluster: members, journals, routes, stores, and warnings of logs.
- ``problems``: Problems of a cluster, as they follow from facts about it. Pure.
- ``members``: Members of the cluster and of its applications, as Etcd and they themselves describe
  them.
- ``report``: Report of what needs attention in the cluster.
- ``health``: Health of a broker: metrics of its cluster, its spools and its stores, and checks of
  them.

A view costs nothing while no one asks. It has no rights of its own: other brokers are asked with
the caller's token (:mod:`gazette_sdk.transport.member_calls`).
"""

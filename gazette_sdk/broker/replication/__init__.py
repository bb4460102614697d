"""Replication of appends from a primary to its peers (broker section 6).

- ``peer_stream``: A Replicate stream of the primary to one peer, with the answers that the peer
  owes.
- ``pipeline``: The primary's side of replication: one stream to every other member, and the local
  spool.
- ``replicate``: The replica's side of replication: a primary's stream, applied to our spool
  (section 6.3).
"""

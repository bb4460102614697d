"""Replication of appends from a primary to its peers (broker section 6).

- `pipeline`: the primary: one stream to every peer, and the local spool.
- `pipeline_life`: start and end of a pipeline.
- `replicate`: the peer: one stream applied to its spool.
"""

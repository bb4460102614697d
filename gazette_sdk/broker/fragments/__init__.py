"""Fragments of a journal: their index, listings of the stores, and uploads.

- `index`: the fragment and file of every offset.
- `refresh`: lists the stores periodically.
- `persister`: uploads closed spools.
- `rpc`: answers ListFragments and FragmentStoreHealth.
"""

"""Fragments of a journal at rest: index, refresh from stores, uploads.

- `index`: which offsets are in which fragment.
- `refresh`: lists the stores.
- `persister`: uploads closed spools.
- `rpc`: ListFragments and FragmentStoreHealth.
"""

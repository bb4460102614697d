"""Fragments of a journal: their index, listings of the stores, and uploads.

- ``index``: Fragment index of a replica: the place of every byte of its journal (broker section
  10).
- ``persister``: Persister: uploads closed fragments to their stores (broker section 12).
- ``refresh``: Refresh of a replica's index from its journal's stores, and retention (broker
  section 11).
"""

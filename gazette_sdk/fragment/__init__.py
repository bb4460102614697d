"""Content of journals at rest: fragments in object stores.

A journal's bytes are persisted in fragments: files named by journal, offsets and SHA-1 sum,
compressed or not, in a store of the journal's spec. Brokers write them and read them back; clients
may read them directly.

In reading order:

- ``codecs``: Compression codecs of fragments (protocol section 7).
- ``stores``: Fragment stores: one class per kind of store, constructed from its URL.
- ``content``: Reading and verifying a stored fragment (protocol section 7, broker section 13).
- ``listing``: Listing of a journal's stored fragments (broker section 11).
- ``registry``: Registry of a process's fragment stores, one for each URL, and their health
  (broker section 15).
"""

from __future__ import annotations

from gazette_sdk.fragment.codecs import CODECS, CodecError, Compressor, compressor, decompressor
from gazette_sdk.fragment.content import CoverSet, FragmentReader, decode_fragment, open_fragment
from gazette_sdk.fragment.listing import list_fragments, open_url
from gazette_sdk.fragment.registry import StoreHealth, StoreRegistry, check_delete, check_store
from gazette_sdk.fragment.stores import Store, StoredContent, StoredObject, open_store

__all__ = [
    "CODECS",
    "CodecError",
    "Compressor",
    "CoverSet",
    "FragmentReader",
    "Store",
    "StoreHealth",
    "StoreRegistry",
    "StoredContent",
    "StoredObject",
    "check_delete",
    "check_store",
    "compressor",
    "decode_fragment",
    "decompressor",
    "list_fragments",
    "open_fragment",
    "open_store",
    "open_url",
]

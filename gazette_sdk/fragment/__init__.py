"""Content of journals at rest: fragments in object stores.

A journal's bytes end up in fragments: files named by journal, offsets and SHA-1 sum, compressed or
not, in a store that its spec names. Brokers write them there and read them back; clients read them
directly; after that nobody but the store needs to keep them.

In reading order:

- :mod:`~gazette_sdk.fragment.codecs`: compressing and decompressing a fragment's content.
- :mod:`~gazette_sdk.fragment.cover`: which of many overlapping fragments holds an offset.
- :mod:`~gazette_sdk.fragment.stores`: directories, S3, Google and Azure behind one small interface.
- :mod:`~gazette_sdk.fragment.listing`: which fragments of a journal are stored.
- :mod:`~gazette_sdk.fragment.content`: reading a stored fragment, held to its name.
- :mod:`~gazette_sdk.fragment.remote`: reading one by the URL that a broker gave.
- :mod:`~gazette_sdk.fragment.health`: whether a store works, checked in the background.
- :mod:`~gazette_sdk.fragment.registry`: the stores of a process, one for each URL.
- :mod:`~gazette_sdk.fragment.metrics`: what stores count.
"""

from __future__ import annotations

from gazette_sdk.fragment.codecs import CODECS, CodecError, Compressor, compressor, decompressor
from gazette_sdk.fragment.content import FragmentReader, decode_fragment, open_fragment
from gazette_sdk.fragment.cover import CoverSet
from gazette_sdk.fragment.health import StoreHealth, check_delete, check_store
from gazette_sdk.fragment.listing import list_fragments, walk_stores
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.fragment.remote import open_url
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
    "walk_stores",
]

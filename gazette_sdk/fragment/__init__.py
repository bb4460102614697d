"""Content of journals at rest: fragments in object stores.

A journal's bytes are persisted in fragments: files named by journal, offsets and SHA-1 sum,
compressed or not, in a store of the journal's spec. Brokers write them and read them back; clients
may read them directly.

In reading order:

- :mod:`~gazette_sdk.fragment.codecs`: compression and decompression of a fragment's content.
- :mod:`~gazette_sdk.fragment.content`: look-up of an offset among overlapping fragments.
- :mod:`~gazette_sdk.fragment.stores`: directories, S3, Google and Azure behind one small interface.
- :mod:`~gazette_sdk.fragment.listing`: listing of a journal's stored fragments.
- :mod:`~gazette_sdk.fragment.content`: reading and verifying a stored fragment.
- :mod:`~gazette_sdk.fragment.listing`: reading a fragment by the URL that a broker sent;
  :mod:`~gazette_sdk.fragment.content`: its GET, which follows no redirect.
- :mod:`~gazette_sdk.fragment.health`: health checks of a store in the background.
- :mod:`~gazette_sdk.fragment.registry`: the stores of a process, one for each URL.
- :mod:`~gazette_sdk.fragment.metrics`: metrics of stores.
"""

from __future__ import annotations

from gazette_sdk.fragment.codecs import CODECS, CodecError, Compressor, compressor, decompressor
from gazette_sdk.fragment.content import CoverSet, FragmentReader, decode_fragment, open_fragment
from gazette_sdk.fragment.health import StoreHealth, check_delete, check_store
from gazette_sdk.fragment.listing import list_fragments, open_url
from gazette_sdk.fragment.registry import StoreRegistry
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

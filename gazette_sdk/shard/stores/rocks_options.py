"""Options of RocksDB with which its files can be recorded, and played by Gazette's consumers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path

from rocksdict import BlockBasedOptions, Cache, DBRecoveryMode, Options, Rdict, WriteOptions

__all__ = ["Configure", "open_database", "write_options"]

Configure = Callable[[Options], None]
"""Changes the options of a database and of each family before it is opened."""

WRITE_BUFFER_BYTES = 16 << 20
"""Bounds the write-ahead log that is read again when a database is opened (0.26 s for 6 MB)."""
MANIFEST_BYTES_MAX = 128 << 10
"""A small manifest bounds what has to be recorded anew; see `recovery log` 10.2."""
BLOCK_CACHE_BYTES = 64 << 20
"""Cache of blocks of table files, shared by all databases of the process."""
_BLOOM_BITS_PER_KEY = 10
# Format 6, the default, cannot be opened by RocksDB 7, with which Gazette is built.
TABLE_FORMAT_VERSION = 5


def open_database(
    directory: Path, families: Iterable[str], configure: Configure | None = None
) -> Rdict:
    """Open or create a database.

    Args:
        directory: of the database.
        families: names of column families to create where they are missing.
        configure: changes options of the application's choice. Options on which recording depends
            are set after it.

    Raises:
        Exception: the database cannot be opened; rocksdict has no more specific class.
    """
    names = {"default", *families}
    if (directory / "CURRENT").exists():
        names.update(Rdict.list_cf(str(directory)))
    # Families which are not named here would be opened with the options of the OPTIONS file.
    return Rdict(
        str(directory),
        _options(configure),
        column_families={name: _options(configure) for name in sorted(names)},
    )


def write_options() -> WriteOptions:
    """Return options with which a write fails instead of waiting for flushes.

    A waiting write would hold the interpreter's lock, and so delay every task of the process.
    """
    options = WriteOptions()
    options.no_slowdown = True
    return options


@functools.cache
def _block_cache() -> Cache:
    return Cache(BLOCK_CACHE_BYTES)


def _options(configure: Configure | None) -> Options:
    options = Options(raw_mode=True)
    options.set_write_buffer_size(WRITE_BUFFER_BYTES)
    options.set_keep_log_file_num(1)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    table = BlockBasedOptions()
    table.set_format_version(TABLE_FORMAT_VERSION)
    table.set_block_cache(_block_cache())
    table.set_bloom_filter(_BLOOM_BITS_PER_KEY, False)
    options.set_block_based_table_factory(table)
    if configure is not None:
        configure(options)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_recycle_log_file_num(0)
    options.set_max_manifest_file_size(MANIFEST_BYTES_MAX)
    options.set_wal_recovery_mode(DBRecoveryMode.point_in_time())
    return options

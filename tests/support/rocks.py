"""RocksDB with buffers so small that it flushes and compacts all the time."""

from __future__ import annotations

from rocksdict import Options


def tiny_buffers(options: Options) -> None:
    options.set_write_buffer_size(64 << 10)
    options.set_level_zero_file_num_compaction_trigger(2)
    options.set_target_file_size_base(64 << 10)
    options.set_max_bytes_for_level_base(256 << 10)
    options.set_arena_block_size(4 << 10)

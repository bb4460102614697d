"""The commands of ``gazette allocator``."""

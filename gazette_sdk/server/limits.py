"""Limits that the operating system sets to a process, and a server has to lift."""

from __future__ import annotations

import logging
import resource

__all__ = ["raise_open_files_limit"]

_log = logging.getLogger(__name__)


def raise_open_files_limit() -> int:
    """Raise the soft limit of open files to the hard one; returns what it is now.

    A broker holds two files for each journal that is written to. The usual soft limit of 1,024
    is meant for programs that use ``select``; ours do not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            _log.warning("the limit of %d open files stays: %s", soft, error)
            return soft
    return hard

"""Limits of the operating system which a server has to raise."""

from __future__ import annotations

import logging
import resource

__all__ = ["raise_open_files_limit"]

_log = logging.getLogger(__name__)


def raise_open_files_limit() -> int:
    """Raise the soft limit of open files to the hard one, and return it.

    A broker holds two files for each journal that is written to. The usual soft limit of 1,024
    is meant for programs that use ``select``; ours do not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            _log.warning("cannot raise the limit of %d open files: %s", soft, error)
            return soft
    return hard

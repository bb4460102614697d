"""Default directory of a broker's spools: private, and of one broker of one cluster.

::

    TMP/gazette-spools-UID/CLUSTER-PREFIX/ZONE,SUFFIX

The temporary directory is shared by all users of the machine. So everything below it must belong to
this user, and be closed to all others: whoever prepares the directory could otherwise read content,
or have the broker serve content of theirs as recovered.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path
from urllib.parse import quote

from gazette_sdk.errors import ConfigurationError

__all__ = ["make_default_root"]

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_default_root(cluster_id: int, prefix: str, zone: str, suffix: str) -> Path:
    """Return the default directory of a broker's spools, and make it where it is missing. Blocks.

    Args:
        cluster_id: of the Etcd cluster.
        prefix: prefix of the cluster's keys in Etcd.
        zone: of the broker.
        suffix: of the broker.

    Raises:
        ConfigurationError: it is not private, or cannot be made.
    """
    path = Path(tempfile.gettempdir()).resolve()
    digest = hashlib.sha256(prefix.encode()).hexdigest()[:16]
    names = (
        f"gazette-spools-{os.geteuid()}",
        f"{cluster_id:016x}-{digest}",
        f"{quote(zone, safe='')},{quote(suffix, safe='')}",
    )
    try:
        _check_parent(path)
        for name in names:
            path /= name
            _make_private(path)
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from error
    return path


def _check_parent(path: Path) -> None:
    """Check that no other user can rename what this user makes in a directory."""
    found = path.stat()
    if found.st_uid not in {0, os.geteuid()}:
        raise _unusable(path, "another user owns it")
    if found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
        raise _unusable(path, "other users may rename what is in it")


def _make_private(path: Path) -> None:
    """Make a directory, or check the one that exists. Symbolic links are not followed."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise _unusable(path, "it is no directory") from None
        if found.st_uid != os.geteuid():
            raise _unusable(path, "another user owns it") from None
        if found.st_mode & _OTHERS:
            raise _unusable(path, "other users may use it (chmod 700 closes it)") from None


def _unusable(path: Path, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{path} cannot be used for spools: {why}; set --broker.spool-dir to a directory of the "
        "broker's own"
    )

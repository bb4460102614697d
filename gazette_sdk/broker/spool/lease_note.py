"""Lease note: which lease the last process over a spool directory held.

A broker that was killed leaves its member key in Etcd until its lease ends. The next broker over
the same spool directory holds the directory's lock, so the process of the note has ended: its lease
can be revoked, and the next broker is announced at once.

The note is one line in ``ROOT/lease``: id of the Etcd cluster, lease, inode of ``ROOT/lock``, and
the member key. A copy of the directory has another lock, so its note does not count: the process
over the original may be alive.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.errors import EtcdError, LeaseLostError

__all__ = ["LeaseNote", "NotedLease", "revoke_noted"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NotedLease:
    """Lease of a member of a cluster.

    Attributes:
        cluster_id: of the Etcd cluster.
        key: the member's key.
        lease: its lease.
    """

    cluster_id: int
    key: bytes
    lease: int


class LeaseNote:
    """File of a spool directory that names the lease of the last process over it.

    Only the process that holds the directory's lock may use it.

    Args:
        root: the spool directory.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / "lease"
        self._lock_path = root / "lock"

    def read(self) -> NotedLease | None:
        """Return the note; ``None`` if there is none, or it is of another directory. Blocks."""
        try:
            cluster_id, lease, lock, key = self._path.read_bytes().rstrip(b"\n").split(b" ", 3)
            noted = NotedLease(int(cluster_id, 16), key, int(lease, 16))
            return noted if int(lock) == self._lock_path.stat().st_ino else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _log.warning("%s cannot be used, and is written anew: %s", self._path, error)
            return None

    def write(self, noted: NotedLease) -> None:
        """Replace the note. Blocks.

        Without it the next start waits for the end of the lease, so an error is only logged.
        """
        fresh = self._path.with_suffix(".new")
        try:
            lock = self._lock_path.stat().st_ino
            line = f"{noted.cluster_id:x} {noted.lease:x} {lock} ".encode() + noted.key + b"\n"
            fresh.write_bytes(line)
            fresh.rename(self._path)
        except OSError as error:
            _log.warning("the lease cannot be noted in %s: %s", self._path, error)


async def revoke_noted(etcd: Etcd, noted: NotedLease | None) -> bool:
    """Revoke the lease of a note, if the member's key is still attached to it.

    Args:
        etcd: the client.
        noted: the note.

    Returns:
        True if it was revoked. An error is logged: then the lease ends by itself.
    """
    if noted is None or noted.cluster_id != etcd.cluster_id:
        return False
    key = noted.key.decode("utf-8", "backslashreplace")
    try:
        found = (await etcd.range(noted.key)).entries
        if not found or found[0].lease != noted.lease:
            return False
        await etcd.revoke(noted.lease)
    except LeaseLostError:
        return False  # it ended meanwhile
    except EtcdError as error:
        _log.warning(
            "the lease of the earlier process was not revoked, its key %s stays until the lease "
            "ends: %s",
            key,
            error,
        )
        return False
    _log.info("revoked the lease of an earlier process: %s is free", key)
    return True

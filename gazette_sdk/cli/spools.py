"""``gazette spools``: care of the spool directory of a broker on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

from gazette_sdk.broker.spool.directory import accept_etcd
from gazette_sdk.cli.command import Invocation

__all__ = ["accept"]


def accept(invocation: Invocation) -> None:
    """Accept the present Etcd for the withheld spools of a directory."""
    (name,) = invocation.arguments
    count = accept_etcd(Path(name))
    if count == 0:
        sys.stdout.write(f"nothing is withheld in {name}\n")
    else:
        sys.stdout.write(
            f"accepted; the broker over {name} compares the spools of {count} journals with what "
            "others have, and uses them: see its log\n"
        )

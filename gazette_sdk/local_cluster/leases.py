"""Leases of brokers that do not serve any more."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing, suppress

from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.errors import LeaseLostError

__all__ = ["revoke_leases"]


async def revoke_leases(endpoint: str, leases: Iterable[int] | None = None) -> None:
    """Revoke leases whose holders are dead; by default all leases.

    Otherwise a cluster would wait until they expire.

    Args:
        endpoint: URL of Etcd.
        leases: ids of the leases.
    """
    async with aclosing(await Etcd.connect(endpoint)) as etcd:
        for lease in await etcd.leases() if leases is None else leases:
            with suppress(LeaseLostError):  # it has just expired
                await etcd.revoke(lease)

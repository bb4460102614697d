"""Addresses of an Etcd cluster: those of the configuration, and those of its member list.

Nothing here does I/O. :class:`Endpoints` says which addresses to dial, in which order.

A configured address comes first: it may lead through a proxy or a load balancer, and it can be
reached. An address of the member list is used for a member that no configured address led to so
far. It may be unreachable, or even be an address of another cluster (``http://localhost:2379`` is
Etcd's default), so whoever dials compares the id of the cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from gazette_sdk.errors import ConfigurationError

__all__ = ["Endpoints", "split_addresses"]


def split_addresses(text: str) -> tuple[str, ...]:
    """Return the addresses of a comma separated list, without repetitions.

    Raises:
        ConfigurationError: there is none.
    """
    addresses = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not addresses:
        raise ConfigurationError(
            "no Etcd address is given: give one or more of http://HOST:PORT, separated by commas"
        )
    return addresses


class Endpoints:
    """Addresses of the members of one Etcd cluster, in the order in which they are to be dialled.

    Args:
        configured: addresses of the configuration; not empty.
    """

    def __init__(self, configured: Iterable[str]) -> None:
        self.configured = tuple(configured)
        self._is_tls = all(address.startswith("https://") for address in self.configured)
        self._member_of: dict[str, int] = {}
        self._members: dict[int, tuple[str, ...]] = {}
        self._failed: dict[str, None] = {}

    def copy(self) -> Endpoints:
        """Return the same addresses, with what is known of them now."""
        copy = Endpoints(self.configured)
        copy._member_of = dict(self._member_of)
        copy._members = dict(self._members)
        copy._failed = dict(self._failed)
        return copy

    @property
    def unknown(self) -> list[str]:
        """Configured addresses of which it is not known yet which member they lead to."""
        return [address for address in self.configured if address not in self._member_of]

    def reached(self, address: str, member_id: int) -> None:
        """Note that a member answered at an address."""
        self._member_of[address] = member_id
        self._failed.pop(address, None)

    def failed(self, address: str) -> None:
        """Note that an address does not answer: it is dialled last from now on."""
        self._failed.pop(address, None)
        self._failed[address] = None

    def replace_members(self, members: Mapping[int, Iterable[str]]) -> None:
        """Replace the member list.

        Args:
            members: id of each member, and its client URLs. Members without URLs have not started
                yet. An empty list is ignored.
        """
        if members:
            self._members = {member: tuple(urls) for member, urls in members.items()}

    def candidates(self) -> list[str]:
        """Return the addresses to dial, in order: those that failed come last, oldest first."""
        reached = {self._member_of.get(address) for address in self.configured}
        learned = [
            url
            for member, urls in sorted(self._members.items())
            if member not in reached
            for url in urls
            if self._is_usable(url)
        ]
        every = list(dict.fromkeys((*self.configured, *learned)))
        fresh = [address for address in every if address not in self._failed]
        return fresh + [address for address in self._failed if address in every]

    def _is_usable(self, url: str) -> bool:
        """Return True if a learned URL may be dialled: only with TLS where TLS is configured."""
        parts = urlsplit(url)
        return parts.scheme == ("https" if self._is_tls else "http") and bool(parts.hostname)

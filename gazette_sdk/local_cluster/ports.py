"""Ports of servers which are started again at the same port."""

from __future__ import annotations

import random
import socket

from gazette_sdk.errors import ConfigurationError

__all__ = ["reserve_port"]

PORTS = range(20_000, 32_000)
"""Below the ports of outgoing connections: none takes the port of a killed server."""

ATTEMPTS = 200
"""Number of ports that are tried."""

_chance = random.SystemRandom()
_reserved: set[int] = set()


def reserve_port() -> int:
    """Return a free port of the loopback address that this process has not returned before.

    Raises:
        ConfigurationError: none was found.
    """
    for _ in range(ATTEMPTS):
        port = _chance.choice(PORTS)
        if port in _reserved:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _reserved.add(port)
        return port
    raise ConfigurationError(
        f"no free port was found from {PORTS.start} to {PORTS.stop}; stop other servers"
    )

"""Connections of driver and executors, with the credentials of their environment.

Options of a data frame stand in plans and in Spark's web pages, so no secret is an option.
"""

from __future__ import annotations

import os

from gazette_sdk.transport import Transport, connect
from gazette_sdk.transport.wires.tls import Tls

__all__ = ["open_transport"]

_BROKER_SCHEMES = ("http://", "https://", "unix://")


def open_transport(url: str | None) -> Transport:
    """Return a transport to brokers or to a fragment store. Opens no connection yet.

    Calls to brokers have the token of ``BROKER_AUTH_TOKEN``, or one signed with the keys of
    ``BROKER_AUTH_KEYS``, and the certificates of ``BROKER_TRUSTED_CA_FILE``, ``BROKER_CERT_FILE``
    and ``BROKER_CERT_KEY_FILE``. Stores have credentials of their own.

    Args:
        url: URL of a broker or of a fragment store; None for that of ``GAZETTE_ADDRESS``.

    Raises:
        ConfigurationError: the URL or a credential is malformed.
    """
    if url is not None and not url.startswith(_BROKER_SCHEMES):
        return connect(url)
    given = {
        name: os.environ.get(f"BROKER_{name.upper()}", "")
        for name in ("trusted_ca_file", "cert_file", "cert_key_file")
    }
    return connect(
        url,
        tls=Tls(**given) if any(given.values()) else None,
        auth_keys=os.environ.get("BROKER_AUTH_KEYS", ""),
        auth_token=os.environ.get("BROKER_AUTH_TOKEN", ""),
    )

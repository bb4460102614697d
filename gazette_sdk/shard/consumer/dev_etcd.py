"""Address of the Etcd of ``gazette dev``, which its broker tells."""

from __future__ import annotations

import json
from http import HTTPStatus
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from gazette_sdk.errors import ConfigurationError

__all__ = ["etcd_of_dev"]

TIMEOUT_S = 5.0
"""Limit of asking a broker for its Etcd."""


def etcd_of_dev(address: str, *, remedy: str, broker_remedy: str) -> str:
    """Ask the broker of ``gazette dev``, or of an embedded cluster, for the address of its Etcd.

    Args:
        address: address of the broker; empty for a broker without one.
        remedy: text that says how to give the address of another Etcd.
        broker_remedy: text that says how to give the address of another broker.

    Raises:
        ConfigurationError: the broker is another one, or does not answer.
    """
    if not address.startswith(("http://", "https://")):
        where = f"the broker at {address}" if address else "a broker without an address"
        raise ConfigurationError(f"{where} is not asked for its Etcd; {remedy}")
    try:
        with urlopen(f"{address.rstrip('/')}/v1/dev", timeout=TIMEOUT_S) as response:  # noqa: S310 - http only
            found: object = json.load(response).get("etcd")
    except HTTPError as error:
        if error.code in {HTTPStatus.NOT_FOUND, HTTPStatus.NOT_IMPLEMENTED}:
            raise ConfigurationError(
                f"the broker at {address} does not tell its Etcd, only that of `gazette dev` does"
                f"; {remedy}"
            ) from error
        raise ConfigurationError(f"the broker at {address} answers {error}; {remedy}") from error
    except (URLError, OSError, ValueError, AttributeError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        text = reason.strerror if isinstance(reason, OSError) and reason.strerror else reason
        raise ConfigurationError(
            f"the broker at {address} cannot be asked for its Etcd: {text}; start it, as by "
            f"`gazette dev`, or {broker_remedy}"
        ) from error
    if not isinstance(found, str) or not found:
        raise ConfigurationError(f"the broker at {address} does not tell its Etcd; {remedy}")
    return found

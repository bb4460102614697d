"""Connections of driver and executors, with the credentials of their environment.

Options of a data frame stand in plans and in Spark's web pages, so no secret is an option.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from gazette_sdk.errors import CallCancelledError, DeadlineExceededError, GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport import Transport, connect
from gazette_sdk.transport.append.append import TRANSIENT
from gazette_sdk.transport.backoff import pause
from gazette_sdk.transport.listing import list_journals
from gazette_sdk.transport.wire import Tls
from gazette_spark.options import BROKER_SCHEMES

__all__ = ["STOPPING", "list_patiently", "open_transport", "patiently"]

T = TypeVar("T")

FAILING_MAX_S = 30.0
"""Time for which a call of the driver that fails is made again."""

STOPPING: tuple[type[GazetteError], ...] = (CallCancelledError, DeadlineExceededError)
"""Errors of a broker that was reached, and stops or is late."""

TRANSIENT_OR_STOPPING = (*TRANSIENT, *STOPPING)
"""Errors of brokers that cannot be reached, are too few, or stop."""


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
    if url is not None and not url.lower().startswith(BROKER_SCHEMES):
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


async def list_patiently(transport: Transport, selector: pb.LabelSelector | str) -> pb.ListResponse:
    """Return the journals that match a selector, also where a broker stops meanwhile.

    Raises:
        GazetteError: they could not be listed. Without any broker this is told at once.
    """
    return await patiently(lambda: list_journals(transport, selector), STOPPING)


async def patiently(
    call: Callable[[], Awaitable[T]],
    repeated: tuple[type[GazetteError], ...] = TRANSIENT_OR_STOPPING,
) -> T:
    """Return the result of a call, which is made again for half a minute while it fails.

    Args:
        call: makes the call.
        repeated: errors after which it is made again.

    Raises:
        GazetteError: it failed for so long, or by another error.
    """
    ends_at = time.monotonic() + FAILING_MAX_S
    for attempt in itertools.count():
        try:
            return await call()
        except repeated:
            if time.monotonic() >= ends_at:
                raise
        await pause(attempt)
    raise AssertionError

"""From a URL to a transport."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any, Protocol, cast
from urllib.parse import parse_qsl, urlsplit

from gazette_sdk.errors import ConfigurationError, ValidationError
from gazette_sdk.transport.base import Transport

__all__ = ["ADDRESS_VARIABLE", "DEFAULT_ADDRESS", "connect"]

ADDRESS_VARIABLE = "GAZETTE_ADDRESS"
"""Environment variable with the broker's address that is used when none is given."""

DEFAULT_ADDRESS = "http://localhost:8080"

DEFAULT_WIRE = "auto"
"""Wire to brokers where neither URL nor options name one."""

_WIRES = {
    "auto": "gazette_sdk.transport.wires.stream.choice:ChosenTransport",
    "grpc": "gazette_sdk.transport.wires.grpc.transport:GrpcTransport",
    "stream": "gazette_sdk.transport.wires.stream.transport:StreamTransport",
}
"""Transports to brokers by wire; named by import path, as one process seldom needs all."""


class _Connect(Protocol):
    def __call__(self, url: str, **options: Any) -> Transport: ...


def _connect_broker(url: str, **options: Any) -> Transport:
    """Connect to a broker, over the wire that the URL's ``wire`` argument or option asks for."""
    parts = urlsplit(url)
    arguments = dict(parse_qsl(parts.query, keep_blank_values=True))
    wire = options.pop("wire", None) or arguments.pop("wire", DEFAULT_WIRE)
    if wire not in _WIRES:
        raise ConfigurationError(f"{url}: wire={wire} is not one of {', '.join(_WIRES)}")
    if arguments:
        raise ConfigurationError(
            f"{url}: unknown argument {next(iter(arguments))!r}; an address takes `wire` only"
        )
    path = parts.path if parts.scheme == "unix" else parts.path.rstrip("/")
    if path and parts.scheme != "unix":
        raise ConfigurationError(f"{url}: the address of a broker has no path ({parts.path})")
    address = f"{parts.scheme}://{parts.netloc}{path}"
    try:
        return _resolve(_WIRES[wire])(address, **options)
    except ValidationError as error:
        raise ConfigurationError(f"{url} is not the address of a broker: {error}") from error
    except TypeError as error:
        raise ConfigurationError(f"{url}: {error}") from error


_SCHEMES: dict[str, Callable[..., Transport] | str] = {
    "http": _connect_broker,
    "https": _connect_broker,
    "unix": _connect_broker,
    "embedded": "gazette_sdk.embedded:connect",
    **dict.fromkeys(
        ("file", "s3", "gs", "azure", "azure-ad", "az", "abfs", "memory"),
        "gazette_sdk.transport.fragment_store:FragmentStoreTransport",
    ),
}
"""Opener of URLs of each scheme; named by import path where importing is costly, or the
module belongs to a floor above."""


def connect(url: str | None = None, **options: Any) -> Transport:
    """Return a transport to the journals behind ``url``. Opens no connection yet.

    Args:
        url: ``http(s)://host:port`` or ``unix:///path`` of any broker (``?wire=grpc`` forces the
            wire: ``grpc``, ``stream``, or ``auto`` for the better one that the broker speaks),
            ``embedded:///directory`` of a cluster inside this process, or the URL of a
            fragment store, whose journals are then read without any broker. Without one, that
            of the environment variable ``GAZETTE_ADDRESS``, else ``http://localhost:8080``.
        options: keyword arguments of the transport: see
            :class:`~gazette_sdk.transport.routing.routed.RoutedTransport` and
            :class:`~gazette_sdk.transport.fragment_store.FragmentStoreTransport`.

    Raises:
        ConfigurationError: the URL's scheme is unknown, or its address or options are wrong.
    """
    source = "the address"
    if url is None:
        url = os.environ.get(ADDRESS_VARIABLE, "").strip()
        source = ADDRESS_VARIABLE if url else "the default address"
        url = url or DEFAULT_ADDRESS
    scheme, separator, _ = url.partition("://")
    opener = _SCHEMES.get(scheme.lower()) if separator else None
    if opener is None:
        raise ConfigurationError(
            f"{source} {url!r} must begin with one of "
            f"{', '.join(f'{known}://' for known in _SCHEMES)} (a broker's is like "
            f"{DEFAULT_ADDRESS})"
        )
    try:
        _ = urlsplit(url).port
    except ValueError as error:
        raise ConfigurationError(f"{source} {url!r} is not a URL: {error}") from error
    return _resolve(opener)(url, **options)


def _resolve(opener: Callable[..., Transport] | str) -> _Connect:
    if not isinstance(opener, str):
        return opener
    module, _, name = opener.partition(":")
    return cast("_Connect", getattr(importlib.import_module(module), name))

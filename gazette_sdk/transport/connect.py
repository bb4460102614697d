"""From a URL to a transport."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Never, TypeAlias, cast
from urllib.parse import parse_qsl, urlsplit

from gazette_sdk.errors import ConfigurationError, ValidationError
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.router import DEFAULT_SIZE, DEFAULT_TTL_S
from gazette_sdk.transport.wire import CONNECT_TIMEOUT_S, MAX_RECEIVE_BYTES, RECONNECT_BACKOFF_MAX_S

if TYPE_CHECKING:
    from gazette_sdk.protocol.authorization import Authorizer
    from gazette_sdk.transport.wire import Tls


ADDRESS_VARIABLE = "GAZETTE_ADDRESS"
"""Environment variable with the broker's address that is used when none is given."""

DEFAULT_ADDRESS = "http://localhost:8080"

DEFAULT_WIRE = "auto"
"""Wire to brokers where neither URL nor options name one."""

REFRESH_INTERVAL_S = 10.0
"""Age from which the listing of a fragment store is made again. A reader that follows a journal
there sees new fragments with this delay."""

WireName: TypeAlias = Literal["auto", "grpc", "stream"]
"""Protocol between a client and a broker; ``auto`` is the better one that the broker speaks."""

_WIRES = {
    "auto": "gazette_sdk.transport.stream.wire:ChosenTransport",
    "grpc": "gazette_sdk.transport.grpc:GrpcTransport",
    "stream": "gazette_sdk.transport.stream.wire:StreamTransport",
}
"""Transports to brokers by wire; named by import path, as one process seldom needs all."""

_EMBEDDED = "gazette_sdk.embedded:connect"
_FRAGMENT_STORE = "gazette_sdk.transport.fragment_store:FragmentStoreTransport"

_Opener: TypeAlias = Callable[..., Transport]


def connect(
    url: str | None = None,
    *,
    wire: WireName | None = None,
    zone: str = "",
    cache_size: int = DEFAULT_SIZE,
    cache_ttl_s: float = DEFAULT_TTL_S,
    tls: Tls | None = None,
    auth_keys: str = "",
    auth_token: str = "",
    max_receive_bytes: int = MAX_RECEIVE_BYTES,
    reconnect_backoff_max_s: float = RECONNECT_BACKOFF_MAX_S,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    read_chunk_bytes: int | None = None,
    call_timeout_s: float = 0.0,
    authorizer: Authorizer | None = None,
    allow_plaintext_tokens: bool = False,
    content_type: str = "",
    refresh_interval_s: float = REFRESH_INTERVAL_S,
    port: int = 0,
    host: str = "localhost",
    brokers: int = 1,
    **unknown: Never,
) -> Transport:
    """Return a transport to the journals after ``url``. Opens no connection yet.

    Each option belongs to one kind of URL. An option of another kind may be given only with its
    default value.

    Args:
        url: ``http(s)://host:port`` or ``unix:///path`` of any broker (``?wire=grpc`` forces the
            wire), or of several, separated by commas, of which the first that is reached is used;
            ``embedded:///directory`` of a cluster inside this process, or the URL of a
            fragment store, whose journals are then read without any broker. Without one, that
            of the environment variable ``GAZETTE_ADDRESS``, else ``http://localhost:8080``.
        wire: brokers: protocol, ``"grpc"``, ``"stream"``, or ``"auto"`` for the better one that
            the broker speaks; None for that of the URL, by default ``"auto"``.
        zone: brokers: the client's own zone; reads prefer brokers in it.
        cache_size: brokers: number of journals whose routes are remembered; 0 lets brokers
            forward every call.
        cache_ttl_s: brokers: age in seconds from which a remembered route is not used any more.
        tls: brokers: certificates, for ``https``; None for the system's authorities.
        auth_keys: brokers: base64 keys of the cluster; the first signs a token for each call.
        auth_token: brokers: a ready-made bearer token; used only where no keys are given.
        max_receive_bytes: brokers: greatest message to accept, in bytes.
        reconnect_backoff_max_s: brokers: longest wait, in seconds, between two dials of a lost
            connection.
        connect_timeout_s: brokers: time in seconds that a call waits for a broker to be
            reachable.
        read_chunk_bytes: brokers: content in bytes per message of a read; None for what suits
            the wire.
        call_timeout_s: brokers: time limit, in seconds, of an append, or of a call of one request
            and one response; 0 for none.
        authorizer: brokers: signs the tokens, instead of ``auth_keys`` and ``auth_token``.
        allow_plaintext_tokens: brokers: send tokens also to brokers without TLS that a route
            names, where the address is ``https``; without it such a call is refused, unless the
            broker is on loopback.
        content_type: fragment stores: label ``content-type`` of the journals, for readers of
            messages.
        refresh_interval_s: fragment stores: age in seconds from which a listing is made again.
        port: ``embedded``: public port of the first broker; 0 takes a free one.
        host: ``embedded``: address to bind and to advertise.
        brokers: ``embedded``: number of brokers. More options has
            :class:`~gazette_sdk.embedded.EmbeddedCluster`.
        unknown: no other option exists.

    Raises:
        ConfigurationError: the URL's scheme is unknown, its address is malformed, or an option is
            unknown, wrong, or of another kind of URL. The text names the nearest known option.
    """
    if unknown:
        raise ConfigurationError(_unknown_option(next(iter(unknown))))
    source = "the address"
    if url is None:
        url = os.environ.get(ADDRESS_VARIABLE, "").strip()
        source = ADDRESS_VARIABLE if url else "the default address"
        url = url or DEFAULT_ADDRESS
    if not isinstance(url, str):
        raise ConfigurationError(f"{url!r} is no address: give a text, such as {DEFAULT_ADDRESS!r}")
    kind = _kind_of(url, source)
    options: dict[str, dict[str, object]] = {
        "a broker": {
            "wire": wire,
            "zone": zone,
            "cache_size": cache_size,
            "cache_ttl_s": cache_ttl_s,
            "tls": tls,
            "auth_keys": auth_keys,
            "auth_token": auth_token,
            "max_receive_bytes": max_receive_bytes,
            "reconnect_backoff_max_s": reconnect_backoff_max_s,
            "connect_timeout_s": connect_timeout_s,
            "read_chunk_bytes": read_chunk_bytes,
            "call_timeout_s": call_timeout_s,
            "authorizer": authorizer,
            "allow_plaintext_tokens": allow_plaintext_tokens,
        },
        "a fragment store": {
            "content_type": content_type,
            "refresh_interval_s": refresh_interval_s,
        },
        "an embedded cluster": {"port": port, "host": host, "brokers": brokers},
    }
    _check_others_are_defaults(url, kind, options)
    _check_types(options[kind])
    return _OPENERS[kind](url, options[kind])


# ------------------------------------------------------------------- options


def _unknown_option(name: str) -> str:
    nearest = difflib.get_close_matches(name, _DEFAULTS, n=1, cutoff=0.5)
    if nearest:
        return f"connect() has no option {name!r}; the nearest is {nearest[0]!r}"
    return f"connect() has no option {name!r}; use one of {', '.join(_DEFAULTS)}"


def _check_others_are_defaults(
    url: str, kind: str, options: Mapping[str, Mapping[str, object]]
) -> None:
    """Check that options of other kinds of URLs have their default values.

    Raises:
        ConfigurationError: one has not.
    """
    for other, each in options.items():
        for name, value in each.items():
            if other != kind and value != _DEFAULTS[name]:
                raise ConfigurationError(
                    f"{url}: {name}={value!r} is an option of {other}, but the URL is that of"
                    f" {kind}, which takes {', '.join(options[kind])}; leave {name} off"
                )


def _check_types(options: Mapping[str, object]) -> None:
    """Check that options are texts, numbers and booleans where their defaults are.

    Raises:
        ConfigurationError: one is not.
    """
    for name, value in options.items():
        default = _DEFAULTS[name]
        if type(default) not in _TYPES:
            continue  # it is None by default
        wanted, word = _TYPES[type(default)]
        is_bool = isinstance(value, bool)  # which is an int, too
        if not isinstance(value, wanted) or is_bool != (wanted == (bool,)):
            raise ConfigurationError(
                f"connect({name}={value!r}): it has another type; give {word}, such as {default!r}"
            )


_TYPES: dict[type, tuple[tuple[type, ...], str]] = {
    str: ((str,), "a text"),
    bool: ((bool,), "True or False"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
}
"""Types of a value and their word, by the type of the option's default."""

_DEFAULTS: dict[str, Any] = dict(connect.__kwdefaults__ or {})

# --------------------------------------------------------------------- kinds


def _open_broker(url: str, options: Mapping[str, object]) -> Transport:
    """Open a broker, over the wire that the option or the URL's argument ``wire`` names."""
    texts = url.partition("?")[0].split(",")
    first, *others = [text.strip() for text in texts if text.strip()]
    parts = urlsplit(first)
    arguments = dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))
    wire = options["wire"] or arguments.pop("wire", DEFAULT_WIRE)
    if wire not in _WIRES:
        raise ConfigurationError(f"{url}: wire={wire} is not one of {', '.join(_WIRES)}")
    if arguments:
        raise ConfigurationError(
            f"{url}: unknown argument {next(iter(arguments))!r}; an address takes `wire` only"
        )
    address = _address_of(url, first)
    with_scheme = (each if "://" in each else f"{parts.scheme}://{each}" for each in others)
    further = [_address_of(url, each) for each in with_scheme]
    taken = {name: value for name, value in options.items() if name != "wire"}
    try:
        return _imported(_WIRES[str(wire)])(",".join([address, *further]), **taken)
    except ValidationError as error:
        raise ConfigurationError(f"{url} is not the address of a broker: {error}") from error


def _address_of(url: str, text: str) -> str:
    """Return the address of one broker, of a URL that may name several.

    Raises:
        ConfigurationError: it has a path.
    """
    parts = urlsplit(text)
    path = parts.path if parts.scheme == "unix" else parts.path.rstrip("/")
    if path and parts.scheme != "unix":
        raise ConfigurationError(f"{url}: the address of a broker has no path ({parts.path})")
    return f"{parts.scheme}://{parts.netloc}{path}"


_OPENERS: dict[str, Callable[[str, Mapping[str, object]], Transport]] = {
    "a broker": _open_broker,
    "a fragment store": lambda url, options: _imported(_FRAGMENT_STORE)(url, **options),
    "an embedded cluster": lambda url, options: _imported(_EMBEDDED)(url, **options),
}
"""Opener of URLs of each kind. Modules that are costly to import, or belong to a floor above, are
imported on first use."""

_SCHEMES = {
    **dict.fromkeys(("http", "https", "unix"), "a broker"),
    "embedded": "an embedded cluster",
    **dict.fromkeys(
        ("file", "s3", "gs", "azure", "azure-ad", "az", "abfs", "hdfs", "webhdfs", "memory"),
        "a fragment store",
    ),
}
"""Kinds of URLs by scheme."""


def _kind_of(url: str, source: str) -> str:
    """Return the kind of a URL.

    Raises:
        ConfigurationError: its scheme is unknown, or it is no URL.
    """
    scheme, separator, _ = url.partition("://")
    kind = _SCHEMES.get(scheme.lower()) if separator else None
    if kind is None:
        raise ConfigurationError(
            f"{source} {url!r} must begin with one of "
            f"{', '.join(f'{known}://' for known in _SCHEMES)} (a broker's is like "
            f"{DEFAULT_ADDRESS})"
        )
    try:
        for each in url.split(",") if kind == "a broker" else (url,):
            _ = urlsplit(each.strip() if "://" in each else f"//{each.strip()}").port
    except ValueError as error:
        raise ConfigurationError(f"{source} {url!r} is not a URL: {error}") from error
    return kind


def _imported(place: str) -> _Opener:
    """Return an object by its import path."""
    module, _, name = place.partition(":")
    return cast("_Opener", getattr(importlib.import_module(module), name))

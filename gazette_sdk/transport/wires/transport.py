"""Transports to brokers over a wire: their common options."""

from __future__ import annotations

import abc
from dataclasses import dataclass

from gazette_sdk.transport.routing.route_cache import DEFAULT_SIZE, DEFAULT_TTL_S
from gazette_sdk.transport.routing.routed import (
    CONNECT_TIMEOUT_S,
    MAX_RECEIVE_BYTES,
    RECONNECT_BACKOFF_MAX_S,
    RoutedTransport,
)
from gazette_sdk.transport.wires.base import Wire
from gazette_sdk.transport.wires.tls import Tls

__all__ = ["BrokerTransport", "WireOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WireOptions:
    """Options of the connections of a transport; see :class:`BrokerTransport`."""

    address: str
    tls: Tls
    max_receive_bytes: int
    reconnect_backoff_max_s: float
    connect_timeout_s: float
    read_chunk_bytes: int | None
    call_timeout_s: float


class BrokerTransport(RoutedTransport):
    """Journals over connections to brokers. Subclasses choose the wire.

    Args:
        address: endpoint URL of the service: ``http://host:port``, ``https://host:port`` or
            ``unix:///path``.
        zone: the client's own zone; reads prefer brokers in it.
        cache_size: journals whose routes are remembered; 0 lets brokers proxy every call.
        cache_ttl_s: age in seconds from which a remembered route is not used any more.
        tls: certificates, for ``https``.
        auth_keys: base64 keys of the cluster; the first signs a token for each call.
        auth_token: a ready-made bearer token; used only where no keys are given.
        allow_plaintext_tokens: send tokens also to brokers without TLS that a route names, where
            the service address is ``https``. By default such a call raises
            :class:`~gazette_sdk.errors.ConfigurationError`, unless the broker is on loopback.
        max_receive_bytes: greatest message to accept.
        reconnect_backoff_max_s: longest wait between two dials of a lost connection; brokers
            among themselves use 0.5.
        connect_timeout_s: time that a call waits for a broker to be reachable.
        read_chunk_bytes: content per message or frame to ask of brokers that can choose; None
            for what suits the wire.
        call_timeout_s: time limit of an append, or a call of one request and one response; 0
            for none. The broker has it, too.

    Raises:
        ValidationError: the address is not an endpoint URL.
        ConfigurationError: the keys are malformed.
    """

    def __init__(
        self,
        address: str,
        *,
        zone: str = "",
        cache_size: int = DEFAULT_SIZE,
        cache_ttl_s: float = DEFAULT_TTL_S,
        tls: Tls | None = None,
        auth_keys: str = "",
        auth_token: str = "",
        allow_plaintext_tokens: bool = False,
        max_receive_bytes: int = MAX_RECEIVE_BYTES,
        reconnect_backoff_max_s: float = RECONNECT_BACKOFF_MAX_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        read_chunk_bytes: int | None = None,
        call_timeout_s: float = 0.0,
    ) -> None:
        options = WireOptions(
            address=address,
            tls=tls or Tls(),
            max_receive_bytes=max_receive_bytes,
            reconnect_backoff_max_s=reconnect_backoff_max_s,
            connect_timeout_s=connect_timeout_s,
            read_chunk_bytes=read_chunk_bytes,
            call_timeout_s=call_timeout_s,
        )
        super().__init__(
            address,
            self._make_wire(options),
            zone=zone,
            cache_size=cache_size,
            cache_ttl_s=cache_ttl_s,
            auth_keys=auth_keys,
            auth_token=auth_token,
            allow_plaintext_tokens=allow_plaintext_tokens,
        )

    @staticmethod
    @abc.abstractmethod
    def _make_wire(options: WireOptions) -> Wire:
        """Make the wire. Opens no connection yet.

        Raises:
            ValidationError: the address is not an endpoint URL.
        """

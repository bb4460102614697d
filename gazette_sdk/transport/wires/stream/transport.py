"""Journals over the stream transport: same messages and semantics as over gRPC."""

from __future__ import annotations

from gazette_sdk.transport.routing.route_cache import DEFAULT_SIZE, DEFAULT_TTL_S
from gazette_sdk.transport.routing.routed import (
    CONNECT_TIMEOUT_S,
    MAX_RECEIVE_BYTES,
    RECONNECT_BACKOFF_MAX_S,
    RoutedTransport,
)
from gazette_sdk.transport.wires.stream.blocking import BlockingClient
from gazette_sdk.transport.wires.stream.blocking_connection import BlockingDialer
from gazette_sdk.transport.wires.stream.calls import READ_CHUNK_BYTES, StreamWire
from gazette_sdk.transport.wires.stream.dialing import Dialer
from gazette_sdk.transport.wires.stream.pool import Pool
from gazette_sdk.transport.wires.tls import Tls

__all__ = ["StreamTransport"]


class StreamTransport(RoutedTransport):
    """Journals over the stream transport.

    Args:
        address: endpoint URL of the service: ``http://host:port``, ``https://host:port`` or
            ``unix:///path``.
        zone: the client's own zone; reads prefer brokers in it.
        cache_size: journals whose routes are remembered; 0 lets brokers proxy every call.
        cache_ttl_s: age in seconds from which a remembered route is not used any more.
        tls: certificates, for ``https``.
        auth_keys: base64 keys of the cluster; the first signs a token for each call.
        auth_token: a ready-made bearer token; used only where no keys are given.
        max_receive_bytes: greatest message to accept.
        reconnect_backoff_max_s: longest wait between two dials of a lost connection; brokers
            among themselves use 0.5.
        connect_timeout_s: what a call waits for a broker to be reachable.
        read_chunk_bytes: content per frame to ask for.
        call_timeout_s: what an append, or a call of one request and one response, may take; 0
            for any time. The broker is told, and gives up, too.

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
        max_receive_bytes: int = MAX_RECEIVE_BYTES,
        reconnect_backoff_max_s: float = RECONNECT_BACKOFF_MAX_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        read_chunk_bytes: int = READ_CHUNK_BYTES,
        call_timeout_s: float = 0.0,
    ) -> None:
        tls = tls or Tls()
        pool = Pool(
            address,
            Dialer(tls, connect_timeout_s),
            connect_timeout_s=connect_timeout_s,
            redial_max_s=reconnect_backoff_max_s,
        )
        wire = StreamWire(
            pool,
            blocking=BlockingClient(BlockingDialer(tls), call_timeout_s=call_timeout_s),
            max_receive_bytes=max_receive_bytes,
            read_chunk_bytes=read_chunk_bytes,
            call_timeout_s=call_timeout_s,
        )
        super().__init__(
            address,
            wire,
            zone=zone,
            cache_size=cache_size,
            cache_ttl_s=cache_ttl_s,
            auth_keys=auth_keys,
            auth_token=auth_token,
        )
        self._pool = pool

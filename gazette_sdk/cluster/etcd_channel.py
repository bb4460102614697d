"""Connection to Etcd: addresses, TLS, and classes of its failures."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import grpc.aio

from gazette_sdk.errors import (
    ConfigurationError,
    EtcdCompactedError,
    EtcdError,
    EtcdUnavailableError,
    LeaseLostError,
)

__all__ = [
    "EtcdNoLeaderError",
    "EtcdNotReachedError",
    "EtcdTokenError",
    "ThreadChannel",
    "error_of_status",
    "error_of_text",
    "is_of_connection",
    "open_channel",
    "open_thread_channel",
]

KEEPALIVE_LEAST_S = 5.5
"""Least pause between HTTP/2 pings on a silent connection. Etcd drops clients that ping more often
than every 5 s."""

_RETRYABLE = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.CANCELLED,
    }
)
"""Statuses caused by the connection or the server's state, not by the request."""


class EtcdNotReachedError(EtcdUnavailableError):
    """No member was reached, or none answered a read."""


class EtcdNoLeaderError(EtcdUnavailableError):
    """The member knows no leader of the cluster. It refused the request before doing anything."""


class EtcdTokenError(EtcdUnavailableError):
    """Etcd does not accept the token any more: the next call gets a new one."""


_TOKEN_ERRORS = ("invalid auth token", "revision of auth store is old")


class ThreadChannel:
    """Channel whose calls gRPC's own threads carry, for any event loop.

    grpc.aio serves one event loop of a process reliably, and another one renews leases. Of the
    interface of ``grpc.aio.Channel`` this has what renewals need: calls of one request and one
    response.

    Args:
        channel: the blocking channel.
    """

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._state = grpc.ChannelConnectivity.IDLE

    def get_state(self) -> grpc.ChannelConnectivity:
        """Return READY while it is connected, as far as its calls have shown."""
        return self._state

    def unary_unary(self, path: str, **codecs: Any) -> Callable[..., asyncio.Task[Any]]:
        """Return a function that makes a call on the running loop."""
        method = self._channel.unary_unary(path, **codecs)

        def call(request: Any, **options: Any) -> asyncio.Task[Any]:
            work = self._call(method, request, options)
            return asyncio.get_running_loop().create_task(work)

        return call

    async def _call(self, method: Any, request: Any, options: dict[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def report(_: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the call was cancelled
                loop.call_soon_threadsafe(ended.set)

        answer = method.future(request, **options)
        answer.add_done_callback(report)
        try:
            await ended.wait()
        finally:
            answer.cancel()
        code, details = answer.code(), answer.details() or ""
        if code is grpc.StatusCode.OK:
            self._state = grpc.ChannelConnectivity.READY
            return answer.result()
        if is_of_connection(code, details):
            self._state = grpc.ChannelConnectivity.TRANSIENT_FAILURE
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(code, nothing, nothing, details=details)

    async def close(self) -> None:
        """Close the channel, and end its calls."""
        self._channel.close()


def open_channel(
    address: str,
    *,
    answer_timeout_s: float,
    cert_file: Path | str | None = None,
    cert_key_file: Path | str | None = None,
    trusted_ca_file: Path | str | None = None,
) -> grpc.aio.Channel:
    """Return a channel to Etcd on the running loop, which connects when it is used.

    Args:
        address: ``http://HOST:PORT``, ``https://HOST:PORT`` or ``unix:///PATH``.
        answer_timeout_s: longest time until the answer to a ping of HTTP/2, after which the
            connection counts as broken. The pings are three times as far apart.
        cert_file: client certificate (PEM), for https.
        cert_key_file: its key.
        trusted_ca_file: certificates of the authorities to trust instead of the system's.

    Raises:
        ConfigurationError: the address or a file can not be used.
    """
    target, is_tls = _dial_target(address)
    options = _options(answer_timeout_s)
    if is_tls:
        credentials = _credentials(cert_file, cert_key_file, trusted_ca_file)
        return grpc.aio.secure_channel(target, credentials, options)
    return grpc.aio.insecure_channel(target, options)


def open_thread_channel(
    address: str,
    *,
    answer_timeout_s: float,
    cert_file: Path | str | None = None,
    cert_key_file: Path | str | None = None,
    trusted_ca_file: Path | str | None = None,
) -> ThreadChannel:
    """Return the same for any event loop, as :func:`open_channel` does."""
    target, is_tls = _dial_target(address)
    options = _options(answer_timeout_s)
    if is_tls:
        credentials = _credentials(cert_file, cert_key_file, trusted_ca_file)
        return ThreadChannel(grpc.secure_channel(target, credentials, options))
    return ThreadChannel(grpc.insecure_channel(target, options))


def _options(answer_timeout_s: float) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", int(max(KEEPALIVE_LEAST_S, 3 * answer_timeout_s) * 1000)),
        ("grpc.keepalive_timeout_ms", int(answer_timeout_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.enable_http_proxy", 0),
        # Each client has its own connection, so that they break independently.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def _dial_target(address: str) -> tuple[str, bool]:
    """Return the gRPC target of an address, and True if it uses TLS."""
    url = urlsplit(address)
    if url.scheme == "unix" and url.path:
        return f"unix:{url.path}", False
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigurationError(
            f"{address!r} is no Etcd address: give http://HOST:PORT, https://HOST:PORT "
            "or unix:///PATH"
        )
    try:
        port = url.port or 2379
    except ValueError as error:
        raise ConfigurationError(f"{address!r} is no Etcd address: {error}") from error
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return f"{host}:{port}", url.scheme == "https"


def _credentials(
    cert_file: Path | str | None,
    cert_key_file: Path | str | None,
    trusted_ca_file: Path | str | None,
) -> grpc.ChannelCredentials:
    def read(path: Path | str | None) -> bytes | None:
        try:
            return Path(path).read_bytes() if path else None
        except OSError as error:
            raise ConfigurationError(f"a certificate for Etcd can not be read: {error}") from error

    return grpc.ssl_channel_credentials(
        root_certificates=read(trusted_ca_file),
        private_key=read(cert_key_file),
        certificate_chain=read(cert_file),
    )


def error_of_status(code: grpc.StatusCode, details: str, what: str) -> EtcdError:
    """Return the error for a failed call. Etcd's texts are part of its interface."""
    text = f"{what}: {details or code.name}"
    if "has been compacted" in details:
        return EtcdCompactedError(text)
    if "requested lease not found" in details:
        return LeaseLostError(text)
    if "no leader" in details:
        return EtcdNoLeaderError(text)
    if any(reason in details for reason in _TOKEN_ERRORS):
        return EtcdTokenError(text)
    if code in _RETRYABLE:
        return EtcdUnavailableError(text)
    return EtcdError(text)


def is_of_connection(code: grpc.StatusCode, details: str) -> bool:
    """Return True if a call failed by its connection, and not by an answer of Etcd."""
    return (
        code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN)
        and "etcdserver:" not in details
    )


def error_of_text(reason: str) -> EtcdError:
    """Return the error for the reason of a cancelled watch."""
    if "no leader" in reason:
        return EtcdNoLeaderError(reason)
    if "compacted" in reason:
        return EtcdCompactedError(reason)
    return EtcdError(reason)

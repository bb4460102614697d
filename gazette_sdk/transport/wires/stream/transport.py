"""Transports over the stream wire, and over the better wire of each broker."""

from __future__ import annotations

from gazette_sdk.protocol import urls
from gazette_sdk.transport.wires.base import Wire
from gazette_sdk.transport.wires.stream.blocking import BlockingClient
from gazette_sdk.transport.wires.stream.calls import READ_CHUNK_BYTES, StreamWire
from gazette_sdk.transport.wires.stream.choice import HELLO_TIMEOUT_S, ChosenWire
from gazette_sdk.transport.wires.stream.dialer import Dialer
from gazette_sdk.transport.wires.stream.dialing import TlsContext
from gazette_sdk.transport.wires.stream.pool import Pool
from gazette_sdk.transport.wires.stream.pools import Pools
from gazette_sdk.transport.wires.transport import BrokerTransport, WireOptions

__all__ = ["ChosenTransport", "StreamTransport"]


class StreamTransport(BrokerTransport):
    """Journals over the stream transport."""

    @staticmethod
    def _make_wire(options: WireOptions) -> Wire:
        return _stream_wire(options, options.connect_timeout_s)


class ChosenTransport(BrokerTransport):
    """Journals over the stream transport where a broker speaks it, else over gRPC."""

    @staticmethod
    def _make_wire(options: WireOptions) -> Wire:
        def make_grpc() -> Wire:
            # The import costs a tenth of a second, and is often not needed.
            from gazette_sdk.transport.wires.grpc.transport import GrpcWire  # noqa: PLC0415

            return GrpcWire(options)

        return ChosenWire(options.address, _stream_wire(options, HELLO_TIMEOUT_S), make_grpc)


def _stream_wire(options: WireOptions, hello_timeout_s: float) -> StreamWire:
    if not options.address.startswith("unix:///"):
        urls.validate_endpoint(options.address)  # a bad address is reported where it was given
    tls = TlsContext(options.tls)
    dialer = Dialer(tls, hello_timeout_s)

    def make_pool() -> Pool:
        return Pool(
            options.address,
            dialer,
            connect_timeout_s=options.connect_timeout_s,
            redial_max_s=options.reconnect_backoff_max_s,
        )

    return StreamWire(
        Pools(make_pool),
        BlockingClient(tls, call_timeout_s=options.call_timeout_s),
        max_receive_bytes=options.max_receive_bytes,
        read_chunk_bytes=options.read_chunk_bytes or READ_CHUNK_BYTES,
        call_timeout_s=options.call_timeout_s,
    )

"""Connections of tools to brokers and consumer processes, and their options (cli section 2)."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

from gazette_sdk.cli.program import TimeoutSettings
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.server.options import Group, Option, Seconds, Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from google.protobuf.message import Message

    from gazette_sdk.cli.program import Invocation
    from gazette_sdk.cluster.etcd import Etcd
    from gazette_sdk.protocol.authorization import Authorizer
    from gazette_sdk.protocol.rules import Rpc
    from gazette_sdk.server.settings import EtcdSettings
    from gazette_sdk.shard.consumer.client import ShardClient
    from gazette_sdk.transport.base import Transport


DEFAULT_ADDRESS = "http://localhost:8080"
"""Address of a broker, or of a consumer process, where none is given."""

_SCHEMES = {"http", "https", "unix"}

_CONSUMER_REMEDY = (
    "give the address of one of its processes with --consumer.address or CONSUMER_ADDRESS"
)

CONNECT_TIMEOUT_S = 8.0
"""A call fails if no broker answers for this long."""


class ZoneSettings(TimeoutSettings):
    """Zone of the tool, and bound of its waits."""

    zone: Annotated[
        str, Option("Zone", "Availability zone of this tool; brokers of the same are preferred")
    ] = "local"


class ConnectionSettings(Settings):
    """Address of a server process, by default a broker, and credentials toward it."""

    address: Annotated[
        str, Option("Address", "Address of a broker: http(s)://host:port or unix:///path")
    ] = DEFAULT_ADDRESS
    cert_file: Annotated[str, Option("CertFile", "Client certificate, PEM")] = ""
    cert_key_file: Annotated[str, Option("CertKeyFile", "Its key, PEM")] = ""
    trusted_ca_file: Annotated[
        str,
        Option(
            "TrustedCAFile",
            "Authorities that sign the servers' certificates, PEM",
        ),
    ] = ""
    auth_keys: Annotated[
        str,
        Option(
            "AuthKeys",
            "Base64 keys of the servers: the first signs requests",
        ),
    ] = ""
    auth_token: Annotated[
        str,
        Option(
            "AuthToken",
            "Ready-made bearer token, used where no keys are given",
        ),
    ] = ""

    def connect_options(self) -> dict[str, Any]:
        """Return the arguments of :func:`~gazette_sdk.transport.connect.connect`."""
        from gazette_sdk.transport.wire import Tls  # noqa: PLC0415 - lazy

        return {
            "auth_keys": self.auth_keys,
            "auth_token": self.auth_token,
            "tls": Tls(
                trusted_ca_file=self.trusted_ca_file,
                cert_file=self.cert_file,
                cert_key_file=self.cert_key_file,
            ),
        }

    def authorizer(self) -> Authorizer | None:
        """Return what signs the calls, or has the token for them; None if there is neither."""
        from gazette_sdk.protocol.authorization import (  # noqa: PLC0415 - lazy
            FixedToken,
            authority_for,
        )

        if self.auth_keys.strip():
            return authority_for(self.auth_keys)
        return FixedToken(self.auth_token) if self.auth_token else None


class BrokerClientSettings(ConnectionSettings):
    """Connection to brokers, with a route cache."""

    cache_size: Annotated[
        int,
        Option(
            "Size",
            "Number of journals whose routes are cached, to call their brokers directly and read "
            "fragments from stores; 0 sends all calls to the address",
            long="cache.size",
            env="CACHE_SIZE",
        ),
    ] = 0
    cache_ttl_s: Annotated[
        Seconds,
        Option("TTL", "Lifetime of a cached route", long="cache.ttl", env="CACHE_TTL"),
    ] = 60.0


class ConsumerConnectionSettings(ConnectionSettings):
    """Address of a consumer process, and credentials toward it."""

    address: Annotated[
        str,
        Option(
            "Address",
            "Address of a process of the application: http(s)://host:port or unix:///path; by "
            "default also that of the only application beside `gazette dev`",
        ),
    ] = DEFAULT_ADDRESS


ZONE = Group("journals", ZoneSettings, env_prefix="")
BROKER_CLIENT = Group(
    "journals.Broker", BrokerClientSettings, prefix="broker.", env_prefix="BROKER_"
)

SHARDS_ZONE = Group("shards", ZoneSettings, env_prefix="")
SHARDS_BROKER_CLIENT = Group(
    "shards.Broker", BrokerClientSettings, prefix="broker.", env_prefix="BROKER_"
)
CONSUMER_CLIENT = Group(
    "shards.Consumer", ConsumerConnectionSettings, prefix="consumer.", env_prefix="CONSUMER_"
)

ADDRESS_ALIASES = {"BROKER_ADDRESS": "GAZETTE_ADDRESS"}
"""``GAZETTE_ADDRESS`` is used by the whole SDK; ``BROKER_ADDRESS`` by tools alone, and wins."""


def open_broker(
    invocation: Invocation,
    client: Group[BrokerClientSettings] = BROKER_CLIENT,
    zone: Group[ZoneSettings] = ZONE,
) -> Transport:
    """Return the transport that a tool's options describe. It opens no connection yet.

    Args:
        invocation: the call of the command.
        client: options of the connection.
        zone: options of the tool's zone.

    Raises:
        ConfigurationError: the address, a certificate or a key is invalid.
    """
    from gazette_sdk.transport.connect import connect  # noqa: PLC0415 - lazy

    options = invocation.settings(client)
    return connect(
        check_address(options.address, "with --broker.address or in GAZETTE_ADDRESS"),
        zone=invocation.settings(zone).zone,
        cache_size=options.cache_size,
        cache_ttl_s=options.cache_ttl_s,
        connect_timeout_s=CONNECT_TIMEOUT_S,
        **options.connect_options(),
    )


async def call_cluster(
    invocation: Invocation,
    rpc: Rpc,
    request: Message,
    timeout_s: float,
    *,
    address: str = "",
    rights: int | None = None,
) -> Any:
    """Return the answer of a broker about the cluster as a whole.

    Args:
        invocation: the call of the command.
        rpc: a call of one response.
        request: the request.
        timeout_s: longest time of the call.
        address: address of the broker; by default that of the options.
        rights: capabilities of a token that is signed for it; by default LIST and READ.

    Raises:
        CallError: there is none; the code is UNIMPLEMENTED for brokers of other implementations.
        ConfigurationError: the address, a certificate or a key is invalid.
    """
    from gazette_sdk.protocol import broker_pb2 as pb  # noqa: PLC0415 - lazy
    from gazette_sdk.protocol.authorization import Capability  # noqa: PLC0415 - lazy
    from gazette_sdk.transport.grpc import GrpcWire  # noqa: PLC0415 - lazy
    from gazette_sdk.transport.wire import (  # noqa: PLC0415 - lazy
        MAX_RECEIVE_BYTES,
        RECONNECT_BACKOFF_MAX_S,
        SERVICE,
        Destination,
        WireOptions,
    )

    options = invocation.settings(BROKER_CLIENT)
    given = check_address(options.address, "with --broker.address or in GAZETTE_ADDRESS")
    address = address or given
    rights = Capability.LIST | Capability.READ if rights is None else rights
    authorizer = options.authorizer()
    token = None
    if authorizer is not None:
        token = authorizer.header(rights, pb.LabelSelector(), timeout_s, time.time())
    wire = GrpcWire(
        WireOptions(
            address=address,
            tls=options.connect_options()["tls"],
            max_receive_bytes=MAX_RECEIVE_BYTES,
            reconnect_backoff_max_s=RECONNECT_BACKOFF_MAX_S,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            read_chunk_bytes=None,
            call_timeout_s=timeout_s,
        )
    )
    async with aclosing(wire):
        return await wire.call(Destination(rpc, None, SERVICE, address, token), request)


@asynccontextmanager
async def open_consumer(invocation: Invocation) -> AsyncIterator[ShardClient]:
    """Open a client of consumer processes that a tool's options describe.

    At the default address runs the broker of ``gazette dev``, if that runs. Then the processes
    beside it are looked up in its Etcd.

    Raises:
        ConfigurationError: the address, a certificate or a key is invalid; or several applications
            run beside ``gazette dev``, or none.
        EtcdError: the Etcd of ``gazette dev`` does not answer.
    """
    address = _consumer_address(invocation.settings(CONSUMER_CLIENT).address)
    if address == DEFAULT_ADDRESS:
        broker = invocation.settings(SHARDS_BROKER_CLIENT).address
        address = await find_consumer(broker) or address
    async with _consumer_client(invocation, address) as client:
        yield client


@asynccontextmanager
async def open_consumers(invocation: Invocation) -> AsyncIterator[dict[str, ShardClient]]:
    """Open a client for each address of consumer processes, which commas separate.

    At the default address these are a process of each application beside ``gazette dev``: none if
    no application runs there.

    Raises:
        ConfigurationError: an address, a certificate or a key is invalid.
        EtcdError: the Etcd of ``gazette dev`` does not answer.
    """
    given = invocation.settings(CONSUMER_CLIENT).address.split(",")
    addresses = [_consumer_address(each.strip()) for each in given]
    if addresses == [DEFAULT_ADDRESS]:
        broker = invocation.settings(SHARDS_BROKER_CLIENT).address
        found = await find_consumers(broker)
        addresses = addresses if found is None else list(found.values())
    async with AsyncExitStack() as stack:
        yield {
            each: await stack.enter_async_context(_consumer_client(invocation, each))
            for each in addresses
        }


@asynccontextmanager
async def open_etcd(settings: EtcdSettings, dial_timeout_s: float) -> AsyncIterator[Etcd]:
    """Open a client of Etcd that options describe.

    Args:
        settings: the options, with their secrets.
        dial_timeout_s: longest time until the first answer.

    Raises:
        EtcdError: Etcd does not answer.
    """
    etcd = await settings.config().connect(dial_timeout_s=dial_timeout_s)
    async with aclosing(etcd):
        yield etcd


def _consumer_address(text: str) -> str:
    remedy = "with --consumer.address or in CONSUMER_ADDRESS"
    return check_address(text, remedy, kind="a consumer process")


def _consumer_client(invocation: Invocation, address: str) -> ShardClient:
    from gazette_sdk.shard.consumer.client import ShardClient  # noqa: PLC0415 - lazy

    options = invocation.settings(CONSUMER_CLIENT)
    return ShardClient(
        address,
        authorizer=options.authorizer(),
        tls=options.connect_options()["tls"],
        connect_timeout_s=CONNECT_TIMEOUT_S,
    )


def check_address(address: str, remedy: str, *, kind: str = "a broker") -> str:
    """Return an address if its scheme is one of brokers and consumer processes.

    Args:
        address: the address that the user gave.
        remedy: text that says where to give another address.
        kind: who is at the address, in words.

    Raises:
        ConfigurationError: it has no such scheme.
    """
    scheme, separator, _ = address.partition("://")  # of several addresses the first one's
    if not separator or scheme.lower() not in _SCHEMES:
        raise ConfigurationError(
            f"{address!r} is not the address of {kind}; give one such as "
            f"http://localhost:8080 {remedy}"
        )
    return address


async def find_consumer(broker: str) -> str | None:
    """Return the endpoint of a process of the only application that runs beside ``gazette dev``.

    Args:
        broker: address of a broker.

    Returns:
        The endpoint; None if the broker is not of ``gazette dev``, or does not answer.

    Raises:
        ConfigurationError: no application runs, or there are several.
        EtcdError: Etcd does not answer.
    """
    endpoints = await find_consumers(broker)
    if endpoints is None:
        return None
    if not endpoints:
        raise none_runs(broker)
    if len(endpoints) > 1:
        running = ", ".join(f"{name} at {endpoint}" for name, endpoint in sorted(endpoints.items()))
        raise ConfigurationError(f"several applications run, {running}: {_CONSUMER_REMEDY}")
    [endpoint] = endpoints.values()
    return endpoint


async def find_consumers(broker: str) -> dict[str, str] | None:
    """Return the endpoint of a process of each application that runs beside ``gazette dev``.

    Args:
        broker: address of a broker.

    Returns:
        Endpoints by the names of applications; None if the broker is not of ``gazette dev``, or
        does not answer.

    Raises:
        EtcdError: Etcd does not answer.
    """
    from gazette_sdk.cluster.membership import etcd_of_dev  # noqa: PLC0415 - lazy

    try:
        address = await asyncio.to_thread(
            etcd_of_dev, broker, remedy=_CONSUMER_REMEDY, broker_remedy=_CONSUMER_REMEDY
        )
    except ConfigurationError:
        return None
    return await _endpoints(address)


def none_runs(broker: str) -> ConfigurationError:
    """Return the error that no application runs beside a broker of ``gazette dev``."""
    return ConfigurationError(
        f"no consumer process runs beside the broker at {broker}; start one with `gazette "
        f"run-consumer MODULE:APPLICATION`, or {_CONSUMER_REMEDY}"
    )


async def _endpoints(etcd: str) -> dict[str, str]:
    """Return a process' endpoint for each application with keys at their usual place."""
    from gazette_sdk.cluster.consumer_keys import (  # noqa: PLC0415 - lazy
        CONSUMERS_PREFIX,
        read_consumers,
    )
    from gazette_sdk.cluster.etcd import Etcd  # noqa: PLC0415 - lazy

    async with aclosing(await Etcd.connect(etcd)) as client:
        found = await read_consumers(client, CONSUMERS_PREFIX)
    return {name: specs[0].process_spec.endpoint for name, specs in found.items() if specs}

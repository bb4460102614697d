"""Tools as clients of brokers: their options, and how they call (cli section 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.server.options import Group, Option, Seconds, Settings

if TYPE_CHECKING:
    from gazette_sdk.cli.command import Invocation
    from gazette_sdk.transport.base import Transport

__all__ = [
    "ADDRESS_ALIASES",
    "BROKER_CLIENT",
    "ZONE",
    "BrokerClientSettings",
    "check_address",
    "open_broker",
]

_SCHEMES = {"http", "https", "unix"}

CONNECT_TIMEOUT_S = 8.0
"""A broker which does not answer for so long is told of, rather than waited for in silence."""


class ZoneSettings(Settings):
    """Where the tool runs."""

    zone: Annotated[
        str, Option("Zone", "Availability zone of this tool; brokers of the same are preferred")
    ] = "local"


class BrokerClientSettings(Settings):
    """How a client reaches brokers."""

    address: Annotated[
        str, Option("Address", "Address of a broker: http(s)://host:port or unix:///path")
    ] = "http://localhost:8080"
    cert_file: Annotated[str, Option("CertFile", "Client certificate, PEM")] = ""
    cert_key_file: Annotated[str, Option("CertKeyFile", "Its key, PEM")] = ""
    trusted_ca_file: Annotated[
        str, Option("TrustedCAFile", "Authorities that sign the brokers' certificates, PEM")
    ] = ""
    auth_keys: Annotated[
        str,
        Option("AuthKeys", "Base64 keys of the cluster: the first signs requests", secret=True),
    ] = ""
    auth_token: Annotated[
        str,
        Option("AuthToken", "Ready-made bearer token, used where no keys are given", secret=True),
    ] = ""
    cache_size: Annotated[
        int,
        Option(
            "Size",
            "Journals whose routes are remembered, to call their brokers directly and read "
            "fragments from stores; 0 sends everything through the address",
            long="cache.size",
        ),
    ] = 0
    cache_ttl_s: Annotated[
        Seconds, Option("TTL", "How long a route is remembered", long="cache.ttl")
    ] = 60.0


ZONE = Group("journals", ZoneSettings, env_prefix="")
BROKER_CLIENT = Group(
    "journals.Broker", BrokerClientSettings, prefix="broker.", env_prefix="BROKER_"
)

ADDRESS_ALIASES = {"BROKER_ADDRESS": "GAZETTE_ADDRESS"}
"""``GAZETTE_ADDRESS`` is what the whole SDK knows; ``BROKER_ADDRESS`` is a tool's own."""


def open_broker(invocation: Invocation) -> Transport:
    """The transport that a tool's options describe. Opens no connection yet.

    Raises:
        ConfigurationError: the address, a certificate or a key cannot be used.
    """
    from gazette_sdk.transport.connect import connect  # noqa: PLC0415 - lazy
    from gazette_sdk.transport.wires.tls import Tls  # noqa: PLC0415 - lazy

    client = invocation.settings(BROKER_CLIENT)
    return connect(
        check_address(client.address, "with --broker.address or in GAZETTE_ADDRESS"),
        zone=invocation.settings(ZONE).zone,
        cache_size=client.cache_size,
        cache_ttl_s=client.cache_ttl_s,
        tls=Tls(
            trusted_ca_file=client.trusted_ca_file,
            cert_file=client.cert_file,
            cert_key_file=client.cert_key_file,
        ),
        auth_keys=client.auth_keys,
        auth_token=client.auth_token,
        connect_timeout_s=CONNECT_TIMEOUT_S,
    )


def check_address(address: str, remedy: str) -> str:
    """An address that a tool was given, if it is of a scheme that brokers have.

    Args:
        address: as given.
        remedy: where to give another one, in words.

    Raises:
        ConfigurationError: it is not.
    """
    scheme, separator, _ = address.partition("://")
    if not separator or scheme.lower() not in _SCHEMES:
        raise ConfigurationError(
            f"{address!r} is not the address of a broker; give one such as "
            f"http://localhost:8080 {remedy}"
        )
    return address

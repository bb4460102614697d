"""``gazette console`` and ``gazctl console``: the web console by itself, and its address.

The settings of both are in this module, which imports little: the programs read it for their help.
"""

from __future__ import annotations

import sys
import time
import webbrowser
from typing import Annotated
from urllib.parse import quote

from pydantic import Field

from gazette_sdk.cli.client import BROKER_CLIENT, DEFAULT_ADDRESS, ZONE
from gazette_sdk.cli.program import Command, Invocation
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.server.options import Group, Option, Seconds, Settings
from gazette_sdk.server.settings import LOGGING, ConsoleContentSettings


class ConsoleSettings(ConsoleContentSettings):
    """Port of the console, and the servers that it reads."""

    host: Annotated[
        str,
        Option(
            "Host",
            "Host name of the console; empty or localhost serves this machine only, any other name "
            "serves on all interfaces",
            long="console.host",
            env="CONSOLE_HOST",
        ),
    ] = ""
    port: Annotated[
        str,
        Option(
            "Port",
            "Port to serve on; 0 for a random free port",
            long="console.port",
            env="CONSOLE_PORT",
        ),
    ] = "8090"
    server_cert_file: Annotated[
        str,
        Option(
            "ServerCertFile",
            "Server certificate, PEM; turns TLS on",
            long="console.server-cert-file",
            env="CONSOLE_SERVER_CERT_FILE",
        ),
    ] = ""
    server_cert_key_file: Annotated[
        str,
        Option(
            "ServerCertKeyFile",
            "Its key, PEM",
            long="console.server-cert-key-file",
            env="CONSOLE_SERVER_CERT_KEY_FILE",
        ),
    ] = ""
    broker_address: Annotated[
        str, Option("BrokerAddress", "URL of a broker", long="broker.address", env="BROKER_ADDRESS")
    ] = DEFAULT_ADDRESS
    consumer_address: Annotated[
        str,
        Option(
            "ConsumerAddress",
            "URL of a process of a consumer; empty to ask the broker for those in Etcd",
            long="consumer.address",
            env="CONSUMER_ADDRESS",
        ),
    ] = ""
    trusted_ca_file: Annotated[
        str,
        Option(
            "TrustedCAFile",
            "Authorities that sign the certificates of the broker and the consumer, PEM",
            long="broker.trusted-ca-file",
            env="BROKER_TRUSTED_CA_FILE",
        ),
    ] = ""


class ConsoleAddressSettings(Settings):
    """Options of ``gazctl console``."""

    opens: Annotated[bool, Option("Open", "Open it in a browser", long="open", in_ini=False)] = (
        False
    )
    duration_s: Annotated[
        Seconds,
        Option("Duration", "Lifetime of the token that the keys sign", in_ini=False),
        Field(gt=0),
    ] = 8 * 3600.0


CONSOLE = Group("Console", ConsoleSettings, env_prefix="")
CONSOLE_ADDRESS = Group("console", ConsoleAddressSettings)

SERVE = Command(
    "console",
    "Serve the web console, for a broker and a consumer elsewhere",
    "gazette_sdk.cli.console:run",
    (CONSOLE, LOGGING),
    details=(
        "Brokers and consumers have the console at /console/ of their own ports. This one serves "
        "it where browsers reach neither. It forwards what the page reads to the given addresses "
        "only, with the token of the page, and has no token of its own. What the page changes is "
        "forwarded only with a token. With masks, content of journals is forwarded masked only."
    ),
    examples=(
        ("gazette console --broker.address https://broker-1:8080", "at http://localhost:8090"),
        (
            "gazette console --console.port 9000 --consumer.address http://totals-0:8090",
            "with a consumer that the broker does not know",
        ),
    ),
    is_service=True,
)

ADDRESS = Command(
    "console",
    "Print the address of the web console, with a token that may list and read",
    "gazette_sdk.cli.console:address",
    (BROKER_CLIENT, ZONE, CONSOLE_ADDRESS),
    details=(
        "With keys (--broker.auth-keys) the token is signed here, for LIST and READ; a given token "
        "(--broker.auth-token) is used as it is. It stands in the fragment of the address, which "
        "browsers send to no server."
    ),
    examples=(
        ("gazctl console", "the broker at GAZETTE_ADDRESS"),
        ("gazctl console --open --duration 1h", "open it, for an hour"),
    ),
)


async def run(invocation: Invocation) -> None:
    """Serve the console until SIGTERM or Ctrl-C.

    Raises:
        ConfigurationError: an address or the port cannot be used.
    """
    from gazette_sdk.console.content import ConsoleContent  # noqa: PLC0415 - lazy
    from gazette_sdk.console.forward import serve_console  # noqa: PLC0415 - lazy
    from gazette_sdk.server.process import Server, StopSignal  # noqa: PLC0415 - lazy
    from gazette_sdk.server.tls import server_context  # noqa: PLC0415 - lazy
    from gazette_sdk.transport.wire import Tls  # noqa: PLC0415 - lazy

    settings = invocation.settings(CONSOLE)
    content = ConsoleContent.of(settings.mask, settings.descriptors)
    certificate, key = settings.server_cert_file, settings.server_cert_key_file
    is_local = settings.host in {"", "localhost", "127.0.0.1", "::1"}
    server = Server(
        host="localhost" if is_local else "",
        port=settings.port,
        advertise_host=settings.host or "localhost",
        tls=server_context(certificate, key, "") if certificate else None,
    )
    tls = Tls(trusted_ca_file=settings.trusted_ca_file).context(["http/1.1"])
    with StopSignal() as stop:
        async with serve_console(
            server, settings.broker_address, settings.consumer_address, tls, content
        ) as where:
            sys.stdout.write(f"The console of {settings.broker_address} is at {where}\n")
            sys.stdout.flush()
            await stop.wait()


def address(invocation: Invocation) -> None:
    """Print the address of a broker's console.

    Raises:
        ConfigurationError: browsers cannot reach the broker's address.
    """
    from gazette_sdk.protocol import broker_pb2 as pb  # noqa: PLC0415 - lazy
    from gazette_sdk.protocol.authorization import Authority, Capability  # noqa: PLC0415 - lazy

    client, settings = invocation.settings(BROKER_CLIENT), invocation.settings(CONSOLE_ADDRESS)
    if not client.address.startswith(("http://", "https://")):
        raise ConfigurationError(
            f"browsers cannot open {client.address}; run `gazette console --broker.address …`, or "
            "give the broker a port"
        )
    token = client.auth_token
    if client.auth_keys.strip():
        may = Capability.LIST | Capability.READ
        token = Authority(client.auth_keys).sign(
            may, pb.LabelSelector(), settings.duration_s, time.time()
        )
    where = f"{client.address.rstrip('/')}/console/" + (f"#token={quote(token)}" if token else "")
    sys.stdout.write(f"{where}\n")
    if settings.opens and not webbrowser.open(where):
        raise ConfigurationError("there is no browser here: open the printed address elsewhere")

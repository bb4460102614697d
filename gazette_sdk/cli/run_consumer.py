"""``gazette run-consumer``: a process that runs shards of an application (shard section 13)."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import sys
import sysconfig
import traceback
from contextlib import aclosing
from pathlib import Path
from typing import Any, NoReturn

import gazette_sdk
from gazette_sdk.cli.client import check_address
from gazette_sdk.cli.processes import options_of_members, run_members
from gazette_sdk.cli.program import FAILED, Invocation, report
from gazette_sdk.cli.serve import Identity, serve_until_drained
from gazette_sdk.cli.settings import (
    CONSUMER,
    CONSUMER_BROKER,
    CONSUMER_ETCD,
    CONSUMER_PROCESSES,
    ConsumerBrokerSettings,
    ConsumerEtcdSettings,
    ConsumerSettings,
)
from gazette_sdk.cluster.membership import etcd_of_dev
from gazette_sdk.errors import ConfigurationError, GazetteError
from gazette_sdk.protocol.authorization import authority_for
from gazette_sdk.server.logging import AUDIT
from gazette_sdk.server.options import Group, public_values
from gazette_sdk.server.process import (
    STOP_GRACE_S,
    ServiceManager,
    StopSignal,
    configured_server,
)
from gazette_sdk.server.settings import DEBUG, pet_name
from gazette_sdk.server.tls import check_files, file_root_of, with_secrets
from gazette_sdk.shard.application.application import Application
from gazette_sdk.shard.consumer.embedded import ServedConsumer
from gazette_sdk.shard.consumer.process import ConsumerConfig, StuckShardsError
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.connect import connect
from gazette_sdk.transport.wire import Tls

_log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.001
"""Longest time for which a busy worker keeps the interpreter from the event loop."""

QUIT_GRACE_S = 2.0
"""Limit of open calls when the process leaves without a drain."""

ETCD_REMEDY = "set --etcd.address (or ETCD_ADDRESS)"

BROKER_REMEDY = "set --broker.address (or GAZETTE_ADDRESS)"


async def run(invocation: Invocation) -> None:
    """Run shards until SIGTERM or SIGINT, then drain. After SIGQUIT there is no drain.

    Raises:
        GazetteError: the application cannot be imported, or the process cannot start or has
            failed, for example by losing its lease.

    With ``--processes`` there are several processes of shards, and this one is their parent.

    A process whose handlers do not return is ended here, with the status of a failure.
    """
    given = invocation.settings(CONSUMER)
    given = given.model_copy(update={"id": given.id or pet_name()})
    settings = with_secrets(CONSUMER, given)
    etcd = with_secrets(CONSUMER_ETCD, invocation.settings(CONSUMER_ETCD))
    broker = invocation.settings(CONSUMER_BROKER)
    address = check_address(broker.address, "with --broker.address or in GAZETTE_ADDRESS")
    authority_for(settings.auth_keys)  # report malformed keys before binding a port
    check_files(CONSUMER, settings)
    check_files(CONSUMER_ETCD, etcd)
    count = invocation.settings(CONSUMER_PROCESSES).count
    if count > 1:
        members = options_of_members(given, invocation.settings(DEBUG), count)
        await run_members(invocation, "run-consumer", members)
        return
    application = import_application(invocation.arguments[0])
    is_of_dev = not etcd.address
    if is_of_dev:
        found = await asyncio.to_thread(
            etcd_of_dev, address, remedy=ETCD_REMEDY, broker_remedy=BROKER_REMEDY
        )
        etcd = etcd.model_copy(update={"address": found})
    groups: tuple[Group[Any], ...] = (CONSUMER, CONSUMER_ETCD, CONSUMER_BROKER, DEBUG)
    configuration = {
        group.title: public_values(group, invocation.settings(group)) for group in groups
    }
    _log.info("consumer configuration", extra={"version": invocation.version, **configuration})
    AUDIT.setLevel(logging.INFO)  # changes of shards are recorded at every --log.level
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    server = configured_server(settings, invocation.settings(DEBUG))
    transport = transport_of(broker, address, settings.zone)
    with StopSignal() as stop, ServiceManager(invocation.environ) as manager:
        async with aclosing(transport):
            consumer = ServedConsumer(
                server,
                lambda endpoint: configuration_of(settings, etcd, endpoint),
                application,
                transport,
                allow_origins=settings.allow_origin,
                has_console=settings.console == "on",
            )
            sys.stdout.write(
                f"Shards of {application.full_name} are served at {consumer.endpoint}\n"
                f"List them: gazctl shards list --consumer.address {consumer.endpoint}\n"
            )
            sys.stdout.flush()
            identity = Identity(
                settings.zone,
                settings.id,
                etcd.address,
                "consumer",
                "shards",
                application.full_name,
                is_of_dev=is_of_dev,
            )
            try:
                await serve_until_drained(consumer, stop, identity, manager)
            finally:
                try:
                    await consumer.stop(grace_s=QUIT_GRACE_S if stop.quits else STOP_GRACE_S)
                except StuckShardsError as error:
                    _leave(error)
    _log.info("goodbye")


def _leave(error: StuckShardsError) -> NoReturn:
    """Report an error, and end the process without the threads that run calls of handlers."""
    if isinstance(error.__context__, GazetteError):
        report("gazette", error.__context__, in_log=True)  # why the process ends
    report("gazette", error, in_log=True)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(FAILED)


def transport_of(broker: ConsumerBrokerSettings, address: str, zone: str) -> Transport:
    """Return the transport that the options of a consumer describe. It opens no connection yet.

    Args:
        broker: options of the connection.
        address: URL of a broker.
        zone: availability zone of the consumer.

    Raises:
        ConfigurationError: a certificate or a key is invalid, or the file root is no directory.
    """
    transport = connect(
        address,
        zone=zone,
        cache_size=broker.cache_size,
        cache_ttl_s=broker.cache_ttl_s,
        **broker.connect_options(),
    )
    transport.file_root = file_root_of(broker.file_root, "--broker.file-root")
    return transport


def configuration_of(
    settings: ConsumerSettings, etcd: ConsumerEtcdSettings, endpoint: str
) -> ConsumerConfig:
    """Return the configuration that the options of a consumer describe.

    Args:
        settings: options of the process, with an id.
        etcd: options of its Etcd, with an address.
        endpoint: the endpoint to advertise.
    """
    return ConsumerConfig(
        suffix=settings.id,
        endpoint=endpoint,
        zone=settings.zone,
        etcd=etcd.config(),
        etcd_prefix=etcd.prefix,
        shard_limit=settings.limit,
        max_hot_standbys=settings.max_hot_standbys,
        watch_delay_s=settings.watch_delay_s,
        auth_keys=settings.auth_keys,
        directory=Path(settings.directory) if settings.directory else None,
        workers=settings.workers,
        prune_period_s=settings.prune_period_s,
        is_ready_with_failed=settings.ready_fails_on == "none",
        peer_tls=Tls(
            trusted_ca_file=settings.peer_ca_file,
            cert_file=settings.peer_cert_file,
            cert_key_file=settings.peer_cert_key_file,
        ),
    )


_PACKAGE = str(Path(gazette_sdk.__file__).parent)

_INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
"""Directories of Python and of installed packages."""


def import_application(place: str) -> Application[Any, Any]:
    """Return the application that a command line names.

    Args:
        place: ``MODULE:APPLICATION``. Modules are also looked for in the current directory.

    Raises:
        ConfigurationError: there is none.
    """
    module_name, colon, name = place.partition(":")
    if not module_name or not colon or not name:
        raise ConfigurationError(
            f"{place!r} names no application; write MODULE:APPLICATION, such as orders:totals"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigurationError(
            f"the module {module_name} cannot be imported: {type(error).__name__}: {error}"
            f"{_line_of(error)}{_remedy(module_name)}"
        ) from error
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and issubclass(found, Application):
        try:
            found = found()
        except GazetteError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"{place} cannot be made: {type(error).__name__}: {error}{_line_of(error)}"
            ) from error
    if not isinstance(found, Application):
        there = [each for each, value in vars(module).items() if isinstance(value, Application)]
        raise ConfigurationError(
            f"{place} is no application; name a function decorated with shard.handler, or a "
            "subclass of shard.Application" + (f", such as {', '.join(there)}" if there else "")
        )
    return found


def _line_of(error: Exception) -> str:
    """Return the line of the user's code that failed, unless the text of the error has it.

    It is the innermost line outside of this package, of Python and of installed packages; in an
    application that is an installed package, the innermost one outside of this package.
    """
    if isinstance(error, SyntaxError):
        return ""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and not _is_below(frame.filename, _PACKAGE)
    ]
    own = [frame for frame in frames if not _is_below(frame.filename, *_INSTALLED)] or frames
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def _is_below(filename: str, *directories: str) -> bool:
    return any(Path(filename).is_relative_to(directory) for directory in directories)


def _remedy(module_name: str) -> str:
    if Path(module_name).suffix == ".py" and Path(module_name).exists():
        dotted = ".".join(Path(module_name).with_suffix("").parts)
        return f"; name the module, as in {dotted}:APPLICATION, and not its file"
    return ""

"""``gazette serve``: a production broker (cli section 3.1).

It starts, serves until the first signal, and drains (:func:`serve_until_drained`), as
``run-consumer`` does. ``gazette spools`` cares for the spool directory of a broker on this machine.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gazette_sdk import tracing
from gazette_sdk.broker.api.served import AuditOutput, ServedBroker
from gazette_sdk.broker.metrics import show_journals
from gazette_sdk.broker.process import BrokerConfig
from gazette_sdk.broker.spool.directory import Durability, accept_etcd
from gazette_sdk.cli.processes import options_of_members, run_members
from gazette_sdk.cli.program import Invocation
from gazette_sdk.cli.settings import BROKER_PROCESSES
from gazette_sdk.cluster.etcd_server import safety_warning
from gazette_sdk.cluster.membership import DEV_VARIABLE
from gazette_sdk.console.content import ConsoleContent
from gazette_sdk.errors import ConfigurationError, LeaseLostError
from gazette_sdk.protocol.authorization import Authority, authority_for
from gazette_sdk.server.logging import AUDIT, IDENTITY
from gazette_sdk.server.options import Group, public_values
from gazette_sdk.server.process import ReloadedFiles, ServiceManager, StopSignal, configured_server
from gazette_sdk.server.settings import (
    BROKER,
    CONSOLE,
    DEBUG,
    ETCD,
    METRICS,
    BrokerSettings,
    EtcdSettings,
    pet_name,
)
from gazette_sdk.server.tls import check_files, file_root_of, reload_certificates, with_secrets
from gazette_sdk.transport.wire import Tls

DRAIN_NOTICE_S = 10.0
"""A longer drain is logged: usually no other member can take the items over."""

_log = logging.getLogger(__name__)


class ServedMember(Protocol):
    """Member of a cluster behind its public port."""

    @property
    def endpoint(self) -> str:
        """The endpoint that it advertises."""

    @property
    def ended(self) -> asyncio.Future[None]:
        """Done when it has drained, or with a fatal error."""

    @property
    def etcd_version(self) -> tuple[int, ...]:
        """Version of the connected Etcd server, once it has started."""

    @property
    def held(self) -> int:
        """Number of items assigned to it, once it has started."""

    async def start(self) -> None:
        """Start, and serve."""

    async def drain(self) -> None:
        """Announce that it leaves. It continues to serve."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Description of a member for the log.

    Attributes:
        zone: its zone.
        suffix: its id.
        etcd_endpoint: of its Etcd.
        kind: what it is called: ``broker`` or ``consumer``.
        component: ``broker``, or the name of the application.
        items: what it serves: ``journals`` or ``shards``.
        is_of_dev: True if its Etcd is that of ``gazette dev``.
    """

    zone: str
    suffix: str
    etcd_endpoint: str
    kind: str
    items: str
    component: str = "broker"
    is_of_dev: bool = False


async def serve_until_drained(
    member: ServedMember, stop: StopSignal, identity: Identity, manager: ServiceManager
) -> None:
    """Start a member, serve until the first signal, and drain. The caller stops it.

    Args:
        member: the member.
        stop: the signals.
        identity: what the log says about it.
        manager: is sent that it serves, and how far it has drained.

    Raises:
        LeaseLostError: it is no member any more.
        GazetteError: it cannot start, or has failed.
    """
    extra = {"zone": identity.zone, "id": identity.suffix}
    IDENTITY.process, IDENTITY.component = f"{identity.zone}/{identity.suffix}", identity.component
    kind, items = identity.kind, identity.items
    starting: asyncio.Future[Any] = asyncio.ensure_future(member.start())
    signalled: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
    quitted: asyncio.Future[Any] = asyncio.ensure_future(stop.wait_to_quit())
    try:
        await asyncio.wait([starting, signalled], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return  # nothing is served yet
        await starting
        if warning := safety_warning(member.etcd_version):
            # The newest wheel of etcd, which `gazette dev` runs, is of such a version.
            level = logging.DEBUG if identity.is_of_dev else logging.WARNING
            _log.log(level, warning, extra={"address": identity.etcd_endpoint})
        _log.info("serving", extra={"endpoint": member.endpoint, **extra})
        manager.announce("READY=1", lambda: f"serving {member.held} {items}")
        ended = member.ended
        await asyncio.wait([ended, signalled], return_when=asyncio.FIRST_COMPLETED)
        if not ended.done() and not stop.quits:
            held = member.held
            manager.announce("STOPPING=1", lambda: f"draining {member.held} of {held} {items}")
            await member.drain()
            await asyncio.wait(
                [ended, quitted], timeout=DRAIN_NOTICE_S, return_when=asyncio.FIRST_COMPLETED
            )
        if not ended.done() and not stop.quits:
            _log.warning(
                "still serving: other %ss with room must take over its %s before it can leave",
                kind,
                items,
                extra=extra,
            )
        await asyncio.wait([ended, quitted], return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            return
        try:
            await ended
        except LeaseLostError as error:
            raise LeaseLostError(
                f"{error}; this {kind} is no member of its cluster any more, and other {kind}s "
                f"take its {items} over: start it again"
            ) from error
    finally:
        manager.announce("STOPPING=1", lambda: "ending")
        starting.cancel()
        signalled.cancel()
        quitted.cancel()
        await asyncio.wait([starting, signalled, quitted])


PERSIST_TIMEOUT_S = 6 * 3600.0
"""Limit of uploading spools after a drain; supervisors allow six hours (operations section 8)."""

QUIT_GRACE_S = 2.0
"""Limit of open calls when the broker leaves without a drain."""


async def run(invocation: Invocation) -> None:
    """Serve until SIGTERM or SIGINT, then drain. After SIGQUIT there is no drain.

    With ``--processes`` there are several brokers, and this process is their parent.

    Raises:
        GazetteError: the broker cannot start, or has failed, for example by losing its lease.
    """
    given, etcd = invocation.settings(BROKER), with_secrets(ETCD, invocation.settings(ETCD))
    given = given.model_copy(update={"id": given.id or pet_name()})
    settings = with_secrets(BROKER, given)
    authority_for(settings.auth_keys)  # report malformed keys before binding a port
    check_files(BROKER, settings)
    check_files(ETCD, etcd)
    _spool_dir(settings)
    shown = invocation.settings(CONSOLE)
    content = ConsoleContent.of(shown.mask, shown.descriptors)
    count = invocation.settings(BROKER_PROCESSES).count
    if count > 1:
        members = options_of_members(given, invocation.settings(DEBUG), count)
        await run_members(invocation, "serve", members)
        return
    groups: tuple[Group[Any], ...] = (BROKER, ETCD, CONSOLE, DEBUG, METRICS)
    configuration = {
        group.title: public_values(group, invocation.settings(group)) for group in groups
    }
    _log.info("broker configuration", extra={"version": invocation.version, **configuration})
    AUDIT.setLevel(logging.INFO)  # --broker.audit decides on records, not --log.level
    if settings.tracing == "on":
        tracing.configure("gazette-broker", service_instance_id=f"{settings.zone}/{settings.id}")
    show_journals(each=invocation.settings(METRICS).journals == "all")
    server = configured_server(settings, invocation.settings(DEBUG))
    _warn_of_open_access(settings)
    is_of_dev = DEV_VARIABLE in invocation.environ
    with StopSignal() as stop, ServiceManager(invocation.environ) as manager:
        broker = ServedBroker(
            server,
            lambda endpoint: configuration_of(settings, etcd, endpoint),
            allow_origins=settings.allow_origin,
            tells_etcd=is_of_dev,
            has_console=settings.console == "on",
            content=content,
            audit_output=_audit_journal(settings, etcd),
            drain=stop.drain,
        )
        reloading = asyncio.create_task(_reloaded_files(broker, given).run())
        try:
            config = broker.broker.config
            identity = Identity(
                config.zone,
                config.suffix,
                config.etcd.endpoint,
                "broker",
                "journals",
                is_of_dev=is_of_dev,
            )
            await serve_until_drained(broker, stop, identity, manager)
        except BaseException:
            await broker.stop()  # content that is not stored yet stays in the spool directory
            raise
        finally:
            reloading.cancel()
            await asyncio.wait([reloading])
        if stop.quits:
            await broker.stop(grace_s=QUIT_GRACE_S)
        else:
            await broker.stop(persist_timeout_s=PERSIST_TIMEOUT_S)
    _log.info("goodbye")


def _audit_journal(settings: BrokerSettings, etcd: EtcdSettings) -> AuditOutput | None:
    """Return the audit journal of a broker; None if it has none."""
    if not settings.audit_journal:
        return None
    from gazette_sdk.cli.audit import AuditJournal  # noqa: PLC0415 - it loads the publisher

    source = f"{etcd.prefix}/{settings.zone}/{settings.id}"
    return AuditJournal(settings.audit_journal, source)


def _warn_of_open_access(settings: BrokerSettings) -> None:
    """Warn if other machines reach this broker without keys or without TLS."""
    if settings.bind_host == "localhost" or settings.port.startswith("unix://"):
        return
    missing = [
        text
        for text, option in (
            ("without keys, so everybody may read, append and delete", settings.auth_keys),
            (
                "without TLS, so everybody on the way may read content and tokens",
                settings.server_cert_file,
            ),
        )
        if not option
    ]
    for text in missing:
        _log.warning(
            "this broker serves other machines %s; set --broker.auth-keys-file and "
            "--broker.server-cert-file, or serve loopback only",
            text,
        )


def _reloaded_files(broker: ServedBroker, given: BrokerSettings) -> ReloadedFiles:
    """Return the files of a broker that are read again when they change.

    Args:
        broker: the broker.
        given: its options as given, without the content of files.
    """
    files = ReloadedFiles()
    authority, tls = broker.broker.authority, broker.server.tls
    if isinstance(authority, Authority):
        files.add(
            "authorization keys",
            [given.auth_keys_file],
            lambda: authority.replace(with_secrets(BROKER, given).auth_keys),
        )
    if tls is not None:
        names = (given.server_cert_file, given.server_cert_key_file, given.server_ca_file)
        files.add("certificates", names, lambda: reload_certificates(tls, *names))
    return files


def configuration_of(settings: BrokerSettings, etcd: EtcdSettings, endpoint: str) -> BrokerConfig:
    """Return the configuration that the options of a broker describe.

    Args:
        settings: options of the broker, with an id.
        etcd: options of its Etcd.
        endpoint: the endpoint to advertise.
    """
    return BrokerConfig(
        suffix=settings.id,
        endpoint=endpoint,
        spool_dir=_spool_dir(settings),
        zone=settings.zone,
        etcd=etcd.config(),
        etcd_prefix=etcd.prefix,
        journal_limit=settings.limit,
        file_root=file_root_of(settings.file_root, "--broker.file-root"),
        file_only=settings.file_only,
        durability=Durability(settings.durability),
        max_append_rate=settings.max_append_rate,
        min_append_rate=settings.min_append_rate,
        max_replication=settings.max_replication,
        watch_delay_s=settings.watch_delay_s,
        audited=settings.audit,
        auth_keys=settings.auth_keys,
        allow_stores=settings.allow_store,
        auto_suspend=settings.auto_suspend,
        mirror_specs=settings.mirror_specs,
        prune=settings.prune,
        consumers_prefix=settings.consumers_prefix,
        applications=settings.applications,
        peer_tls=Tls(
            trusted_ca_file=settings.peer_ca_file,
            cert_file=settings.peer_cert_file,
            cert_key_file=settings.peer_cert_key_file,
        ),
    )


def _spool_dir(settings: BrokerSettings) -> Path | None:
    """Return the directory of spools, or None for the default one.

    Raises:
        ConfigurationError: there is no default for a broker that serves other machines.
    """
    is_public = settings.bind_host != "localhost" and not settings.port.startswith("unix://")
    if is_public and not settings.spool_dir:
        raise ConfigurationError(
            "a broker that serves other machines must not keep its spools below the temporary "
            "directory: set --broker.spool-dir to a directory of its own, on a disk that survives "
            "a restart"
        )
    return Path(settings.spool_dir) if settings.spool_dir else None


def accept(invocation: Invocation) -> None:
    """Accept the present Etcd for the withheld spools of a directory."""
    (name,) = invocation.arguments
    count = accept_etcd(Path(name))
    if count is None:
        sys.stdout.write(f"nothing is withheld in {name}\n")
    else:
        sys.stdout.write(
            f"accepted; the broker over {name} compares the spools of {count} journals with what "
            "others have, and uses them: see its log\n"
        )

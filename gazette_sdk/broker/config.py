"""Configuration of a broker."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gazette_sdk.broker.spool.directory import Durability
from gazette_sdk.cluster.keyspace import WATCH_DELAY_S
from gazette_sdk.cluster.membership import LEASE_TTL_S
from gazette_sdk.protocol.journal_spec import DEFAULT_MAX_REPLICATION
from gazette_sdk.transport.wire import Tls


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    """Configuration of a broker; its defaults are those of the command line.

    Attributes:
        suffix: id of the process within its zone.
        endpoint: URL at which others reach it.
        spool_dir: directory of its spools; they survive the process there. ``None`` for a private
            one below the temporary directory, of this broker and Etcd cluster.
        zone: zone of the process.
        etcd_endpoint: URL of Etcd, or several separated by commas.
        etcd_prefix: prefix of the cluster's keys.
        etcd_cert_file: client certificate toward Etcd.
        etcd_cert_key_file: its key.
        etcd_trusted_ca_file: authorities to trust with Etcd.
        etcd_user: user of Etcd, if it has authentication enabled.
        etcd_password: password of the user.
        lease_ttl_s: time after which a silent broker is no member any more.
        answer_timeout_s: bound of a peer's answer to a replication; ``None`` for half of the lease.
        journal_limit: most replicas of journals that it takes.
        file_root: directory of ``file://`` stores.
        file_only: keep all stores below ``file_root``.
        durability: events that an acknowledged append survives.
        max_append_rate: bytes per second, for journals with a greater limit; 0 for none.
        min_append_rate: bytes per second that a client has to sustain; 0 for no minimum.
        max_replication: cap of every journal's replication.
        watch_delay_s: time for which changes of Etcd are collected.
        audited: calls that are recorded in the audit log.
        auth_keys: base64 keys that verify callers and sign calls to peers; empty for none.
        allow_stores: URLs of fragment stores that callers whose token has a selector may give to
            their journals; other callers may use any.
        auto_suspend: suspend idle journals.
        prune: remove stored fragments that are older than their journal's retention; ``dry-run``
            only logs them.
        peer_tls: certificates toward peers.
    """

    suffix: str
    endpoint: str
    spool_dir: Path | None
    zone: str = "local"
    etcd_endpoint: str = "http://localhost:2379"
    etcd_prefix: str = "/gazette/cluster"
    etcd_cert_file: Path | None = None
    etcd_cert_key_file: Path | None = None
    etcd_trusted_ca_file: Path | None = None
    etcd_user: str = ""
    etcd_password: str = field(default="", repr=False)
    lease_ttl_s: int = LEASE_TTL_S
    answer_timeout_s: float | None = None
    journal_limit: int = 1024
    file_root: Path | None = None
    file_only: bool = False
    durability: Durability = Durability.REPLICATED
    max_append_rate: int = 0
    min_append_rate: int = 65536
    max_replication: int = DEFAULT_MAX_REPLICATION
    watch_delay_s: float = WATCH_DELAY_S
    audited: Literal["off", "refusals", "all"] = "off"
    auth_keys: str = ""
    allow_stores: tuple[str, ...] = ()
    auto_suspend: bool = False
    prune: Literal["true", "false", "dry-run"] = "true"
    peer_tls: Tls | None = None

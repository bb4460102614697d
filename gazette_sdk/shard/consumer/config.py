"""Configuration of a consumer process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gazette_sdk.cluster.keyspace import WATCH_DELAY_S
from gazette_sdk.cluster.membership import EtcdConfig
from gazette_sdk.protocol.shard_spec import DEFAULT_MAX_HOT_STANDBYS
from gazette_sdk.transport.wire import Tls

__all__ = ["ConsumerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerConfig:
    """Configuration of a consumer process; its defaults are those of the command line.

    Attributes:
        suffix: id of the process within its zone.
        endpoint: URL at which others reach it.
        zone: zone of the process.
        etcd: how it reaches Etcd.
        etcd_prefix: prefix of the application's keys; empty for ``/gazette/consumers/NAME``.
        shard_limit: most shards that it takes.
        max_hot_standbys: cap of every shard's hot standbys.
        watch_delay_s: time for which changes of Etcd are collected.
        auth_keys: base64 keys that verify callers and sign calls to peers; empty for none.
        directory: directory below which shards have theirs while they run; ``None`` for a
            temporary one.
        workers: threads that run shards' code, at most.
        peer_tls: certificates toward peers.
        settings: settings of the application, by name.
    """

    suffix: str
    endpoint: str
    zone: str = "local"
    etcd: EtcdConfig = field(default_factory=EtcdConfig)
    etcd_prefix: str = ""
    shard_limit: int = 1024
    max_hot_standbys: int = DEFAULT_MAX_HOT_STANDBYS
    watch_delay_s: float = WATCH_DELAY_S
    auth_keys: str = field(default="", repr=False)
    directory: Path | None = None
    workers: int = 32
    peer_tls: Tls | None = None
    settings: dict[str, str] = field(default_factory=dict)

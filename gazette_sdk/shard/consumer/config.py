"""Configuration of a consumer process, and the address of the Etcd of ``gazette dev``."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from gazette_sdk.cluster.keyspace import WATCH_DELAY_S
from gazette_sdk.cluster.membership import EtcdConfig
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.protocol.shard_spec import DEFAULT_MAX_HOT_STANDBYS
from gazette_sdk.transport.wire import Tls

TIMEOUT_S = 5.0
"""Limit of asking a broker for its Etcd."""


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
        prune_period_s: time between reports of what no recovery needs of recovery logs; 0 for none.
        is_ready_with_failed: its port reports that it is ready also while a shard here has failed.
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
    prune_period_s: float = 3600.0
    is_ready_with_failed: bool = True


def etcd_of_dev(address: str, *, remedy: str, broker_remedy: str) -> str:
    """Ask the broker of ``gazette dev``, or of an embedded cluster, for the address of its Etcd.

    Args:
        address: address of the broker; empty for a broker without one.
        remedy: text that says how to give the address of another Etcd.
        broker_remedy: text that says how to give the address of another broker.

    Raises:
        ConfigurationError: the broker is another one, or does not answer.
    """
    if not address.startswith(("http://", "https://")):
        where = f"the broker at {address}" if address else "a broker without an address"
        raise ConfigurationError(f"{where} is not asked for its Etcd; {remedy}")
    try:
        with urlopen(f"{address.rstrip('/')}/v1/dev", timeout=TIMEOUT_S) as response:  # noqa: S310 - http only
            found: object = json.load(response).get("etcd")
    except HTTPError as error:
        if error.code in {HTTPStatus.NOT_FOUND, HTTPStatus.NOT_IMPLEMENTED}:
            raise ConfigurationError(
                f"the broker at {address} does not tell its Etcd, only that of `gazette dev` does"
                f"; {remedy}"
            ) from error
        raise ConfigurationError(f"the broker at {address} answers {error}; {remedy}") from error
    except (URLError, OSError, ValueError, AttributeError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        text = reason.strerror if isinstance(reason, OSError) and reason.strerror else reason
        raise ConfigurationError(
            f"the broker at {address} cannot be asked for its Etcd: {text}; start it, as by "
            f"`gazette dev`, or {broker_remedy}"
        ) from error
    if not isinstance(found, str) or not found:
        raise ConfigurationError(f"the broker at {address} does not tell its Etcd; {remedy}")
    return found

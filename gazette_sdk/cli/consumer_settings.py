"""Options of ``gazette run-consumer`` (cli section 4, shard section 13)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gazette_sdk.cli.client import BrokerClientSettings
from gazette_sdk.server.options import Group, Option
from gazette_sdk.server.settings import EtcdSettings, MemberSettings
from gazette_sdk.transport.router import DEFAULT_SIZE

__all__ = [
    "CONSUMER",
    "CONSUMER_BROKER",
    "CONSUMER_ETCD",
    "ConsumerBrokerSettings",
    "ConsumerEtcdSettings",
    "ConsumerSettings",
]


class ConsumerSettings(MemberSettings):
    """Consumer process."""

    flags = "consumer."

    max_hot_standbys: Annotated[
        int, Option("MaxHotStandbys", "Greatest number of hot standbys of any shard"), Field(ge=0)
    ] = 3
    directory: Annotated[
        str,
        Option(
            "Directory",
            "Directory below which shards keep their files while they run; empty for the "
            "temporary directory",
        ),
    ] = ""
    workers: Annotated[
        int, Option("Workers", "Threads that run the code of shards, at most"), Field(ge=1, le=1024)
    ] = 32


class ConsumerEtcdSettings(EtcdSettings):
    """Etcd of a consumer process."""

    address: Annotated[
        str,
        Option(
            "Address",
            "Address of Etcd, or several separated by commas; empty to ask the broker, which "
            "answers if it is of `gazette dev`",
        ),
    ] = ""
    prefix: Annotated[
        str,
        Option(
            "Prefix",
            "Prefix of the application's keys in Etcd; empty for /gazette/consumers/NAME",
        ),
    ] = ""


class ConsumerBrokerSettings(BrokerClientSettings):
    """Connection of a consumer process to brokers."""

    cache_size: Annotated[
        int,
        Option(
            "Size",
            "Number of journals whose routes are cached, to call their brokers directly; 0 sends "
            "all calls to the address",
            long="cache.size",
            env="CACHE_SIZE",
        ),
    ] = DEFAULT_SIZE
    file_root: Annotated[
        str,
        Option(
            "FileRoot",
            "Directory of the brokers' file:// stores on this machine: their fragments are read "
            "from it; empty to read them through brokers",
        ),
    ] = ""


CONSUMER = Group(
    "Consumer", ConsumerSettings, prefix=ConsumerSettings.flags, env_prefix="CONSUMER_"
)
CONSUMER_ETCD = Group("Etcd", ConsumerEtcdSettings, prefix="etcd.", env_prefix="ETCD_")
CONSUMER_BROKER = Group("Broker", ConsumerBrokerSettings, prefix="broker.", env_prefix="BROKER_")

"""Options of ``attach-uuids``, ``print-config`` and ``dev``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gazette_sdk.cli.command import TimeoutSettings
from gazette_sdk.server.options import Group, Option, Seconds, Settings

__all__ = [
    "ATTACH_UUIDS",
    "DEV",
    "DEV_CONTROL",
    "PRINT_CONFIG",
    "AttachUuidsSettings",
    "DevControlSettings",
    "DevSettings",
    "PrintConfigSettings",
]


class AttachUuidsSettings(Settings):
    """Options of ``gazctl attach-uuids``."""

    template: Annotated[
        str,
        Option(
            "Template",
            "Text to write for each line, with {{.UUID}} and {{.Line}} in it, and with its newline",
        ),
    ] = "{{.UUID}},{{.Line}}\n"
    max_length: Annotated[
        int, Option("MaxLength", "Greatest length of a line, in bytes"), Field(ge=1)
    ] = 4194304
    skip_header: Annotated[bool, Option("SkipHeader", "Drop the first line of each file")] = False


class PrintConfigSettings(Settings):
    """Options of ``print-config``."""

    show_secrets: Annotated[
        bool, Option("ShowSecrets", "Write keys and tokens, too", in_ini=False)
    ] = False


_DATA = Option("Data", "Directory of everything the cluster keeps")

DEV_DATA = "./gazette-data"


class DevSettings(Settings):
    """Options of ``gazette dev``."""

    data: Annotated[str, _DATA] = DEV_DATA
    port: Annotated[
        int, Option("Port", "Port of the first broker; 0 for a free one"), Field(ge=0, le=65535)
    ] = 8080
    brokers: Annotated[
        int,
        Option("Brokers", "How many brokers to run; of several each is a process of its own"),
        Field(ge=1, le=32),
    ] = 1
    zones: Annotated[
        str,
        Option("Zones", "Names of zones, separated by commas, which are given to brokers in turn"),
    ] = "local"
    lease_s: Annotated[
        Seconds,
        Option(
            "LeaseTTL",
            "Lifetime of the brokers' leases in Etcd. After a longer pause of this process, the "
            "brokers join the cluster again",
        ),
        Field(ge=1),
    ] = 20.0


class DevControlSettings(TimeoutSettings):
    """Options of ``gazette dev kill`` and its siblings."""

    data: Annotated[str, _DATA] = DEV_DATA
    format: Annotated[
        Literal["table", "json"],
        Option("Format", "Output format; json is one object per line", short="o", in_ini=False),
    ] = "table"


ATTACH_UUIDS = Group("attach-uuids", AttachUuidsSettings)
PRINT_CONFIG = Group("print-config", PrintConfigSettings)
DEV = Group("dev", DevSettings)
DEV_CONTROL = Group("dev", DevControlSettings)

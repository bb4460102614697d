"""Options of ``attach-uuids``, ``print-config`` and ``dev``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gazette_sdk.server.options import Group, Option, Seconds, Settings

__all__ = [
    "ATTACH_UUIDS",
    "DEV",
    "PRINT_CONFIG",
    "AttachUuidsSettings",
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


class DevSettings(Settings):
    """Options of ``gazette dev``."""

    data: Annotated[str, Option("Data", "Directory of everything the cluster keeps")] = (
        "./gazette-data"
    )
    port: Annotated[
        int, Option("Port", "Port of the first broker; 0 for a free one"), Field(ge=0, le=65535)
    ] = 8080
    brokers: Annotated[int, Option("Brokers", "How many brokers to run"), Field(ge=1, le=32)] = 1
    lease_s: Annotated[
        Seconds,
        Option(
            "LeaseTTL",
            "Lifetime of the brokers' leases in Etcd. After a longer pause of this process, the "
            "brokers join the cluster again",
        ),
        Field(ge=1),
    ] = 20.0


ATTACH_UUIDS = Group("attach-uuids", AttachUuidsSettings)
PRINT_CONFIG = Group("print-config", PrintConfigSettings)
DEV = Group("dev", DevSettings)

"""Options of ``gazette allocator simulate``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gazette_sdk.protocol.journal_spec import DEFAULT_MAX_REPLICATION
from gazette_sdk.server.options import Group, Option, Settings

__all__ = ["SIMULATE", "SimulateSettings"]


class SimulateSettings(Settings):
    """Options of ``gazette allocator simulate``."""

    cluster: Annotated[
        str,
        Option(
            "Cluster",
            "Description of the cluster in YAML, - for standard input; by default the live "
            "cluster in Etcd",
            in_ini=False,
        ),
    ] = ""
    save: Annotated[
        str,
        Option(
            "Save",
            "Write the cluster's description to this file, - for standard output, and "
            "simulate nothing unless a change is given",
            in_ini=False,
        ),
    ] = ""
    remove: Annotated[
        tuple[str, ...],
        Option("Remove", "Broker ZONE/ID that is lost, with its assignments", in_ini=False),
    ] = ()
    remove_zone: Annotated[
        tuple[str, ...],
        Option("RemoveZone", "Zone all of whose brokers are lost", in_ini=False),
    ] = ()
    drain: Annotated[
        tuple[str, ...],
        Option(
            "Drain",
            "Broker ZONE/ID that is told to stop, and leaves when it holds nothing",
            in_ini=False,
        ),
    ] = ()
    add: Annotated[
        tuple[str, ...],
        Option(
            "Add",
            "Broker ZONE/ID or ZONE/ID:LIMIT that joins; by default with the greatest limit of "
            "the cluster's brokers",
            in_ini=False,
        ),
    ] = ()
    replication: Annotated[
        tuple[str, ...],
        Option(
            "Replication",
            "New replication JOURNAL=N; a name that ends with / stands for all journals below it",
            in_ini=False,
        ),
    ] = ()
    specs: Annotated[
        str,
        Option(
            "Specs",
            "File of specs in YAML that are applied, as by `gazctl journals apply`",
            in_ini=False,
        ),
    ] = ""
    max_replication: Annotated[
        int,
        Option("MaxReplication", "The brokers' --broker.max-replication", in_ini=False),
        Field(ge=1),
    ] = DEFAULT_MAX_REPLICATION
    verbose: Annotated[
        bool, Option("Verbose", "List each journal that changes", short="v", in_ini=False)
    ] = False
    format: Annotated[
        Literal["table", "json"], Option("Format", "Output format", short="o", in_ini=False)
    ] = "table"


SIMULATE = Group("simulate", SimulateSettings)

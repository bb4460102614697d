"""Handles that applications get: the shard that a hook is called for, and the process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gazette_sdk.protocol.labels import values_of

if TYPE_CHECKING:
    from gazette_sdk.protocol import consumer_pb2 as cpb
    from gazette_sdk.transport import Transport

__all__ = ["Process", "Shard"]


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A shard of which this process is the primary, as an application sees it.

    Attributes:
        id: its id.
        spec: its specification when the primary run began.
        directory: local directory of its store; empty, or recovered from the recovery log.
        full_name: its id behind the application's name: unique among all applications.
        transport: transport to its journals.
    """

    id: str
    spec: cpb.ShardSpec
    directory: Path
    full_name: str
    transport: Transport | None = None

    @property
    def journals(self) -> tuple[str, ...]:
        """Names of the journals that it reads."""
        return tuple(source.journal for source in self.spec.sources)

    def labels(self, name: str) -> tuple[str, ...]:
        """Return the values of a label of its specification."""
        return tuple(values_of(self.spec.labels, name))


@dataclass(frozen=True, slots=True, eq=False)
class Process:
    """A consumer process, as the hook ``start`` sees it.

    Attributes:
        name: name of the application.
        zone: failure zone of the process.
        suffix: its name within the zone.
        endpoint: URL at which others reach it.
        transport: transport to the journals.
        settings: settings that the application declared, by name.
    """

    name: str
    zone: str
    suffix: str
    endpoint: str
    transport: Transport
    settings: dict[str, str] = field(default_factory=dict)

"""Offsets of streams: how far each journal was read, and how much is left. Pure.

Spark stores them as JSON, and compares the text, so that equal offsets have equal texts::

    {"version": 1, "isolation": "committed", "journals":
        {"shop/orders": {"next": 73123, "created": 7, "state": "…"}}}

``next`` is the offset to read on from, ``created`` the Etcd revision at which the journal was
created, where it is known, and ``state`` the stored checkpoint of the journal's producers there.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gazette_sdk.errors import ConfigurationError, DecodeError
from gazette_sdk.message.checkpoint import Checkpoint, ProducerState
from gazette_sdk.message.delivery import HORIZON_S
from gazette_sdk.message.sequencer import age_threshold

VERSION = 1


@dataclass(frozen=True, slots=True)
class Position:
    """Position in one journal.

    Attributes:
        next: offset to read on from.
        created: Etcd revision at which the journal was created; 0 if it is not known.
        state: stored checkpoint of its producers; empty if there are none, or not sequenced.
    """

    next: int
    created: int = 0
    state: bytes = b""

    @property
    def producers(self) -> list[ProducerState]:
        """States of the journal's producers."""
        return Checkpoint.from_bytes(self.state).producers if self.state else []

    @property
    def replay_begin(self) -> int:
        """Least offset that may be read again: the begin of the oldest open transaction."""
        begins = [producer.begin for producer in self.producers if producer.begin >= 0]
        return min([self.next, *begins])

    def without_abandoned(self, begin: int, unix_ns: int) -> Position:
        """Return the position without old transactions that cannot be read again.

        The publisher of a transaction that is open for a day died most likely. Once its content is
        removed, no one needs it, and it is no loss.

        Args:
            begin: offset of the journal's first content.
            unix_ns: time of this machine, in nanoseconds since 1970.
        """
        producers = self.producers
        newest = max((producer.last_ack for producer in producers), default=0)
        threshold = age_threshold(newest, HORIZON_S, unix_ns)
        left = [
            producer
            for producer in producers
            if not (0 <= producer.begin < begin and producer.last_ack < threshold)
        ]
        if len(left) == len(producers):
            return self
        offsets = Checkpoint.from_bytes(self.state).offsets
        return dataclasses.replace(self, state=Checkpoint(offsets, left).to_bytes())


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """Offset of a stream.

    Attributes:
        isolation: isolation of the stream.
        journals: position of each journal that was seen, by name.
    """

    isolation: str
    journals: Mapping[str, Position]

    def to_json(self) -> dict[str, Any]:
        """Return the offset as Spark stores it."""
        journals: dict[str, dict[str, Any]] = {}
        for name in sorted(self.journals):
            position = self.journals[name]
            journals[name] = {"next": position.next}
            if position.created:
                journals[name]["created"] = position.created
            if position.state:
                journals[name]["state"] = base64.b64encode(position.state).decode("ascii")
        return {"version": VERSION, "isolation": self.isolation, "journals": journals}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any], isolation: str) -> StreamOffset:
        """Return a stored offset of a stream with an isolation.

        Raises:
            ConfigurationError: it is of another version, or of another isolation.
        """
        if stored.get("version") != VERSION:
            raise ConfigurationError(
                f"gazette: the checkpoint holds offsets of version {stored.get('version')!r}, and"
                f" this version of gazette_spark reads version {VERSION}; use the version that"
                " wrote it, or another checkpointLocation"
            )
        if stored["isolation"] != isolation:
            raise ConfigurationError(
                f"gazette: the checkpoint was written with isolation={stored['isolation']}, and the"
                f" stream has isolation={isolation}; use the former, or another checkpointLocation"
            )
        try:
            journals = {
                name: Position(
                    each["next"],
                    each.get("created", 0),
                    base64.b64decode(each.get("state", ""), validate=True),
                )
                for name, each in stored["journals"].items()
            }
            for position in journals.values():
                if position.state:
                    Checkpoint.from_bytes(position.state)
        except (KeyError, AttributeError, binascii.Error, DecodeError) as error:
            raise ConfigurationError(
                f"gazette: the checkpoint holds a malformed offset ({error!r}); use another"
                " checkpointLocation"
            ) from error
        return cls(isolation, journals)


# -------------------------------------------------------------------------- lag


def lag(progress: Any) -> dict[str, int]:
    """Return the bytes of each journal that a streaming query has not read yet.

    Args:
        progress: progress of the query: ``query.lastProgress``, or ``event.progress`` of a
            ``StreamingQueryListener``, as an object or as a mapping. Sources other than
            ``gazette`` are left out.

    Returns:
        Bytes by journal, after the micro-batch that the progress is about. Journals that do not
        exist any more are left out.
    """
    found: dict[str, int] = {}
    for source in _get(progress, "sources"):
        end, head = (_offset(_get(source, name)) for name in ("endOffset", "latestOffset"))
        positions = end.get("journals", {})
        for journal, position in head.get("journals", {}).items():
            read = positions.get(journal, {}).get("next", 0)
            found[journal] = found.get(journal, 0) + max(0, position["next"] - read)
    return found


def _get(holder: Any, name: str) -> Any:
    return holder[name] if isinstance(holder, Mapping) else getattr(holder, name)


def _offset(given: Any) -> Mapping[str, Any]:
    """Return an offset of this source; an empty one if it is of another source, or missing."""
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except json.JSONDecodeError:
        return {}
    is_ours = isinstance(found, Mapping) and {"isolation", "journals"} <= found.keys()
    return found if is_ours else {}

"""Lag of streams: how much of each journal a micro-batch left unread."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


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

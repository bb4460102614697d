"""Flags of a message's UUID: the part of the message in a transaction (message section 3)."""

from __future__ import annotations

__all__ = ["ACK_TXN", "CONTINUE_TXN", "FLAGS_MAX", "OUTSIDE_TXN", "flags_text"]

OUTSIDE_TXN = 0x0
"""Not part of a transaction: committed by its own presence."""

CONTINUE_TXN = 0x1
"""Opens or continues a transaction: committed by a later acknowledgement."""

ACK_TXN = 0x2
"""Acknowledges the producer's transaction in this journal, or rolls it back."""

FLAGS_MAX = 0x3FF
"""Flags have ten bits."""

_NAMES = {OUTSIDE_TXN: "OUTSIDE_TXN", CONTINUE_TXN: "CONTINUE_TXN", ACK_TXN: "ACK_TXN"}


def flags_text(flags: int) -> str:
    """Return the name of ``flags``, which is one value and no set of bits: 3 is ``Flags(3)``."""
    return _NAMES.get(flags) or f"Flags({flags:x})"

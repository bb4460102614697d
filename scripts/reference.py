"""Griffe extension for the API reference: docstrings in Markdown.

Docstrings of this package use roles (``:class:`~gazette_sdk.Reader```) and literal blocks (``::``)
of reStructuredText. The reference is rendered as Markdown, so this extension replaces both.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|meth|func|attr|mod|exc|data):`~?(?P<path>[\w.]+)`")
_LITERAL = re.compile(r"(?P<before>[^\n]*)::\n(?=\n[ ]{4})")


def to_markdown(text: str) -> str:
    """Return a docstring without roles and marks of literal blocks.

    Four spaces of indentation make a block of code in Markdown, too.
    """
    text = _ROLE.sub(lambda role: f"`{role['path'].rpartition('.')[2]}`", text)
    return _LITERAL.sub(lambda found: f"{found['before']}:\n" if found["before"] else "\n", text)


class Markdown(griffe.Extension):
    """Extension that converts every docstring when it is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Convert the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)

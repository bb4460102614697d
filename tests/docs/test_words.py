"""Words of docstrings: those that engineers of logs search for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REFUSED = re.compile(r"\b([Bb]ehind|[Tt]old|tells|[Gg]oes on|[Gg]o on|went on|[Nn]obody)\b")
"""Use: after, past, end offset; reported, named; continues; no one."""
FIRST_WORDS = re.compile(r"(What|Whether|Who|Whom|Where)\b")
"""A class's docstring begins with a noun phrase, a function's with a verb."""
RIGHTFUL = re.compile(r"behind (?:its|their|a|the|our) (?:public port|proxy|proxies|load balancer)")


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring, and of each text after an attribute."""
    for node in ast.walk(tree):
        body = getattr(node, "body", [])
        for statement in body if isinstance(body, list) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                value = statement.value.value
                if isinstance(value, str):
                    yield statement.lineno, value


def complaints(tree: ast.Module) -> list[str]:
    found = []
    for line, text in docstrings(tree):
        plain = " ".join(text.split())
        found += [f"{line}: {word}" for word in REFUSED.findall(RIGHTFUL.sub("", plain))]
        if match := FIRST_WORDS.match(plain):
            found.append(f"{line}: begins with {match[0]}")
    return found


@pytest.mark.parametrize("package", ["gazette_sdk", "contrib/spark/gazette_spark"])
def test_docstrings_have_the_words_of_the_field(package):
    found = {
        str(file.relative_to(ROOT)): complaints(ast.parse(file.read_text()))
        for file in sorted((ROOT / package).rglob("*.py"))
    }
    assert {file: each for file, each in found.items() if each} == {}


def test_refused_words_are_found():
    program = 'class A:\n    """What goes on behind it, behind a proxy."""\n'
    assert complaints(ast.parse(program)) == ["2: goes on", "2: behind", "2: begins with What"]

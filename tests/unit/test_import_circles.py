"""Modules import in one direction, also inside a package and for type checkers alone."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import gazette_sdk

ROOT = Path(gazette_sdk.__file__).parents[1]
PACKAGES = (ROOT / "gazette_sdk", ROOT / "contrib" / "spark" / "gazette_spark")


def modules_of(package: Path) -> dict[str, ast.Module]:
    found = {}
    for file in package.rglob("*.py"):
        parts = file.relative_to(package.parent).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        found[name] = ast.parse(file.read_text())
    return found


def imports_of(statements: list[ast.stmt], names: set[str]) -> set[str]:
    """Return the modules that are imported when a module is, or when its types are checked."""
    found = set()
    for statement in statements:
        if isinstance(statement, ast.ImportFrom) and statement.module:
            for alias in statement.names:
                module = f"{statement.module}.{alias.name}"
                found.add(module if module in names else statement.module)
        elif isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.If):
            found |= imports_of([*statement.body, *statement.orelse], names)
        elif isinstance(statement, ast.Try):
            found |= imports_of(statement.body, names)
    return found & names


def circle_of(modules: dict[str, ast.Module]) -> list[str]:
    """Return a circle of imports; empty if there is none."""
    graph = {name: imports_of(tree.body, set(modules)) for name, tree in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_no_modules_import_each_other(package):
    assert circle_of(modules_of(package)) == []


def test_a_circle_for_type_checkers_is_found():
    texts = {
        "a.b": "from a import c",
        "a.c": "if TYPE_CHECKING:\n    from a.d import D",
        "a.d": "from a.b import B",
    }
    circle = circle_of({name: ast.parse(text) for name, text in texts.items()})
    assert set(circle) == set(texts)

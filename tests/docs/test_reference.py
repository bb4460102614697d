"""The API reference has every public name, and every error with its remedy."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import gazette_sdk
from gazette_sdk import errors, message
from gazette_sdk.errors import GazetteError
from gazette_sdk.message.receipt import ReceiptTimeoutError
from support.pages import ROOT

DOCS = ROOT / "docs"

ERRORS = sorted(
    {
        *(found for name in errors.__all__ if inspect.isclass(found := getattr(errors, name))),
        *(
            found
            for _, found in inspect.getmembers(message, inspect.isclass)
            if issubclass(found, GazetteError)
        ),
        ReceiptTimeoutError,
    },
    key=lambda cls: cls.__name__,
)


def _directives(page: Path) -> set[str]:
    return set(re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE))


def _paths(name: str) -> set[str]:
    """Paths under which a name of the package may be in the reference."""
    found = getattr(gazette_sdk, name)
    own = found.__name__ if isinstance(found, ModuleType) else f"{found.__module__}.{name}"
    return {f"gazette_sdk.{name}", own}


@pytest.mark.parametrize("name", gazette_sdk.__all__)
def test_every_name_of_the_package_is_in_the_reference(name: str):
    found = getattr(gazette_sdk, name)
    if isinstance(found, str):
        assert f"`{name}`" in (DOCS / "api.md").read_text(encoding="utf-8")
    elif inspect.isclass(found) and issubclass(found, GazetteError):
        assert "gazette_sdk.errors" in _directives(DOCS / "errors.md")
    else:
        assert _paths(name) & _directives(DOCS / "api.md")


def test_every_path_of_the_reference_exists():
    for page in (DOCS / "api.md", DOCS / "errors.md"):
        for path in _directives(page):
            module, _, name = path.rpartition(".")
            imported = __import__(module, fromlist=[name])
            assert hasattr(imported, name) or __import__(path), path


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_every_error_is_in_the_reference_with_its_remedy(cls: type[Exception]):
    document = inspect.cleandoc(cls.__dict__.get("__doc__") or "")
    assert re.search(r"^Remedy: \S", document, re.MULTILINE), "its docstring has no remedy"
    directives = _directives(DOCS / "errors.md")
    if cls.__name__ in errors.__all__:
        assert errors.__name__ in directives
    else:
        exported = f"gazette_sdk.message.{cls.__name__}"
        assert directives & {f"{cls.__module__}.{cls.__name__}", exported}


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_every_error_of_the_package_is_in_the_tree_of_errors(cls: type[Exception]):
    if cls.__module__ == errors.__name__:
        assert re.search(rf"\b{cls.__name__}\b", errors.__doc__ or "")
        assert cls.__name__ in errors.__all__

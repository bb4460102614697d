"""Applications that a command line names."""

from __future__ import annotations

import importlib
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any

import gazette_sdk
from gazette_sdk.errors import ConfigurationError, GazetteError
from gazette_sdk.shard.application.application import Application

_PACKAGE = str(Path(gazette_sdk.__file__).parent)

_INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
"""Directories of Python and of installed packages."""


def import_application(place: str) -> Application[Any, Any]:
    """Return the application that a command line names.

    Args:
        place: ``MODULE:APPLICATION``. Modules are also looked for in the current directory.

    Raises:
        ConfigurationError: there is none.
    """
    module_name, colon, name = place.partition(":")
    if not module_name or not colon or not name:
        raise ConfigurationError(
            f"{place!r} names no application; write MODULE:APPLICATION, such as orders:totals"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigurationError(
            f"the module {module_name} cannot be imported: {type(error).__name__}: {error}"
            f"{_line_of(error)}{_remedy(module_name)}"
        ) from error
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and issubclass(found, Application):
        try:
            found = found()
        except GazetteError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"{place} cannot be made: {type(error).__name__}: {error}{_line_of(error)}"
            ) from error
    if not isinstance(found, Application):
        there = [each for each, value in vars(module).items() if isinstance(value, Application)]
        raise ConfigurationError(
            f"{place} is no application; name a function decorated with shard.handler, or a "
            "subclass of shard.Application" + (f", such as {', '.join(there)}" if there else "")
        )
    return found


def _line_of(error: Exception) -> str:
    """Return the line of the user's code that failed, unless the text of the error has it.

    It is the innermost line outside of this package, of Python and of installed packages; in an
    application that is an installed package, the innermost one outside of this package.
    """
    if isinstance(error, SyntaxError):
        return ""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and not _is_below(frame.filename, _PACKAGE)
    ]
    own = [frame for frame in frames if not _is_below(frame.filename, *_INSTALLED)] or frames
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def _is_below(filename: str, *directories: str) -> bool:
    return any(Path(filename).is_relative_to(directory) for directory in directories)


def _remedy(module_name: str) -> str:
    if Path(module_name).suffix == ".py" and Path(module_name).exists():
        dotted = ".".join(Path(module_name).with_suffix("").parts)
        return f"; name the module, as in {dotted}:APPLICATION, and not its file"
    return ""

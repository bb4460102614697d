"""Gazette for Python: append-only journals on object storage, and messages in them.

What programs need most stands here::

    from gazette_sdk import JsonMessage, Publisher, Reader, mapping

The rooms, from the ground up; each package's own docstring lists its modules:

- ``errors``: every error, in one tree
- ``protocol``: names, labels, specs, fragments, routes; ``framing``: bytes to messages and back
- ``fragment``: journals at rest; ``cluster``: Etcd, membership, allocation
- ``transport``: how journals are reached; ``server``: what every server process needs
- ``journals``: creating, listing, updating and deleting journals
- ``message``: publishing and reading messages; ``broker``: the bundled broker
- ``embedded``: a cluster inside this process
- ``testing``: a pytest plugin; ``cli``: the commands ``gazette`` and ``gazctl``

``__version__`` is the version of the installed distribution.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gazette_sdk import framing
    from gazette_sdk.errors import GazetteError
    from gazette_sdk.journals import Journals
    from gazette_sdk.message import Envelope, JsonMessage, Publisher, Reader, Receipt, mapping
    from gazette_sdk.transport import Transport, connect

    __version__: str

__all__ = [
    "Envelope",
    "GazetteError",
    "Journals",
    "JsonMessage",
    "Publisher",
    "Reader",
    "Receipt",
    "Transport",
    "connect",
    "framing",
    "mapping",
]

_MODULES = {
    "Envelope": "gazette_sdk.message",
    "GazetteError": "gazette_sdk.errors",
    "Journals": "gazette_sdk.journals",
    "JsonMessage": "gazette_sdk.message",
    "Publisher": "gazette_sdk.message",
    "Reader": "gazette_sdk.message",
    "Receipt": "gazette_sdk.message",
    "Transport": "gazette_sdk.transport",
    "connect": "gazette_sdk.transport",
    "mapping": "gazette_sdk.message",
}


def __getattr__(name: str) -> object:
    """Import a name when it is first used: the command-line tools need few of them."""
    if name == "framing":
        return importlib.import_module("gazette_sdk.framing")
    if name == "__version__":
        globals()[name] = version = _installed_version()
        return version
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = found
    return found


def _installed_version() -> str:
    """Return the version in the metadata of the distribution; of a bare checkout, a word."""
    import importlib.metadata  # noqa: PLC0415 - slow to import, and seldom used

    try:
        return importlib.metadata.version("gazette-sdk")
    except importlib.metadata.PackageNotFoundError:
        return "development"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

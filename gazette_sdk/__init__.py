"""Gazette for Python: append-only journals on object storage, and messages in them.

What programs need most stands here::

    from gazette_sdk import JsonMessage, Publisher, Reader, mapping

The rooms, from the ground up; each package's own docstring lists its modules:

- ``errors``: every error, in one tree
- ``protocol``: names, labels, specs, fragments, routes; ``framing``: bytes to messages and back
- ``fragment``: journals at rest; ``cluster``: Etcd, membership, allocation
- ``transport``: how journals are reached; ``server``: what every server process needs
- ``message``: publishing and reading messages; ``broker``: the bundled broker
- ``embedded``: a cluster inside this process
- ``testing``: a pytest plugin; ``cli``: the commands ``gazette`` and ``gazctl``
"""

from gazette_sdk import framing
from gazette_sdk.errors import GazetteError
from gazette_sdk.message import Envelope, JsonMessage, Publisher, Reader, Receipt, mapping
from gazette_sdk.transport import Transport, connect

__all__ = [
    "Envelope",
    "GazetteError",
    "JsonMessage",
    "Publisher",
    "Reader",
    "Receipt",
    "Transport",
    "connect",
    "framing",
    "mapping",
]

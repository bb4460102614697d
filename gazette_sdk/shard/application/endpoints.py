"""Declarations of HTTP endpoints and gRPC methods over the state of shards.

Each is served by every process of the application, and runs at the primary of the shard that a
request is about: here, or proxied once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.protocol.authorization import Capability
from gazette_sdk.shard.transaction.tables import OpenTable, Table, undeclared
from gazette_sdk.shard.transaction.windows import (
    Declared,
    Window,
    no_windows,
    state_codec,
    windows_of_key,
)

M = TypeVar("M")

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    from gazette_sdk.message.mapping import Mapping
    from gazette_sdk.shard.transaction.transaction import Shard

    S = TypeVarWithDefault("S", default=Any)
else:  # `typing` has no defaults before Python 3.13
    S = TypeVar("S")

Handler: TypeAlias = Callable[..., Any]
"""Function that serves an endpoint: ``def`` on a worker thread, or ``async def``."""

_PATH = re.compile(r"/(?:[\w\-.~/]|\{[A-Za-z_]\w*\})*")
_RPC = re.compile(r"/\w+(?:\.\w+)*/\w+")
_PARAMETER = re.compile(r"\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True, slots=True, eq=False)
class Query(Generic[S]):
    """Request to one shard, of which this process is the primary.

    Attributes:
        store: its store, as of the last transaction that was committed locally. For reading.
        shard: the shard.
        request: the request: of aiohttp, or the message of a gRPC method.
        body: body of an HTTP request.
        declared: windows of the application.
        tables: its tables.
    """

    store: S
    shard: Shard
    request: Any = None
    body: bytes = b""
    declared: Declared | None = None
    tables: Sequence[Table[Any]] = ()

    def table(self, declared: Table[M]) -> OpenTable[M]:
        """Return a table of the application, for reading: the newest message of each key.

        Args:
            declared: the table, as ``tables=`` has it.

        Raises:
            ConfigurationError: the application does not declare it.
        """
        if declared not in self.tables:
            raise undeclared(declared)
        view: Any = self.store
        return OpenTable(declared, view, {})

    def windows(self, key: Any = None) -> list[Window[Any]]:
        """Return the open windows of a key, the earliest first. For reading.

        Args:
            key: the key of their messages; None for windows of all messages.

        Raises:
            ConfigurationError: the application has no windows.
            ValidationError: it cannot be the key of a window.
            ShardStoreError: the store failed.
        """
        if self.declared is None:
            raise no_windows()
        view: Any = self.store
        return windows_of_key(view, key, state_codec(self.declared))


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a path, as a mapping's key function sees them: as attributes and keys.

    Attributes:
        values: the values, by name.
    """

    values: dict[str, str]

    def __getattr__(self, name: str) -> str:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getitem__(self, name: str) -> str:
        return self.values[name]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Declared HTTP endpoint.

    Attributes:
        method: method of HTTP.
        path: path with parameters, as ``/api/customers/{customer}``.
        serve: function of a :class:`Query` and the parameters, by name. It returns a dict or a
            list, sent as JSON, str, bytes, or a response of aiohttp.
        by: mapping that chooses a journal by the :class:`Parameters`.

    Raises:
        ConfigurationError: the path is malformed.
    """

    method: str
    path: str
    serve: Handler
    by: Mapping | None = None

    def __post_init__(self) -> None:
        if _PATH.fullmatch(self.path) is None or len(set(self.parameters)) != len(self.parameters):
            raise ConfigurationError(
                f"the path {self.path!r} is malformed; use one as /api/customers/{{customer}},"
                " each parameter once"
            )

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters of the path."""
        return tuple(_PARAMETER.findall(self.path))

    def match(self, path: str) -> dict[str, str] | None:
        """Return the parameters of a request's path; None if it is another endpoint's."""
        parts = _PARAMETER.split(self.path)
        pattern = "".join(
            re.escape(part) if index % 2 == 0 else f"(?P<{part}>[^/]+)"
            for index, part in enumerate(parts)
        )
        found = re.fullmatch(pattern, path)
        return None if found is None else found.groupdict()


@dataclass(frozen=True, slots=True)
class Method:
    """Declared gRPC method, with one request and one response.

    It is about a shard if ``shard_of`` or ``by`` is given, and then runs at that shard's primary:
    here, or proxied once. Else the process that is called serves it.

    Attributes:
        rpc: full name, as ``/word_count.NGram/Query``.
        request_type: protobuf class of the request.
        response_type: protobuf class of the response.
        serve: function of a :class:`Query`, or of the request if it is about no shard. It returns
            the response.
        shard_of: function of the request that returns the id of the shard it is about; ``""``
            leaves it to ``by``.
        by: mapping that chooses a journal, and so the shard that reads it, by the request.
        capability: capability that the caller's token must have, where the processes have keys.

    Raises:
        ConfigurationError: the name is malformed.
    """

    rpc: str
    request_type: type[Any]
    response_type: type[Any]
    serve: Handler
    shard_of: Callable[[Any], str] | None = None
    by: Mapping | None = None
    capability: Capability = Capability.READ

    def __post_init__(self) -> None:
        if _RPC.fullmatch(self.rpc) is None:
            raise ConfigurationError(
                f"{self.rpc!r} names no method; use its full name, as /word_count.NGram/Query"
            )

    @property
    def is_about_no_shard(self) -> bool:
        """True if any process can serve it."""
        return self.shard_of is None and self.by is None

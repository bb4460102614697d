"""Applications: what is declared of a group of shards, and the hooks that are called for them.

Its HTTP endpoints and gRPC methods are over the state of shards. Each is served by every process of
the application, and runs at the primary of the shard that a request is about: here, or proxied
once.

Which journals its shards read is in :mod:`~gazette_sdk.shard.application.sources`, and how their
shards are made in :mod:`~gazette_sdk.shard.application.generator`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Mapping as AbstractMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Capability
from gazette_sdk.protocol.names import validate_journal, validate_token
from gazette_sdk.shard.application.sources import (
    JoinedTopics,
    Sources,
    check_sources,
    declared_of,
    source_of,
    topics_of,
)
from gazette_sdk.shard.stores.base import check_types
from gazette_sdk.shard.transaction.tables import OpenTable, Table, check_message, undeclared
from gazette_sdk.shard.transaction.timers import IDLE_S, check_event_time, is_seconds
from gazette_sdk.shard.transaction.transaction import Process, Shard
from gazette_sdk.shard.transaction.windows import (
    Declared,
    Hopping,
    Session,
    Tumbling,
    Window,
    no_windows,
    state_codec,
    windows_of_key,
)
from gazette_sdk.user_code import is_async, is_generator

if TYPE_CHECKING:
    from gazette_sdk.message.mapping import Mapping
    from gazette_sdk.shard.transaction.timers import Timer
    from gazette_sdk.shard.transaction.transaction import CommitFuture, Transaction
    from gazette_sdk.shard.transaction.windows import Window


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


H = TypeVar("H", bound=Handler)

_HOOKS_OF_WINDOWS = {
    "on_closed": ("a window", "(txn, window)"),
    "on_late": ("a message and a window", "(txn, message, window)"),
    "on_updated": ("a window", "(txn, window)"),
}
_HOOKS = ("begin", "consume", "on_timer", *_HOOKS_OF_WINDOWS, "finalize", "finished")
_PLAIN_HOOKS = ("start", "new_store", "new_message", "stop", "rpcs")

NAME_LENGTH_BYTES = (1, 128)
"""Least and greatest length of an application's name."""


class DeadLetters:
    """Journal to which records are sent that a handler has refused.

    Attributes:
        journal: its name. Its content type is JSON lines.

    Raises:
        ValidationError: the name is no journal's.
    """

    __slots__ = ("journal",)

    def __init__(self, journal: str) -> None:
        validate_journal(journal)
        self.journal = journal

    def __repr__(self) -> str:
        return f"dead_letters({self.journal!r})"


OnError: TypeAlias = Literal["fail", "skip"] | DeadLetters
"""Treatment of a record for which the handler raises: fail the shard, leave the record out, or
publish it to a journal of dead letters. See :mod:`~gazette_sdk.shard.transaction.failure`."""


def dead_letters(journal: str) -> DeadLetters:
    """Return the treatment of bad records that publishes them to ``journal``.

    The dead letter is part of the transaction: there is exactly one for each record.

    Args:
        journal: name of a journal of JSON lines.

    Raises:
        ValidationError: the name is no journal's.
    """
    return DeadLetters(journal)


class Application(Generic[M, S]):
    """Group of shards that run the same code over different journals, each with a store of its own.

    Derive from it, declare ``message`` and ``store``, and define :meth:`consume`; or make one of a
    function with :func:`~gazette_sdk.shard.application.handler.handler`. The hooks ``begin``,
    ``consume``, ``on_timer``, ``finalize`` and ``finished`` are all ``def`` or all ``async def``.
    Those of a shard are called one at a time: ``def`` hooks on a worker thread, ``async def`` hooks
    on the event loop of the process. A hook may be called again for a message or a timer whose
    transaction was not committed; one call for each is committed.

    Attributes:
        endpoints: HTTP endpoints that it declares.
        methods: gRPC methods that it declares.
        message: class of the messages, or a union of msgspec Structs with tags; of several topics,
            by their selectors.
        store: class of the store, or an object that makes one: anything with
            ``for_shard(shard)``, or a callable of the shard's directory.
        sources: label selector of the journals that it reads, their names, or
            ``shard.partitions`` of several topics; None if its shards are created by hand.
        tables: tables of further topics, which are joined with the sources; see ``shard.table``.
        name: its name; empty for ``module.Class``.
        hot_standbys: number of processes that keep a copy of each shard's store up to date,
            besides the primary.
        min_txn_s: least duration of a transaction, in seconds.
        max_txn_s: duration after which a transaction consumes nothing more, in seconds.
        on_error: treatment of a record for which ``consume`` raises.
        waits_for_acks: keep a transaction open, up to ``max_txn_s``, while sequences of messages
            that it read are not acknowledged yet. Turn it off for a shard that reads its own
            output.
        reads_acks: pass acknowledgements, too, to ``consume``.
        event_time: returns the event time of a message, in Unix seconds or as a datetime with a
            zone; ``"published"`` for that of its publication, which windows have, too, where
            nothing is declared.
        lateness_s: how far out of order event times may be, in seconds.
        idle_s: time without a message after which a source is quiet, in seconds, so that event time
            passes there; None for never.
        windows: windows of event time: a `Tumbling`, a `Hopping` or a `Session` of
            :mod:`~gazette_sdk.shard.transaction.windows`.
        update_every_s: time after a change of a window until ``on_updated`` is called, in seconds.

    Raises:
        ConfigurationError: a declared value cannot be used.
        ValidationError: the name, selector or name of a journal is malformed.
    """

    message: ClassVar[Any] = None
    store: ClassVar[Any] = None
    sources: ClassVar[Sources | None] = None
    tables: ClassVar[Sequence[Table[Any]]] = ()
    name: ClassVar[str] = ""
    hot_standbys: ClassVar[int] = 1
    min_txn_s: ClassVar[float] = 0.0
    max_txn_s: ClassVar[float] = 1.0
    on_error: ClassVar[OnError] = "fail"
    waits_for_acks: ClassVar[bool] = True
    reads_acks: ClassVar[bool] = False
    event_time: ClassVar[Any] = None
    lateness_s: ClassVar[float] = 0.0
    idle_s: ClassVar[float | None] = IDLE_S
    windows: ClassVar[Declared | None] = None
    update_every_s: ClassVar[float] = 1.0

    def __init__(self) -> None:
        self.endpoints: list[Endpoint] = []
        self.methods: list[Method] = []
        self._validate()

    # -------------------------------------------------------------------- hooks

    def start(self, process: Process) -> None:
        """Prepare what all shards of this process share; called once, before it is announced."""

    def new_store(self, shard: Shard) -> S:
        """Return the store of a shard that this process becomes the primary of.

        Raises:
            ConfigurationError: no store is declared.
        """
        declared = self.store
        for_shard = getattr(declared, "for_shard", None)
        made: S = declared(shard.directory) if for_shard is None else for_shard(shard)
        return made

    def new_message(self, journal: pb.JournalSpec) -> type[M]:
        """Return the class of the messages of a journal.

        Raises:
            ConfigurationError: it is of none of the application's topics.
        """
        classes = self.classes
        found: type[M] = self.message
        return classes[source_of(self.all_sources, journal)] if classes else found

    def begin(self, txn: Transaction[S]) -> Any:
        """Prepare a transaction, before its first message."""

    def consume(self, txn: Transaction[S], message: M) -> Any:
        """Consume one committed message. Every application defines it."""

    def on_timer(self, txn: Transaction[S], timer: Timer) -> Any:
        """Act on a timer that is due, which ``txn.timers.set`` has set. It may set it again."""

    def on_closed(self, txn: Transaction[S], window: Window[Any]) -> Any:
        """Act on a window which the watermark has passed: once for each that had a message."""

    def on_late(self, txn: Transaction[S], message: M, window: Window[Any]) -> Any:
        """Act on a message that is late for a window, after ``consume``.

        Without it such messages are counted alone. The window has no state.
        """

    def on_updated(self, txn: Transaction[S], window: Window[Any]) -> Any:
        """Act on an open window that has changed, at most once in ``update_every_s``."""

    def finalize(self, txn: Transaction[S]) -> Any:
        """Change the store and publish for the last time in a transaction."""

    def finished(self, txn: Transaction[S], commit: CommitFuture) -> Any:
        """Act on the end of a transaction: it has started to commit, or has failed.

        Called once for each transaction whose ``begin`` returned, also where the shard ends within
        it.

        Args:
            txn: the transaction.
            commit: future of the commit, which ends only after this call: do not wait for it here,
                but give it a callback, or to somebody else.
        """

    def stop(self) -> None:
        """Close what :meth:`start` opened; called once, when the shards of the process have ended.

        It is not called in a process that is killed.
        """

    def rpcs(self) -> Sequence[Method]:
        """Return the gRPC methods to serve on the port of the process, by default :attr:`methods`.

        It is called once, after :meth:`start`.
        """
        return self.methods

    # ---------------------------------------------------------------- endpoints

    def get(self, path: str, *, by: Mapping | None = None) -> Callable[[H], H]:
        """Serve HTTP GET requests of a path over the state of a shard.

        Args:
            path: path with parameters, as ``/api/customers/{customer}``.
            by: mapping that chooses the journal, and so the shard, by the parameters; without
                one the query parameter ``shard`` names it.

        Returns:
            A decorator; the function gets a :class:`Query`
            and the parameters.

        Raises:
            ConfigurationError: the path is malformed, or declared twice.
        """
        return self._endpoint("GET", path, by)

    def post(self, path: str, *, by: Mapping | None = None) -> Callable[[H], H]:
        """Serve HTTP POST requests of a path. See :meth:`get`; the request has the body.

        Raises:
            ConfigurationError: the path is malformed, or declared twice.
        """
        return self._endpoint("POST", path, by)

    def _endpoint(self, method: str, path: str, by: Mapping | None) -> Callable[[H], H]:
        def declare(serve: H) -> H:
            self._check_by(by)
            endpoint = Endpoint(method, path, serve, by)
            if any((each.method, each.path) == (method, path) for each in self.endpoints):
                raise ConfigurationError(f"{method} {path} is declared twice; use another path")
            self.endpoints.append(endpoint)
            return serve

        return declare

    def rpc(
        self,
        rpc: str,
        request: type[Any],
        response: type[Any],
        *,
        shard_of: Callable[[Any], str] | None = None,
        by: Mapping | None = None,
        capability: Capability = Capability.READ,
    ) -> Callable[[H], H]:
        """Serve a gRPC method; the arguments are those of :class:`Method`.

        Args:
            rpc: full name, as ``/word_count.NGram/Query``.
            request: protobuf class of the request.
            response: protobuf class of the response.
            shard_of: returns the id of the shard that a request is about.
            by: mapping that chooses the journal, and so the shard, by the request.
            capability: capability that the caller's token must have.

        Returns:
            A decorator; the function gets what :attr:`Method.serve` describes.

        Raises:
            ConfigurationError: the name is malformed.
        """

        def declare(serve: H) -> H:
            self._check_by(by)
            self.methods.append(Method(rpc, request, response, serve, shard_of, by, capability))
            return serve

        return declare

    def _check_by(self, by: object) -> None:
        """Refuse a mapping by the names of journals, of partitions that are joined by number."""
        sources = self.all_sources
        is_joined = isinstance(sources, JoinedTopics) and len(sources.partitioned) > 1
        if is_joined and getattr(by, "is_by_names", False):
            raise ConfigurationError(
                f"{self._place()[1]} joins partitions of one number, and this mapping chooses them"
                " by their names: map messages and queries by `mapping.modulo`"
            )

    # --------------------------------------------------------------- declarations

    @property
    def full_name(self) -> str:
        """Name of the application: the declared one, or ``module.name`` of its code.

        Raises:
            ConfigurationError: it has none, as its module runs as ``__main__``.
        """
        if self.name:
            return self.name
        module, name = self._place()
        if module == "__main__":
            raise ConfigurationError(
                f"the application {name} has no name, as its module runs as __main__, and would"
                " have another one elsewhere; give it one (name=…), or run it with"
                " `gazette run-consumer MODULE:APPLICATION`"
            )
        return f"{module}.{name}".replace("<locals>.", "")

    @property
    def has_timers(self) -> bool:
        """True if its shards have timers: it defines ``on_timer``, or has windows."""
        return self.has_on_timer or self.windows is not None

    @property
    def has_on_timer(self) -> bool:
        """True if it defines ``on_timer``."""
        return not _is_inherited(self, "on_timer")

    @property
    def has_event_time(self) -> bool:
        """True if it declares event time, or windows."""
        return self.event_time is not None or self.windows is not None

    @property
    def has_on_updated(self) -> bool:
        """True if it defines ``on_updated``."""
        return not _is_inherited(self, "on_updated")

    @property
    def is_async(self) -> bool:
        """True if the hooks are coroutine functions."""
        return is_async(self.consume)

    @property
    def all_sources(self) -> Sources | None:
        """Its sources, with the topics of its tables."""
        if not self.tables:
            return self.sources
        return JoinedTopics([*declared_of(self.sources), *(each.source for each in self.tables)])

    @property
    def classes(self) -> AbstractMapping[str, type[Any]]:
        """Classes of messages by topic, also those of tables; empty if sources are no topics."""
        declared = self.message
        found = (
            dict(declared)
            if isinstance(declared, AbstractMapping)
            else dict.fromkeys(topics_of(self.sources), declared)
        )
        return found | {table.topic: table.message for table in self.tables}

    def _place(self) -> tuple[str, str]:
        """Return the module and the qualified name of the application's code."""
        return type(self).__module__, type(self).__qualname__

    def _validate(self) -> None:
        """Refuse declared values that cannot be used."""
        name = self._place()[1]
        if self.name:
            validate_token(self.name, "name", *NAME_LENGTH_BYTES)
        if _is_inherited(self, "consume"):
            raise ConfigurationError(f"{name} defines no `consume`: define what a message does")
        if self.message is None and _is_inherited(self, "new_message"):
            raise ConfigurationError(
                f"{name} declares no class of messages; set message=, or define `new_message`"
            )
        if self.store is None and _is_inherited(self, "new_store"):
            raise ConfigurationError(
                f"{name} declares no store; set store=, as shard.JsonStore, or define `new_store`"
            )
        if self.min_txn_s < 0 or self.max_txn_s <= 0:
            raise ConfigurationError(
                f"{name}: min_txn_s={self.min_txn_s} and max_txn_s={self.max_txn_s}; use at least"
                " 0 and more than 0 seconds"
            )
        if not isinstance(self.hot_standbys, int) or self.hot_standbys < 0:
            raise ConfigurationError(f"{name}: hot_standbys={self.hot_standbys!r}; use 0 or more")
        if self.on_error not in {"fail", "skip"} and not isinstance(self.on_error, DeadLetters):
            raise ConfigurationError(
                f"{name}: on_error={self.on_error!r}; use 'fail', 'skip' or"
                " shard.dead_letters('JOURNAL')"
            )
        check_event_time(name, self.event_time, self.lateness_s, self.idle_s)
        _check_store(name, self.store)
        check_sources(name, self.sources)
        self._validate_tables(name)
        self._validate_message(name)
        self._validate_hooks(name)

    def _validate_tables(self, name: str) -> None:
        """Refuse tables that cannot be joined with the sources."""
        if not isinstance(self.tables, Sequence) or not all(
            isinstance(each, Table) for each in self.tables
        ):
            raise ConfigurationError(
                f"{name}: tables={self.tables!r}; use tables=[shard.table('topic=drivers', key=…,"
                " message=…)]"
            )
        if not self.tables:
            return
        if not topics_of(self.sources):
            raise ConfigurationError(
                f"{name} has tables, which are joined with topics: use a selector as"
                " sources='topic=rides'"
            )
        _ = self.all_sources
        _check_keeps(name, self.store, "tables", "put_rows")

    def _validate_message(self, name: str) -> None:
        """Refuse what is no class of messages, and classes by topic that are not the sources'."""
        if not isinstance(self.message, AbstractMapping):
            if self.message is not None:
                check_message(name, self.message)
            return
        for each in self.message.values():
            check_message(name, each)
        topics = topics_of(self.sources)
        if set(self.message) != set(topics):
            raise ConfigurationError(
                f"{name} declares classes of messages of {_listed(self.message)}, and reads"
                f" {_listed(topics)}; declare one class for each selector, as it is written in"
                " sources=shard.partitions(…)"
            )

    def _validate_hooks(self, name: str) -> None:
        """Refuse a wrong signature, and a mixture of ``def`` and ``async def``."""
        _check_signature(name, self.consume)
        if self.has_on_timer:
            _check_signature(name, self.on_timer, "a timer", "(txn, timer)")
            _check_keeps(name, self.store, "timers", "put_timers")
        self._validate_windows(name)
        wanted = self.is_async
        for hook in _PLAIN_HOOKS:
            function = getattr(self, hook)
            if is_async(function) or is_generator(function):
                raise ConfigurationError(
                    f"{name}: `{hook}` is called by itself, and nothing of it would run: define it"
                    " with `def` alone, without `yield`"
                )
        for hook in _HOOKS:
            if _is_inherited(self, hook):
                continue
            function = getattr(self, hook)
            if is_generator(function):
                raise ConfigurationError(
                    f"{name}: `{hook}` has a `yield`, so that a call of it runs nothing: define it"
                    " without"
                )
            if is_async(function) != wanted:
                raise ConfigurationError(
                    f"{name}: `{hook}` and `consume` are of two kinds; define all hooks with `def`,"
                    " or all with `async def`"
                )
        if not wanted and getattr(self.store, "is_async", False):
            raise ConfigurationError(
                f"{name}: its store works with `async def` hooks only; define them so, or use"
                " another store"
            )

    def _validate_windows(self, name: str) -> None:
        windows = self.windows
        if windows is not None and not isinstance(windows, Tumbling | Hopping | Session):
            raise ConfigurationError(
                f"{name}: windows={windows!r}; use shard.windows.Tumbling(size_s=60), Hopping(…) or"
                " Session(…)"
            )
        if windows is not None:
            _check_keeps(name, self.store, "windows", "put_rows")
        for hook, (argument, wanted) in _HOOKS_OF_WINDOWS.items():
            if _is_inherited(self, hook):
                continue
            if windows is None:
                raise ConfigurationError(
                    f"{name} defines `{hook}` without windows; declare them, as"
                    " windows=shard.windows.Tumbling(size_s=60)"
                )
            _check_signature(name, getattr(self, hook), argument, wanted)
        every_s = self.update_every_s
        if not is_seconds(every_s) or every_s == 0:
            raise ConfigurationError(
                f"{name}: update_every_s={every_s!r}; use a number of seconds, more than 0"
            )


def _check_store(name: str, store: object) -> None:
    """Refuse what makes no store, such as ``dict``, and types that it cannot keep.

    Raises:
        ConfigurationError: it makes none, or cannot keep a type.
    """
    is_built_in = isinstance(store, type) and store.__module__ == "builtins"
    if is_built_in or not (store is None or callable(store) or hasattr(store, "for_shard")):
        raise ConfigurationError(
            f"{name}: store={store!r} is no store; use shard.JsonStore, shard.RocksStore,"
            " shard.SqliteStore, a shard.SqlStore, or a class of your own with their methods"
        )
    try:
        check_types(store)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: its store: {error}") from error


def _check_keeps(name: str, store: object, what: str, method: str) -> None:
    """Refuse a class of stores that keep no timers, or no windows.

    Raises:
        ConfigurationError: its stores keep none.
    """
    if isinstance(store, type) and not hasattr(store, method):
        raise ConfigurationError(
            f"{name} has {what}, which {store.__name__} does not keep; use shard.RocksStore,"
            " shard.SqliteStore, shard.JsonStore or shard.SqlStore"
        )


def _check_signature(
    name: str,
    function: Callable[..., Any],
    argument: str = "a message",
    wanted: str = "(txn, message)",
) -> None:
    """Refuse a function that cannot be called with a transaction and another argument.

    Raises:
        ConfigurationError: it cannot.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # a function in C may have none
    try:
        signature.bind(*[None] * len(wanted.split(",")))
    except TypeError as error:
        raise ConfigurationError(
            f"{name}{signature} cannot be called with a transaction and {argument}: {error};"
            f" declare it with {wanted}"
        ) from error


def _is_inherited(application: Application[Any, Any], hook: str) -> bool:
    """Return True if a hook is the base's, which does nothing."""
    function = getattr(getattr(application, hook), "__func__", None)
    return function is vars(Application)[hook]


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(map(repr, texts)) or "no selector"

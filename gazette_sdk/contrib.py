"""Sources of data for Ray and Dask: journals as columns, read by many tasks.

::

    rides = ray.data.read_datasource(ray_datasource(Ride, "topic=rides"))
    rides = dask_from_journals(Ride, "topic=rides")

Both read what journals hold when they are called. Tasks read ranges of journals as columns
(:meth:`gazette_sdk.message.Reader.arrow`), over connections of their own. With the URL of a
fragment store they need no broker, and list nothing: they open the fragments that were listed at
the call.

Which messages are committed depends on those before and after, so a committed range is a whole
journal. Uncommitted ranges end where fragments end: no message spans two of these.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from gazette_sdk.errors import (
    ConfigurationError,
    JournalNotFoundError,
    SuspendedError,
    check_number,
    needs_extra,
)
from gazette_sdk.fragment.content import CoverSet
from gazette_sdk.message import JsonMessage, Reader
from gazette_sdk.message.kinds.base import known_kind
from gazette_sdk.message.kinds.json import KEY, TypedKind
from gazette_sdk.message.reader import Isolation
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport import Transport, connect
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.connect import ADDRESS_VARIABLE, DEFAULT_ADDRESS
from gazette_sdk.transport.fragment_store import FragmentStoreTransport
from gazette_sdk.transport.listing import list_all_fragments, list_journals

if TYPE_CHECKING:
    import dask.dataframe
    import pandas as pd
    import pyarrow as pa
    import ray.data

RANGE_BYTES = 128 << 20
"""Limit of an uncommitted range, unless a single fragment is longer."""


@dataclass(frozen=True)
class JournalRange:
    """Bytes ``[begin, end)`` of a journal, which one task reads.

    Attributes:
        journal: name of the journal.
        begin: offset of the first byte.
        end: offset after the last byte.
        fragments: the fragments that hold them, as protobuf.
    """

    journal: str
    begin: int
    end: int
    fragments: tuple[bytes, ...] = ()


@dataclass
class _JsonObject(JsonMessage):
    """JSON object with the usual key of its UUID."""


def _class_of_tasks(message_type: Any, *, needs_uuid: bool) -> Any:
    """Return a class by which tasks decode the same columns.

    Of a JSON class only the key of its UUID, and the form of bytes, are used. A class of a notebook
    cannot be pickled once its messages were encoded: msgspec keeps a cache in it.
    """
    kind = known_kind(message_type, needs_uuid=needs_uuid)
    return _JsonObject if isinstance(kind, TypedKind) and kind.key == KEY else message_type


@dataclass(frozen=True)
class JournalTable:
    """Messages of journals as columns. Tasks get a copy of it.

    Attributes:
        message_type: class by which tasks decode them.
        schema: the columns.
        url: address of a broker, or URL of a fragment store.
        isolation: ``"committed"`` or ``"uncommitted"``.
        options: further arguments of :func:`~gazette_sdk.transport.connect`.
    """

    message_type: Any
    schema: pa.Schema
    url: str
    isolation: Isolation
    options: Mapping[str, Any] = field(repr=False)

    def batches(self, part: JournalRange) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a range.

        Raises:
            GazetteError: it cannot be read, or a message does not fit the schema.
        """
        if part.begin == part.end:
            return
        transport = connect(self.url, **self.options)
        try:
            if isinstance(transport, FragmentStoreTransport):
                transport.use_fragments(
                    part.journal, [pb.Fragment.FromString(each) for each in part.fragments]
                )
            with Reader(
                self.message_type,
                name=part.journal,
                transport=transport,
                isolation=self.isolation,
                offsets={part.journal: part.begin},
                end_offsets={part.journal: part.end},
            ) as reader:
                yield from reader.arrow(self.schema)
        finally:
            sdk_loop.run(transport.aclose())

    def frame(self, part: JournalRange) -> pd.DataFrame:
        """Return the messages of a range, with a null where a message lacks a column."""
        import pandas as pd  # noqa: PLC0415 - an extra
        import pyarrow as pa  # noqa: PLC0415 - an extra

        table = pa.Table.from_batches(self.batches(part), self.schema)
        return table.to_pandas(types_mapper=pd.ArrowDtype)


def plan(
    message_type: Any,
    selector: str,
    schema: pa.Schema | None = None,
    *,
    url: str | None = None,
    isolation: Isolation = "committed",
    range_bytes: int = RANGE_BYTES,
    **options: Any,
) -> tuple[JournalTable, list[JournalRange]]:
    """Return a table of journals, and the ranges of all that they hold now. Blocks.

    Args:
        message_type: class of the messages, as of a :class:`~gazette_sdk.message.Reader`.
        selector: label selector of the journals. In a fragment store it is one of names:
            ``prefix=orders/`` or ``name=orders/part-000``.
        schema: columns, as of :meth:`Reader.arrow() <gazette_sdk.message.Reader.arrow>`; None for
            those of the class.
        url: address of a broker, or URL of a fragment store; None for ``GAZETTE_ADDRESS`` of this
            process.
        isolation: ``"committed"``: committed messages, each once, and one range for each journal;
            ``"uncommitted"``: everything that was appended, in many ranges. There, an
            acknowledgement of a transaction is a row of nulls.
        range_bytes: limit of an uncommitted range. Adjacent fragments share a range.
        options: further arguments of :func:`~gazette_sdk.transport.connect`. Tasks get them, keys
            and tokens among them.

    Raises:
        ConfigurationError: the schema or an argument is malformed, or the URL is that of an
            embedded cluster, which no other process reaches.
        JournalNotFoundError: no journal matches.
        GazetteError: the journals cannot be listed.
    """
    url = url or os.environ.get(ADDRESS_VARIABLE, "").strip() or DEFAULT_ADDRESS
    check_number("range_bytes", range_bytes, 1, is_whole=True)
    if url.startswith("embedded:"):
        raise ConfigurationError(
            f"{url} is a cluster inside this process, which tasks do not reach: give the address "
            "of its broker, `cluster.address`"
        )
    transport = connect(url, **options)
    try:
        columns = Reader(message_type, selector, transport=transport, isolation=isolation).arrow(
            schema
        )
        limit = None if isolation == "committed" else range_bytes
        ranges = sdk_loop.run(_ranges(transport, selector, limit))
    finally:
        sdk_loop.run(transport.aclose())
    of_tasks = _class_of_tasks(message_type, needs_uuid=isolation == "committed")
    return JournalTable(of_tasks, columns.schema, url, isolation, options), ranges


async def _ranges(transport: Transport, selector: str, limit: int | None) -> list[JournalRange]:
    """Return the ranges of all journals; at least one, which may be empty."""
    listing = await list_journals(transport, selector)
    if not listing.journals:
        raise JournalNotFoundError(
            f"no journal matches {selector!r}; `gazctl journals list` shows all of them"
        )
    names = [each.spec.name for each in listing.journals]

    async def content(name: str) -> CoverSet:
        try:
            found = await list_all_fragments(transport, pb.FragmentsRequest(journal=name))
        except SuspendedError:
            return CoverSet()  # it holds nothing to read
        return CoverSet(each.spec for each in found.fragments)

    covers = await sdk_loop.for_each(names, content)
    found = [
        part
        for name, cover in zip(names, covers, strict=True)
        for part in _ranges_of(name, cover, limit)
    ]
    return found or [JournalRange(names[0], 0, 0)]


def _ranges_of(name: str, cover: CoverSet, limit: int | None) -> Iterator[JournalRange]:
    """Yield ranges of a journal. Only adjacent fragments share one that has a limit."""
    held: list[pb.Fragment] = []
    begin = end = 0
    for fragment in cover:
        is_next = limit is None or (fragment.begin <= end and fragment.end - begin <= limit)
        if held and not is_next:
            yield _range(name, begin, end, held)
            held = []
        if not held:
            begin = max(end, fragment.begin)
        held.append(fragment)
        end = fragment.end
    if held:
        yield _range(name, begin, end, held)


def _range(name: str, begin: int, end: int, fragments: list[pb.Fragment]) -> JournalRange:
    return JournalRange(name, begin, end, tuple(each.SerializeToString() for each in fragments))


# ---------------------------------------------------------------------------- Ray


def ray_datasource(
    message_type: Any, selector: str, schema: pa.Schema | None = None, **arguments: Any
) -> ray.data.Datasource:
    """Return journals as a source of ``ray.data.read_datasource``, with a task for each range.

    Needs the extra ``ray``. Arguments are those of :func:`plan`.

    Raises:
        ConfigurationError: as there, or Ray is not installed.
        GazetteError: as there.
    """
    with needs_extra("ray", "Ray datasources"):
        import pyarrow as pa  # noqa: PLC0415 - an extra
        from ray.data import Datasource, ReadTask  # noqa: PLC0415 - an extra
        from ray.data.block import BlockMetadata  # noqa: PLC0415 - an extra

    table, ranges = plan(message_type, selector, schema, **arguments)

    def blocks(part: JournalRange) -> Iterator[pa.Table]:
        yield table.schema.empty_table()
        for batch in table.batches(part):
            yield pa.Table.from_batches([batch])

    class GazetteDatasource(Datasource):  # type: ignore[misc] # its class is known to Ray alone
        """Source of the messages of journals."""

        def estimate_inmemory_data_size(self) -> int:
            return sum(part.end - part.begin for part in ranges)

        def get_read_tasks(self, parallelism: int, *_: Any, **_options: Any) -> list[ReadTask]:
            del parallelism  # the ranges are given
            return [
                ReadTask(
                    partial(blocks, part),
                    BlockMetadata(num_rows=None, size_bytes=part.end - part.begin, exec_stats=None),
                    schema=table.schema,
                )
                for part in ranges
            ]

    return GazetteDatasource()


# --------------------------------------------------------------------------- Dask


def dask_from_journals(
    message_type: Any, selector: str, schema: pa.Schema | None = None, **arguments: Any
) -> dask.dataframe.DataFrame:
    """Return journals as a Dask data frame, with a partition for each range.

    Columns have Arrow's types (``pandas.ArrowDtype``), the same in each partition. Needs the extra
    ``dask``. Arguments are those of :func:`plan`.

    Raises:
        ConfigurationError: as there, or Dask is not installed.
        GazetteError: as there.
    """
    with needs_extra("dask", "Dask data frames"):
        import dask.dataframe as dd  # noqa: PLC0415 - an extra

    table, ranges = plan(message_type, selector, schema, **arguments)
    empty = table.frame(JournalRange("", 0, 0))
    return cast(
        "dask.dataframe.DataFrame",
        dd.from_map(table.frame, ranges, meta=empty, label="journals"),
    )

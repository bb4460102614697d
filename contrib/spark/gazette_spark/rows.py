"""Rows of record batches as messages of the journals that a write goes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any

import pyarrow as pa

from gazette_sdk.errors import ConfigurationError, JournalNotFoundError, ValidationError
from gazette_sdk.framing.registry import framing_for
from gazette_sdk.message import CsvRecord, mapping
from gazette_sdk.message.kinds.json import KEY
from gazette_sdk.message.mapping import SelectorMapping
from gazette_sdk.protocol.labels import CONTENT_TYPE, value_of
from gazette_sdk.transport import Transport
from gazette_sdk.transport.listing import list_journals
from gazette_spark.options import load_message
from gazette_spark.write_options import WriteOptions

__all__ = ["RowForm", "row_form"]


@dataclass(frozen=True, slots=True)
class RowForm:
    """Form of the messages of a write.

    Attributes:
        messages: makes the messages of a record batch, for ``publish_batch``.
        mapping: which journal a message goes to.
    """

    messages: Callable[[pa.RecordBatch], Any]
    mapping: SelectorMapping


async def row_form(transport: Transport, options: WriteOptions) -> RowForm:
    """Return the form of messages that the journals of a write hold.

    Raises:
        JournalNotFoundError: no journal matches.
        ConfigurationError: the journals hold different forms, or one that needs a class.
    """
    listing = await list_journals(transport, options.journals)
    if not listing.journals:
        raise JournalNotFoundError(
            f"no journal matches {options.journals!r} at {options.url}; create one with"
            " `Journals().create` or `gazctl journals create`"
        )
    specs = [journal.spec for journal in listing.journals]
    types = {value_of(spec.labels, CONTENT_TYPE): spec.name for spec in specs}
    if len(types) > 1:
        texts = ", ".join(f"{name} holds {kind or 'bytes'}" for kind, name in types.items())
        raise ConfigurationError(
            f"gazette: journals of {options.journals!r} have different content types ({texts});"
            " write them one by one"
        )
    [(content_type, journal)] = types.items()
    form = framing_for(content_type).form
    if form == "json":
        if KEY in options.columns:
            raise ConfigurationError(
                f"gazette: the column {KEY!r} cannot be written to {journal}, as each message has"
                " its own UUID there; rename or drop the column"
            )
        return RowForm(lambda batch: batch.select(options.columns), _by_key(options, itemgetter))
    if form == "csv":
        return RowForm(
            lambda batch: _csv_records(batch.select(options.columns)),
            _by_key(options, lambda key: itemgetter(1 + options.columns.index(key))),
        )
    if not options.message:
        raise ConfigurationError(
            f"gazette: {journal} holds {content_type}; give the option message=module:Class"
        )
    message_type = load_message(options.message)
    return RowForm(
        lambda batch: _objects(batch.select(options.columns), message_type),
        _by_key(options, attrgetter),
    )


def _by_key(
    options: WriteOptions, getter: Callable[[str], Callable[[Any], Any]]
) -> SelectorMapping:
    if not options.key:
        return mapping.random(options.journals)
    return mapping.modulo(options.journals, key=getter(options.key))


def _csv_records(batch: pa.RecordBatch) -> list[CsvRecord]:
    """Return rows as records whose first field is left for the UUID.

    Raises:
        ValidationError: a column's values have no text.
    """
    for field in batch.schema:
        if pa.types.is_nested(field.type) or pa.types.is_binary(field.type):
            raise ValidationError(
                f"gazette: column {field.name!r} cannot be written to a CSV journal: it is"
                f" {field.type}; write base64() of binary columns, and to_json() of nested ones"
            )
    columns = [
        ["" if value is None else str(value) for value in column.to_pylist()]
        for column in batch.columns
    ]
    return [CsvRecord(["", *fields]) for fields in zip(*columns, strict=True)]


def _objects(batch: pa.RecordBatch, message_type: Callable[..., Any]) -> list[Any]:
    """Return rows as objects of a protobuf class, whose fields are named as the columns.

    Raises:
        ValidationError: a row does not fit the class.
    """
    objects = []
    for row in batch.to_pylist(maps_as_pydicts="strict"):
        try:
            objects.append(message_type(**_without_nulls(row)))
        except (ValueError, TypeError, AttributeError) as error:
            name = getattr(message_type, "__qualname__", message_type)
            raise ValidationError(
                f"gazette: a row does not fit {name}: {error}; select its fields, with their types"
            ) from error
    return objects


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value

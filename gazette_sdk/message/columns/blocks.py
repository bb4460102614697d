"""Blocks of whole frames to Arrow: a chunk at a time, never a message at a time.

A *block* is a run of whole frames of one journal. It becomes one ``pyarrow.RecordBatch`` with the
columns of a schema, metadata among them. For those who cut journals into blocks by themselves;
:meth:`Reader.arrow <gazette_sdk.message.Reader.arrow>` does that, and leaves out what is not
committed.
"""

from __future__ import annotations

import pyarrow as pa

from gazette_sdk.errors import TornFrameError
from gazette_sdk.framing import Cut, Framing, JsonLines
from gazette_sdk.message.columns.decoders import decoder_of
from gazette_sdk.message.columns.metadata import METADATA_COLUMNS
from gazette_sdk.message.columns.rows import Rows
from gazette_sdk.message.kinds import kind_of
from gazette_sdk.message.kinds.base import Kind
from gazette_sdk.message.reading.journal_decoder import Part

__all__ = ["METADATA_COLUMNS", "BlockDecoder", "decode_json_block"]


class BlockDecoder:
    """Decodes blocks of one journal, each by itself; sequences nothing.

    Args:
        journal: name of the journal, for ``_journal`` and for errors.
        framing: its framing.
        kind: adapter of the messages' class.
        schema: columns wanted, with their types. Fields of messages without a column are
            ignored; columns without a field are null.
    """

    def __init__(
        self, journal: str, framing: Framing, kind: Kind[object], schema: pa.Schema
    ) -> None:
        self._decoder = decoder_of(journal, framing, kind, schema, 0, sequenced=False)

    def decode(self, cut: Cut) -> pa.RecordBatch:
        """The batch of a block's frames.

        Raises:
            DecodeError: a message cannot be decoded or does not fit the schema; names its offset.
        """
        run, error = self._decoder.empty(), None
        if cut.frames.ends:
            part = Part(cut.buffer, cut.frames, cut.offset)
            run, error = self._decoder.decode_part(part)
        if error is not None:
            raise error
        assert isinstance(run.items, Rows)
        return run.items.batch


def decode_json_block(block: bytes, journal: str, begin: int, schema: pa.Schema) -> pa.RecordBatch:
    """Decode JSON lines.

    Args:
        block: whole lines, the last one with its newline.
        journal: name of the journal, for ``_journal`` and for errors.
        begin: offset of the block's first byte.
        schema: as of :class:`BlockDecoder`.

    Raises:
        DecodeError: a line is no JSON object or does not fit the schema; names its offset.
        TornFrameError: the block ends within a line.
    """
    framing = JsonLines()
    frames = framing.cut(block, final=True)
    if frames.error is not None:
        raise TornFrameError(
            f"{journal}: the content which was read ends within the message at offset "
            f"{begin + frames.consumed}; read on to its end",
            journal=journal,
            offset=begin + frames.consumed,
        )
    return BlockDecoder(journal, framing, kind_of(dict, "json"), schema).decode(
        Cut(block, frames, begin)
    )

"""Messages: typed objects in journals, published and read.

In reading order:

- ``flags``, ``clock``, ``uuid``: what a message's UUID says, and how it is written
- ``kinds``: classes of messages and where their UUID lives; ``json_kinds``, ``protobuf_kind``,
  and ``empty`` (what acknowledgements are made of)
- ``envelope``: a message where it stands in its journal
- ``mapping``: from a message to its journal; ``partitions``: the journals a mapping chooses among
- ``publisher``: :class:`Publisher`, over ``sender`` (one producer's messages, from stamp to
  acknowledgement), ``outbox`` (those on their way to one journal), ``receipt``, and ``link`` (what
  it holds on the event loop)
- ``reader``: :class:`Reader`, over ``journal_decoder`` (content to envelopes), ``prefetch``
  (reading ahead, on the event loop) and ``mailbox`` (from there to the consumer)
- ``arrow``: blocks of frames to record batches
"""

from gazette_sdk.message import mapping
from gazette_sdk.message.clock import Clock
from gazette_sdk.message.envelope import Envelope
from gazette_sdk.message.flags import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN
from gazette_sdk.message.kinds import JsonMessage
from gazette_sdk.message.publisher import Publisher
from gazette_sdk.message.reader import Reader
from gazette_sdk.message.receipt import Receipt

__all__ = [
    "ACK_TXN",
    "CONTINUE_TXN",
    "OUTSIDE_TXN",
    "Clock",
    "Envelope",
    "JsonMessage",
    "Publisher",
    "Reader",
    "Receipt",
    "mapping",
]

"""Messages: typed objects in journals, published and read.

In reading order:

- ``flags``, ``clock``, ``uuid``: what a message's UUID says, and how it is written
- ``kinds``: classes of messages and where their UUID lives; ``json_kinds``, ``protobuf_kind``,
  and ``empty`` (what acknowledgements are made of)
- ``envelope``: a message where it stands in its journal
- ``mapping``: from a message to its journal; ``partitions``: the journals a mapping chooses among
- ``publisher``: :class:`Publisher`, and ``transaction``: :class:`Transaction`, whose stored end is
  ``intents``; over ``dispatch`` (what is published, validated and mapped), ``routes`` (from
  messages to outboxes), ``deferred`` (what cannot be mapped yet), ``bulk`` and ``rows`` (batches
  of messages, and of columns), ``sender`` (from stamp to acknowledgement), ``producer`` (of
  transactions), ``outbox`` (what is on its way to one journal), ``batch`` and ``receipt``, and
  ``link`` (what it holds on the event loop)
- ``run``: messages of a journal as arrays; ``sequencer``: which of them are committed, over
  ``sequencer_machine`` (one by one), ``plain_runs`` (in bulk), ``sequencer_state`` and
  ``sequencer_metrics``; ``checkpoint``: where reading goes on
- ``reader``: :class:`Reader`, over ``plan`` (what to read), ``pump`` (from content to batches),
  ``journal_decoder`` (content to envelopes) with ``fixed_place`` (their UUIDs, in bulk),
  ``delivery`` (what is delivered, and where a reader stands), ``prefetch`` (reading ahead, on the
  event loop), ``flow`` and ``mailbox`` (from there to the consumer)
- ``arrow``: columns of messages, its parts, and ``arrow_reader``: what ``Reader.arrow`` returns
"""

from gazette_sdk.message import mapping
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.message.clock import Clock
from gazette_sdk.message.envelope import Envelope
from gazette_sdk.message.flags import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN
from gazette_sdk.message.intents import AckIntents
from gazette_sdk.message.kinds import JsonMessage
from gazette_sdk.message.publisher import Publisher
from gazette_sdk.message.reader import Reader
from gazette_sdk.message.receipt import BatchReceipt, Receipt
from gazette_sdk.message.transaction import Transaction, TransactionInDoubtError

__all__ = [
    "ACK_TXN",
    "CONTINUE_TXN",
    "OUTSIDE_TXN",
    "AckIntents",
    "BatchReceipt",
    "Checkpoint",
    "Clock",
    "Envelope",
    "JsonMessage",
    "Publisher",
    "Reader",
    "Receipt",
    "Transaction",
    "TransactionInDoubtError",
    "mapping",
]

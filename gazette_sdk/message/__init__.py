"""Messages: typed objects in journals, published and read.

In reading order:

- ``mapping``: Mappings of messages to journals (message section 9).
- ``receipt``: Receipts: journal and offsets of published messages, once they are acknowledged.
- ``uuid``: UUIDs of messages, which hold their producer, clock and flags (message section 1).
- ``checkpoint``: Checkpoints: exact positions of readers, from which others continue.
- ``runs``: Runs: messages of one journal as arrays, and their UUIDs parsed in bulk.
- ``fetcher``: Coroutines that fetch the content of journals ahead of a reader's consumer.
- ``kinds``: Kinds of messages: conversion of objects of a class to payloads, and the place of
  their UUID.
- ``sequencer``: Sequencer of messages: selects those that are committed, each once (message
  section 13).
- ``delivery``: Delivery: which messages of a reader are delivered, and when. Pure.
- ``sender``: Sends the messages of a publisher: validates, maps, stamps and encodes them.
- ``batch_reader``: Batches of messages of journals, for one consumer.
- ``bulk``: Batches of messages, encoded and stamped in bulk.
- ``columns``: Columns: messages as Arrow record batches. Needs the extra ``arrow``.
- ``transaction``: Transactions: messages of several journals which become visible together, or
  not at all.
- ``publisher``: Publishes messages to the journals their mappings choose (message section 11).
- ``message_cutter``: Cutter of a journal's content into messages, without the classes that a
  program declares.
- ``reader``: Reader of messages, for plain code and coroutines (message sections 12 to 14).
"""

from gazette_sdk.message import mapping
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.message.kinds import CsvRecord, JsonMessage
from gazette_sdk.message.publisher import Publisher
from gazette_sdk.message.reader import Lag, Reader
from gazette_sdk.message.receipt import BatchReceipt, Receipt
from gazette_sdk.message.sender import AckIntents
from gazette_sdk.message.transaction import (
    PreparedTransaction,
    Transaction,
    TransactionInDoubtError,
)
from gazette_sdk.message.uuid import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN, Clock, Envelope

__all__ = [
    "ACK_TXN",
    "CONTINUE_TXN",
    "OUTSIDE_TXN",
    "AckIntents",
    "BatchReceipt",
    "Checkpoint",
    "Clock",
    "CsvRecord",
    "Envelope",
    "JsonMessage",
    "Lag",
    "PreparedTransaction",
    "Publisher",
    "Reader",
    "Receipt",
    "Transaction",
    "TransactionInDoubtError",
    "mapping",
]

"""Messages: typed objects in journals, published and read.

In reading order:

- ``flags``, ``clock``, ``uuid``: UUIDs of messages and their parts
- ``kinds``: classes of messages, and the place of their UUID
- ``envelope``: a message with its place in its journal
- ``mapping``: mappings of messages to journals
- ``publishing``: :class:`Publisher`, transactions, batches
- ``sequencing``: selection of committed messages; checkpoints
- ``reading``: :class:`Reader`; ``columns``: messages as record batches
"""

from gazette_sdk.message import mapping
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.message.envelope import Envelope
from gazette_sdk.message.kinds import CsvRecord, JsonMessage
from gazette_sdk.message.outbox import AckIntents
from gazette_sdk.message.publisher import Publisher
from gazette_sdk.message.reader import Reader
from gazette_sdk.message.receipt import BatchReceipt, Receipt
from gazette_sdk.message.transaction import (
    PreparedTransaction,
    Transaction,
    TransactionInDoubtError,
)
from gazette_sdk.message.uuid import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN, Clock

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
    "PreparedTransaction",
    "Publisher",
    "Reader",
    "Receipt",
    "Transaction",
    "TransactionInDoubtError",
    "mapping",
]

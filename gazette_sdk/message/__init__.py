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
from gazette_sdk.message.clock import Clock
from gazette_sdk.message.envelope import Envelope
from gazette_sdk.message.flags import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN
from gazette_sdk.message.kinds import CsvRecord, JsonMessage
from gazette_sdk.message.publishing.ending import PreparedTransaction
from gazette_sdk.message.publishing.intents import AckIntents
from gazette_sdk.message.publishing.publisher import Publisher
from gazette_sdk.message.publishing.receipt import BatchReceipt, Receipt
from gazette_sdk.message.publishing.transaction import Transaction, TransactionInDoubtError
from gazette_sdk.message.reading.reader import Reader
from gazette_sdk.message.sequencing.checkpoint import Checkpoint

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

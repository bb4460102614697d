"""Messages: typed objects in journals, published and read.

In reading order:

- ``flags``, ``clock``, ``uuid``: what a message's UUID says, and how it is written
- ``kinds``: classes of messages, and where their UUID lives
- ``envelope``: a message where it stands in its journal
- ``mapping``: from a message to its journal
- ``publishing``: :class:`Publisher`, transactions, batches
- ``sequencing``: which messages are committed; checkpoints
- ``reading``: :class:`Reader`; ``columns``: messages as record batches
"""

from gazette_sdk.message import mapping
from gazette_sdk.message.clock import Clock
from gazette_sdk.message.envelope import Envelope
from gazette_sdk.message.flags import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN
from gazette_sdk.message.kinds import CsvRecord, JsonMessage
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
    "Publisher",
    "Reader",
    "Receipt",
    "Transaction",
    "TransactionInDoubtError",
    "mapping",
]

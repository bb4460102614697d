"""Errors of publishing and reading messages."""

from __future__ import annotations

from gazette_sdk.errors.base import GazetteError


class FramingError(GazetteError):
    """Malformed bytes of a journal, which cannot be decoded as messages; or no known framing.

    Remedy: check that the journal's ``content-type`` label is right, and that its framing is
    registered. ``Reader(on_error="skip")`` continues after malformed bytes.
    """


class DecodeError(FramingError):
    """A complete frame whose message cannot be decoded or is invalid.

    Remedy: check the class of the messages. ``Reader(on_error="skip")``, or a function as
    ``on_error=``, continues with the next message.

    Attributes:
        frame: the frame's bytes; None where there is no such frame.
    """

    def __init__(
        self,
        message: str,
        *,
        frame: bytes | None = None,
        journal: str | None = None,
        offset: int | None = None,
    ) -> None:
        super().__init__(message, journal=journal, offset=offset)
        self.frame = frame


class DesyncError(FramingError):
    """Malformed bytes at the begin of a frame.

    Remedy: find the writer of the bytes, which did not use the journal's framing.
    ``Reader(on_error="skip")`` continues with the next frame.

    Attributes:
        skipped: number of the malformed bytes.
    """

    def __init__(
        self, message: str, *, skipped: int, journal: str | None = None, offset: int | None = None
    ) -> None:
        super().__init__(message, journal=journal, offset=offset)
        self.skipped = skipped


class OversizedFrameError(FramingError):
    """A frame that is longer than readers take.

    Remedy: publishers of this package refuse such messages; find the writer that does not.
    ``Reader(on_error="skip")`` continues with the next frame. ``frame_bytes_max`` of the framing
    raises the limit.
    """


class TornFrameError(FramingError):
    """The journal ends within a frame.

    Remedy: wait until its writer completes it, with ``block=True``. If the writer is gone, append
    the rest or a line break.
    """


class CheckpointMismatchError(GazetteError):
    """A checkpoint is of an earlier journal of the same name, which was deleted.

    Remedy: ``Reader(on_missing="begin")`` reads the journal that exists now from its begin, and
    ``on_missing="end"`` from its write head. If the content is the same as before, pass
    ``offsets=checkpoint.offsets`` instead of the checkpoint.
    """


class MappingError(GazetteError):
    """A message maps to no journal.

    Remedy: create journals that match the selector (``Journals().create(…)``), or correct the
    mapping.
    """


class BackPressureError(GazetteError):
    """The limit of unacknowledged bytes is reached (``pending_bytes_max``).

    Remedy: wait for receipts or ``flush()``, then publish again. In a coroutine, ``await
    apublish(…)`` waits.
    """


class DeliveryTimeoutError(GazetteError):
    """An append was not acknowledged within the delivery time-out. It may be written nevertheless.

    Remedy: check the brokers (``gazctl journals list``), and publish again if readers may see a
    message twice. ``Publisher(delivery_timeout_s=…)`` sets the time-out.
    """

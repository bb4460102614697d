"""Phase *read*: read all messages as fast as possible, and verify them."""

from __future__ import annotations

import time
from itertools import islice

from gazette_sdk.cli.bench.content import Messages
from gazette_sdk.cli.bench.report import Throughput
from gazette_sdk.cli.bench.settings import BenchSettings
from gazette_sdk.cli.bench.site import Site
from gazette_sdk.cli.bench.verify import Ledger, Reading
from gazette_sdk.cli.progress import Progress
from gazette_sdk.message import Reader

__all__ = ["catch_up"]

BLOCK_MESSAGES = 1000
"""Number of messages that are verified together."""


def catch_up(
    settings: BenchSettings, site: Site, ledger: Ledger, progress: Progress
) -> tuple[Reading, Throughput]:
    """Read the committed messages of all journals from their beginnings to their write heads.

    The time includes the comparison with the published messages.

    Raises:
        GazetteError: a journal cannot be read.
    """
    reading = Reading(ledger.journals, Messages(settings.size))
    progress.begin("Reading", ledger.acknowledged)
    with Reader(dict, site.selector, transport=site.transport) as reader:
        begun = time.perf_counter()
        envelopes = iter(reader)
        while block := list(islice(envelopes, BLOCK_MESSAGES)):
            reading.feed(block)
            progress.advance(reading.findings.count)
        took = time.perf_counter() - begun
    return reading, Throughput(reading.findings.count, ledger.length_bytes, took)

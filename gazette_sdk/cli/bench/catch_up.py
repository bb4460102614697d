"""The phase *read*: everything at once, as quickly as it goes, and whether it is right."""

from __future__ import annotations

import time
from itertools import islice

from gazette_sdk.cli.bench.content import Messages
from gazette_sdk.cli.bench.display import Display
from gazette_sdk.cli.bench.report import Throughput
from gazette_sdk.cli.bench.settings import BenchSettings
from gazette_sdk.cli.bench.site import Site
from gazette_sdk.cli.bench.verify import Ledger, Reading
from gazette_sdk.message import Reader

__all__ = ["catch_up"]

BLOCK_MESSAGES = 1000
"""Messages which are looked at together."""


def catch_up(
    settings: BenchSettings, site: Site, ledger: Ledger, display: Display
) -> tuple[Reading, Throughput]:
    """Read all journals from their beginning to their write heads, committed messages only.

    The time includes the comparison with what was published.

    Raises:
        GazetteError: a journal cannot be read.
    """
    reading = Reading(ledger.journals, Messages(settings.size))
    display.begin("Reading", ledger.acknowledged)
    with Reader(dict, site.selector, transport=site.transport) as reader:
        begun = time.perf_counter()
        envelopes = iter(reader)
        while block := list(islice(envelopes, BLOCK_MESSAGES)):
            reading.feed(block)
            display.advance(reading.findings.count)
        took = time.perf_counter() - begun
    return reading, Throughput(reading.findings.count, ledger.length_bytes, took)

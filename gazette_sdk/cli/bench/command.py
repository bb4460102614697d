"""Phases of ``gazette bench``."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from gazette_sdk.cli.bench.publish import publish
from gazette_sdk.cli.bench.report import Report, Verification
from gazette_sdk.cli.bench.site import Messages, Site, open_site
from gazette_sdk.cli.bench.tail import catch_up, tail
from gazette_sdk.cli.bench.verify import Findings, Ledger
from gazette_sdk.cli.formats import Progress, open_progress
from gazette_sdk.cli.program import CommandFailedError, Invocation
from gazette_sdk.cli.settings import BENCH, BENCH_CLUSTER, BenchSettings
from gazette_sdk.server.settings import LOGGING, LoggingSettings


def run(invocation: Invocation) -> None:
    """Create journals, run the phases, delete the journals, and print the figures.

    Raises:
        CommandFailedError: the messages that were read differ from those that were acknowledged,
            or the run could not be set up.
        GazetteError: a phase failed.
    """
    settings, logging = invocation.settings(BENCH), invocation.settings(LOGGING)
    report: Report | None = None
    try:
        with _terminable(), open_progress("messages") as progress:
            progress.begin("Creating journals")
            with open_site(settings, invocation.settings(BENCH_CLUSTER), logging) as site:
                report = _measure(settings, site, logging, progress)
                progress.begin("Deleting journals")
    finally:
        if report is not None:  # also if the deletion failed
            report.setting["version"] = invocation.version
            write = report.write_json if settings.json_output else report.write_tables
            write()
    findings = report.verification.findings if report.verification is not None else Findings()
    if not findings.is_flawless:
        raise CommandFailedError(f"what was read is not what was acknowledged: {findings}")


def _measure(
    settings: BenchSettings, site: Site, logging: LoggingSettings, progress: Progress
) -> Report:
    phases = settings.phases.split(",")
    ledger = Ledger(site.journals)
    report = Report(_setting(settings, site))
    findings = Findings()
    if "publish" in phases:
        report.publish = publish(settings, site, ledger, progress)
    if "tail" in phases:
        tailed, report.tail = tail(settings, site, ledger, logging, progress)
        report.tail_rate, report.latency = settings.rate, tailed.latency
        findings.add(tailed.findings)
        report.verification = Verification(findings)
    if "read" in phases:
        reading, report.read = catch_up(settings, site, ledger, progress)
        progress.begin("Comparing")
        chains = ledger.chains(Messages(settings.size))
        findings.add(reading.finish(ledger.acknowledged, chains))
        report.verification = Verification(findings, chains)
    return report


def _setting(settings: BenchSettings, site: Site) -> dict[str, object]:
    return {
        "address": site.address,
        "embedded": settings.embedded,
        "prefix": site.prefix,
        "journals": settings.journals,
        "replication": settings.replication,
        "store": settings.store,
        "message_bytes": settings.size,
        "mode": settings.mode,
        **({"batch": settings.batch} if settings.mode == "publish_batch" else {}),
    }


@contextmanager
def _terminable() -> Iterator[None]:
    """Handle SIGTERM as Ctrl-C: the run deletes its journals and ends its processes."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

"""The command: findings for people and for programs, and the bundle for a report of a fault.

The bundle is an archive of what those who look for a fault ask for first. Texts pass
:func:`~gazette_sdk.server.logging.redact`, and URLs of stores lose their arguments.
"""

from __future__ import annotations

import asyncio
import io
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import aiohttp
import orjson

from gazette_sdk.cli.doctor.checks import Result, Status, diagnose, exit_status, without_query
from gazette_sdk.cli.doctor.facts import Facts, Source
from gazette_sdk.cli.doctor.gather import Place, gather
from gazette_sdk.cli.program import CommandFailedError, Invocation
from gazette_sdk.cli.settings import DOCTOR, DOCTOR_BROKER
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.server.json_gateway import message_json
from gazette_sdk.server.logging import redact
from gazette_sdk.server.settings import ETCD
from gazette_sdk.server.tls import with_secrets
from gazette_sdk.transport.loop import for_each

BUNDLE_BYTES_MAX = 20 << 20
"""Greatest size of a bundle, so that it can be sent by mail."""

TEXT_CHARACTERS_MAX = 1 << 20
"""Greatest length of one text of a bundle."""

MEMBERS_MAX = 32
"""Members of which a bundle has metrics, events, stacks and a profile, at most."""

PROFILE_S = 10
_MARGIN_BYTES = 1 << 20
_ANSWER_TIMEOUT_S = 5.0
_CALLS = 64

_PAGES = {
    "events": "/debug/events",
    "stacks": "/debug/pprof/goroutine",
    "requests": "/debug/requests",
    "metrics": "/debug/metrics",
    "profile": f"/debug/pprof/profile?seconds={PROFILE_S}",
}
"""Pages of each member that a bundle has, by the directory within it. The smallest come first."""


class DoctorFailedError(CommandFailedError):
    """Diagnosis that has findings.

    Args:
        message: how many.
        status: exit status of the program.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.exit_status = status


async def run(invocation: Invocation) -> None:
    """Diagnose a cluster.

    Raises:
        DoctorFailedError: something is wrong.
        ConfigurationError: an option cannot be used.
    """
    settings = invocation.settings(DOCTOR)
    place = _place(invocation)
    facts = await gather(place)
    results = diagnose(facts)
    if settings.as_json:
        sys.stdout.write(orjson.dumps(shown_json(facts, results)).decode() + "\n")
    else:
        write_results(results, sys.stdout)
    sys.stdout.flush()
    if settings.bundle:
        await write_bundle(Path(settings.bundle), place, facts, results)
    status = exit_status(results)
    if not {Source.MEMBERS, Source.JOURNALS, Source.ETCD} - facts.missing.keys():
        raise DoctorFailedError("nothing of the cluster can be asked", 2)
    if status:
        raise DoctorFailedError(f"the diagnosis has {_counts(results)}", status)


def _place(invocation: Invocation) -> Place:
    broker = with_secrets(DOCTOR_BROKER, invocation.settings(DOCTOR_BROKER))
    etcd = with_secrets(ETCD, invocation.settings(ETCD))
    return Place(
        address=broker.address,
        authorizer=broker.authorizer(),
        tls=broker.connect_options()["tls"],
        etcd=etcd,
        spool_dir=broker.spool_dir,
        consumers=invocation.settings(DOCTOR).consumer,
        cert_files=(broker.server_cert_file, broker.cert_file, etcd.cert_file),
    )


# ---------------------------------------------------------------- output

_NAMES = {Status.ERROR: "error", Status.WARNING: "warning"}


def _counts(results: Sequence[Result]) -> str:
    counted = []
    for status, noun in _NAMES.items():
        if count := sum(result.status is status for result in results):
            counted.append(f"{count} {noun}{'' if count == 1 else 's'}")
    return " and ".join(counted)


def shown_json(facts: Facts, results: Sequence[Result]) -> dict[str, object]:
    """Return a diagnosis as one object."""
    return {
        "status": ("ok", "warning", "error")[exit_status(results)],
        "broker": facts.broker,
        "unknown": {str(source): redact(text) for source, text in facts.missing.items()},
        "checks": [asdict(result) for result in results],
    }


def write_results(results: Sequence[Result], file: TextIO) -> None:
    """Write a diagnosis for people."""
    for result in results:
        if result.status in (Status.ERROR, Status.WARNING, Status.NOTE):
            file.writelines(f"{line}\n" for line in _lines(result))
    by_reason: dict[str, list[str]] = {}
    for result in results:
        if result.status is Status.UNKNOWN:
            by_reason.setdefault(result.evidence[0], []).append(result.check)
    file.writelines(
        f"UNKNOWN {', '.join(names)}\n    {reason}\n" for reason, names in by_reason.items()
    )
    fine = sum(result.status is Status.OK for result in results)
    unknown = sum(map(len, by_reason.values()))
    found = _counts(results) or "no error and no warning"
    file.write(f"{found}; {fine} of {len(results)} checks are fine, {unknown} could not be made\n")


def _lines(result: Result) -> Iterator[str]:
    yield f"{result.status.upper()} {result.check}"
    for text in result.evidence:
        yield f"    {text}"
    yield f"    Should be: {result.what}. If not, {result.why}."
    yield f"    $ {result.command}"
    yield ""


# ---------------------------------------------------------------- bundle


async def write_bundle(path: Path, place: Place, facts: Facts, results: Sequence[Result]) -> None:
    """Write the archive for a report of a fault. It takes some seconds more than its profile.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    texts: dict[str, str] = {
        "doctor.json": _pretty(shown_json(facts, results)),
        "report.json": _pretty(message_json(_report_without_secrets(facts))),
        "members.json": _pretty([message_json(each) for each in _members(facts)]),
        "journals.json": _pretty([_journal(each.spec) for each in facts.journals]),
        "shards.json": _pretty(
            [{"application": each.application, **message_json(each.spec)} for each in facts.shards]
        ),
    }
    members = facts.members[:MEMBERS_MAX]
    places = [(name, each) for name in _PAGES for each in members]
    async with place.http() as get:

        async def page(wanted: tuple[str, clpb.Member]) -> str:
            name, member = wanted
            timeout_s = _ANSWER_TIMEOUT_S + (PROFILE_S if name == "profile" else 0)
            try:
                return await get(member.endpoint, _PAGES[name], timeout_s)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                return f"not answered: {error or type(error).__name__}\n"

        for (name, member), text in zip(places, await for_each(places, page, _CALLS), strict=True):
            texts[f"{name}/{member.id.zone}-{member.id.suffix}.txt"] = text
    try:
        await asyncio.to_thread(_archive, path, texts)
    except OSError as error:
        raise ConfigurationError(f"--bundle: {path} cannot be written: {error.strerror}") from error


def _archive(path: Path, texts: dict[str, str]) -> None:
    """Write texts without secrets to an archive that only its owner may read."""
    left_out = []
    path.unlink(missing_ok=True)
    path.touch(0o600)
    with path.open("wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in texts.items():
            if file.tell() > BUNDLE_BYTES_MAX - _MARGIN_BYTES:
                left_out.append(name)
                continue
            shown = redact(text[:TEXT_CHARACTERS_MAX])
            if len(text) > TEXT_CHARACTERS_MAX:
                shown += "\n… the rest is left out\n"
            _add(archive, name, shown)
        if left_out:
            _add(archive, "left-out.txt", "\n".join([*left_out, ""]))


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    content = text.encode(errors="replace")
    entry = tarfile.TarInfo(f"gazette-doctor/{name}")
    entry.size, entry.mtime = len(content), int(time.time())
    archive.addfile(entry, io.BytesIO(content))


def _pretty(value: object) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode() + "\n"


def _report_without_secrets(facts: Facts) -> clpb.ReportResponse:
    report = clpb.ReportResponse()
    report.CopyFrom(facts.report)
    for store in report.stores:
        store.url = without_query(store.url)
    return report


def _members(facts: Facts) -> Iterator[clpb.Member]:
    for each in facts.members:
        member = clpb.Member()
        member.CopyFrom(each)
        for store in member.stores:
            store.url = without_query(store.url)
        yield member


def _journal(spec: pb.JournalSpec) -> object:
    shown = pb.JournalSpec()
    shown.CopyFrom(spec)
    shown.fragment.stores[:] = [without_query(url) for url in spec.fragment.stores]
    return message_json(shown)

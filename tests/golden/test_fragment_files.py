"""Stored fragments, as another broker stored them: names, codecs, members, modes; and read back.

The same appends to the same journals must give files of the same names with the same content.
Their compressed bytes are each encoder's own; what the other broker wrote is also put below a
store of ours, and read from there.
"""

from __future__ import annotations

import base64
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from gazette_sdk.protocol import broker_pb2 as pb
from support.golden import PATTERN, GoldenBroker, running
from support.golden_files import decoded, gzip_members
from support.vectors import golden

RECORDING = golden("broker/fragment_files.json")
JOURNALS = {entry["journal"]: entry for entry in RECORDING["journals"]}
TEXT = b"the quick brown fox jumps over the lazy dog. "
STEP, CHUNK = 300_000, 100_000
RECORDED_DAY = "2026-11-21"

SMALL = [f"files/{name}" for name in ("postfix", "rewritten", "prefixed", "two-stores", "no-store")]
LARGE = [journal for journal in JOURNALS if journal.endswith("-large")]
CODECS = [journal for journal in JOURNALS if journal.startswith("codec/")]
MOD_TIMES_SET = (1_700_000_000, 1_700_000_100)


@pytest.fixture(scope="module")
def days() -> set[str]:
    """The days on which our appends began and ended: one, or both around midnight."""
    return set()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, days: set[str]) -> Iterator[GoldenBroker]:
    """A broker which was given the recorded appends."""
    with running(tmp_path_factory.mktemp("files")) as broker:
        (broker.root / "sub").mkdir()
        specs = {journal: spec_recorded(journal) for journal in JOURNALS}
        for journal in LARGE:
            specs[journal].fragment.length = 1 << 24
        specs["files/codec-change"].fragment.compression_codec = pb.NONE
        broker.apply(*specs.values())
        days.add(today())
        for journal in SMALL:
            broker.append_all(journal, b"first\n", PATTERN[:1200], b"")
        days.add(today())
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda journal: append_text(broker, journal), LARGE))
        broker.append_all("files/codec-change", b"first\n", b"second\n")
        # From here on the journals are as they were recorded.
        broker.apply(*(spec_recorded(journal) for journal in (*LARGE, "files/codec-change")))
        for journal in LARGE:
            broker.append_all(journal, b"")
        broker.append_all(
            "files/codec-change", b"third\n", PATTERN[:1100], b"fourth\n", PATTERN[:1100], b""
        )
        for journal in CODECS:
            broker.append_all(
                journal, b"first fragment\n", PATTERN[:2000], PATTERN[2000:5000], b"", b""
            )
            broker.append_all(journal, b"local tail\n")
        for journal, entry in JOURNALS.items():
            broker.wait_until_stored(journal, len(entry["files"]))
        for journal in CODECS:
            set_mod_times(broker, journal)
        for journal in CODECS:
            broker.wait_for_index(
                journal, lambda found: [f.mod_time for f in found][:2] == [*MOD_TIMES_SET]
            )
        yield broker


@pytest.mark.parametrize("journal", JOURNALS)
def test_fragments_are_listed_as_recorded(
    broker: GoldenBroker, days: set[str], journal: str
) -> None:
    request = pb.FragmentsRequest(journal=journal)
    outcome = broker.client.call("ListFragments", [request.SerializeToString()])
    response = pb.FragmentsResponse.FromString(outcome.responses[0])
    there = [
        json_format.ParseDict(fragment, pb.FragmentsResponse._Fragment())
        for fragment in JOURNALS[journal]["list_fragments"]
    ]
    for fragment, recorded in zip(response.fragments, there, strict=True):
        if recorded.spec.mod_time not in {0, *MOD_TIMES_SET}:
            assert abs(fragment.spec.mod_time - time.time()) < 3600
            recorded.spec.mod_time = fragment.spec.mod_time
        assert fragment.spec.path_postfix in on_days(recorded.spec.path_postfix, days)
        recorded.spec.path_postfix = fragment.spec.path_postfix
    assert list(response.fragments) == there


@pytest.mark.parametrize("journal", JOURNALS)
def test_files_are_named_and_hold_what_was_recorded(
    broker: GoldenBroker, days: set[str], journal: str
) -> None:
    there = JOURNALS[journal]["files"]
    ours = [our_file(broker.root, file["path"], days) for file in there]
    found = {path for root in {path.parent for path in ours} for path in root.iterdir()}
    assert {path for path in found if path.is_file()} == set(ours)
    for path, file in zip(ours, there, strict=True):
        content = decoded(path.suffix, path.read_bytes())
        assert len(content) == file["content_len"]
        assert hashlib.sha1(content).hexdigest() == file["content_sha1"]
        assert_framed(path.read_bytes(), file)
        assert_mode(path, broker.root)
        if path.suffix == ".raw":
            assert path.read_bytes() == base64.b64decode(file["base64"])


def test_nothing_else_stands_in_the_stores(broker: GoldenBroker, days: set[str]) -> None:
    """But for what the probes of their health leave; of another recording is ``health/``."""
    recorded = [file["path"] for entry in JOURNALS.values() for file in entry["files"]]
    there = {our_file(broker.root, path, days) for path in recorded}
    found = {path for path in broker.root.rglob("*") if path.is_file()}
    probes = set(RECORDING["other_files_in_store_roots"]) - {"health/.test/health-check"}
    assert found == there | {broker.root / path for path in probes}


@pytest.mark.parametrize("journal", [j for j in JOURNALS if JOURNALS[j]["files"]])
def test_files_of_the_other_broker_are_read(broker: GoldenBroker, journal: str) -> None:
    """They take the place of ours, under a journal of another name."""
    entry = JOURNALS[journal]
    copied = f"copied/{journal}"
    spec = spec_recorded(journal)
    spec.name = copied
    spec.fragment.stores[:] = ["file:///"]
    content = b""
    for file in entry["files"]:
        below = file["path"].split(journal.rpartition("/")[2] + "/", 1)[1]
        path = broker.root / copied / below
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(file["base64"]))
        content += decoded(path.suffix, path.read_bytes())
        assert hashlib.sha1(content[-file["content_len"] :]).hexdigest() == file["content_sha1"]
    broker.apply(spec)
    broker.wait_for_index(copied, lambda found: found and found[-1].end == len(content))
    request = pb.ReadRequest(journal=copied, end_offset=len(content))
    outcome = broker.client.call("Read", [request.SerializeToString()])
    assert outcome.code == "OK", outcome.message
    read = b"".join(pb.ReadResponse.FromString(wire).content for wire in outcome.responses)
    assert read == content


# ------------------------------------------------------------------ the recorded appends


def spec_recorded(journal: str) -> pb.JournalSpec:
    entry = JOURNALS[journal]
    spec = pb.JournalSpec(name=journal, replication=1)
    json_format.ParseDict(entry["fragment_spec"], spec.fragment)
    json_format.ParseDict(entry["labels"], spec.labels)
    return spec


def append_text(broker: GoldenBroker, journal: str) -> None:
    length = RECORDING["text_len"]
    text = (TEXT * (length // len(TEXT) + 1))[:length]
    broker.append_all(journal, b"first\n", b"")
    for begin in range(0, length, STEP):
        part = text[begin : begin + STEP]
        chunks = [part[at : at + CHUNK] for at in range(0, len(part), CHUNK)]
        assert broker.append(journal, *chunks).status == pb.OK


def set_mod_times(broker: GoldenBroker, journal: str) -> None:
    files = broker.wait_until_stored(journal, len(MOD_TIMES_SET))
    for path, mod_time in zip(files, MOD_TIMES_SET, strict=True):
        os.utime(path, (mod_time, mod_time))


def today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


def on_days(path: str, days: set[str]) -> set[str]:
    """What a recorded path is, if its day of the first append is one of ours."""
    return {path.replace(f"day={RECORDED_DAY}", f"day={day}") for day in days}


def our_file(root: Path, path: str, days: set[str]) -> Path:
    """The one file of ours that stands at a recorded path."""
    found = [root / each for each in on_days(path, days) if (root / each).is_file()]
    assert len(found) == 1, f"{path}, of {days}: {found}"
    return found[0]


# ------------------------------------------------------------------ files


def assert_framed(raw: bytes, file: dict[str, Any]) -> None:
    """Gzip members of the same sizes with the same header; the snappy stream's first bytes."""
    if "gzip_members" in file:
        assert gzip_members(raw) == file["gzip_members"]
        assert raw[:10].hex() == file["gzip_header"]
    if "snappy_first_bytes" in file:
        assert raw.hex().startswith(file["snappy_first_bytes"])


def assert_mode(path: Path, root: Path) -> None:
    assert mode(path) == RECORDING["modes"]["file"]
    directories: Sequence[Path] = list(path.relative_to(root).parents)[:-1]
    for directory in directories:
        if str(directory) != "sub":  # made by the test
            assert mode(root / directory) == RECORDING["modes"]["directory"]


def mode(path: Path) -> str:
    return oct(path.stat().st_mode & 0o777)

"""A broker which keeps all stores in files, as recorded of another broker.

The recorded broker stores offloaded gzip as gzip and cannot read it back. Ours can: of the cases
which read stored content the recorded answers up to the content hold, and the content is right.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.loop import run
from support.golden import PATTERN, TIMEOUT_S, names, recorded, running, spec_of
from support.golden_compare import RECORDED_ENDPOINT, Replay
from support.golden_files import gzip_members
from support.raw_http import exchange
from support.vectors import golden

JOURNAL = "codec/gzip-offload"
STORE = "s3://bucket/some/prefix/"
MOD_TIME = 1_700_000_000
CONTENTS = [b"first fragment\n", PATTERN[:5000], b"local tail\n"]

RPCS = {
    "read from 0": "Read",
    "read metadata": "Read",
    "read the local spool": "Read",
    "fragments with signature TTL": "ListFragments",
    "store health": "FragmentStoreHealth",
    "store health of a file store": "FragmentStoreHealth",
}


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replay]:
    with running(tmp_path_factory.mktemp("file_only"), file_only=True) as broker:
        fragment = {
            "length": 4096,
            "compression_codec": pb.GZIP_OFFLOAD_DECOMPRESSION,
            "stores": [STORE],
        }
        broker.apply(spec_of(JOURNAL, fragment=fragment))
        broker.append_all(JOURNAL, CONTENTS[0], PATTERN[:2000], PATTERN[2000:5000], b"", b"")
        broker.append_all(JOURNAL, CONTENTS[2])
        for path in broker.wait_until_stored(JOURNAL, 2):
            os.utime(path, (MOD_TIME, MOD_TIME))
        times = [MOD_TIME, MOD_TIME, 0]
        broker.wait_for_index(JOURNAL, lambda found: [f.mod_time for f in found] == times)
        replay = Replay(broker)
        for case in recorded("file_only_gzip_offload"):
            name = case["name"]
            if name == "read from 0":
                # Only the first metadata is the same: the recorded read fails behind it.
                outcome = broker.client.call("Read", replay.requests("Read", case))
                whole, outcome.responses = outcome.responses, outcome.responses[:1]
                ours = {"code": "OK", "message": "", "responses": case["responses"][:1]}
                replay.judge("Read", case | ours, outcome)
                outcome.responses = whole
            elif name in RPCS:
                replay.run(RPCS[name], case)
        yield replay


@pytest.mark.parametrize("name", RPCS)
def test_calls_are_answered_as_recorded(replay: Replay, name: str) -> None:
    replay.check(name)


def test_offloaded_content_is_read_back(replay: Replay) -> None:
    responses = [
        pb.ReadResponse.FromString(wire)
        for wire in replay.verdicts["read from 0"].outcome.responses
    ]
    assert b"".join(response.content for response in responses) == b"".join(CONTENTS)
    assert responses[-1].status == pb.OFFSET_NOT_YET_AVAILABLE


def test_http_has_the_recorded_head_and_the_content(replay: Replay) -> None:
    """The recorded answer breaks off after 15 bytes of gzip, which its content type tells of."""
    case = recorded("file_only_gzip_offload")[-1]
    assert {*RPCS, case["name"]} == set(names("file_only_gzip_offload"))
    endpoint = replay.broker.endpoint
    answer = run(exchange(endpoint, "GET", case["request"]["target"]), TIMEOUT_S)
    assert answer.status_line == case["status_line"]
    there = {name: value.replace(RECORDED_ENDPOINT, endpoint) for name, value in case["headers"]}
    ours = dict(answer.headers_beside(case["headers"]))
    assert ours.pop("Date") != there.pop("Date")
    assert there.pop("Content-Type") == "application/x-gzip"
    assert ours.pop("Content-Type") == "text/plain; charset=utf-8"
    assert ours == there
    assert answer.body == b"".join(CONTENTS)
    assert answer.complete


def test_files_are_stored_as_recorded(replay: Replay) -> None:
    """Gzip, in one member, under names without an extension; the store's URL is not in paths."""
    root: Path = replay.broker.root
    files = {file["path"]: file for file in golden("broker/file_only_gzip_offload.json")["files"]}
    found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert found == set(files)
    for name, file in files.items():
        raw = (root / name).read_bytes()
        if "gzip_members" not in file:
            assert raw == base64.b64decode(file["base64"])
            continue
        assert gzip_members(raw) == file["gzip_members"]
        assert raw[:10].hex() == file["gzip_header"]

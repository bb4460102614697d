"""Bad lines among columns: few of them take many passes over their block."""

from __future__ import annotations

import orjson
import pyarrow as pa
import pyarrow.json as pj
import pytest

from gazette_sdk.framing import JsonLines
from gazette_sdk.message.columns.decoders import column_decoder
from gazette_sdk.message.fetcher import Opened

SCHEMA = pa.schema([("n", pa.int64()), ("name", pa.string()), ("price", pa.float64())])
GOOD = [orjson.dumps({"n": n, "name": f"name {n}", "price": n / 2}) for n in range(1000)]
PASSES_MAX = 3
"""All lines; the lines before the bad one; the bad one."""


@pytest.fixture
def passes(monkeypatch):
    """Number of lines of each call of the parser."""
    counted = []
    read_json = pj.read_json

    def counting(file, **options):
        counted.append(file.size())
        return read_json(file, **options)

    monkeypatch.setattr(pj, "read_json", counting)
    return counted


@pytest.mark.parametrize("at", [0, 1, 500, 999])
@pytest.mark.parametrize(
    "bad",
    [
        b"no JSON",
        b'{"n":1,"name":"torn',
        b'{"n":"text"}',
        b'{"n":1.5}',
        b'{"n":1,"name":"\xff"}',
        b'{"price":NaN}',
        b"[1]",
    ],
)
def test_a_bad_line_is_found_in_few_passes(passes, bad, at):
    opened = Opened("a/b", JsonLines.content_type, 0, continues=False, create_revision=0)
    decoder = column_decoder(dict, SCHEMA, opened, sequenced=False)
    lines = [*GOOD[:at], bad, *GOOD[at:]]
    run, error = decoder.feed(b"\n".join(lines) + b"\n")
    assert len(run) == at
    assert error is not None
    assert error.offset == sum(len(line) + 1 for line in GOOD[:at])
    assert len(passes) <= PASSES_MAX
    count = at
    while decoder.has_more:
        run, error = decoder.feed()
        assert error is None
        count += len(run)
    assert count == len(GOOD)

"""ListFragments, as recorded of another broker: bounds, pages, signed URLs, refusals."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from gazette_sdk.protocol import broker_pb2 as pb
from support.golden import PATTERN, names, recorded, running, spec_of
from support.golden_compare import Replay

FRAGMENT = {"stores": ["file:///"], "length": 1024, "compression_codec": pb.NONE}
STEP = 1100
TIMES = [1_700_000_000, 1_700_000_100, 1_700_000_200, 1_700_000_300]


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replay]:
    with running(tmp_path_factory.mktemp("fragments")) as broker:
        broker.apply(
            spec_of("frag/list", fragment=FRAGMENT),
            spec_of("frag/new"),
            spec_of("append/wo", flags=pb.JournalSpec.O_WRONLY),
        )
        for number in range(len(TIMES)):
            broker.append_all("frag/list", PATTERN[number * STEP : (number + 1) * STEP])
        broker.append_all("frag/list", b"local")
        files = broker.wait_until_stored("frag/list", len(TIMES))
        for path, mod_time in zip(files, TIMES, strict=True):
            os.utime(path, (mod_time, mod_time))
        broker.wait_for_index("frag/list", lambda found: [f.mod_time for f in found] == [*TIMES, 0])
        replay = Replay(broker)
        for case in recorded("grpc_list_fragments"):
            replay.run("ListFragments", case)
        yield replay


@pytest.mark.parametrize("name", names("grpc_list_fragments"))
def test_list_fragments_answers_as_recorded(replay: Replay, name: str) -> None:
    replay.check(name)

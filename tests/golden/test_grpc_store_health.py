"""FragmentStoreHealth, as recorded of another broker, and what its probes leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.golden import names, recorded, running
from support.golden_compare import Replay


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replay]:
    with running(tmp_path_factory.mktemp("health")) as broker:
        store = broker.root / "health"
        store.mkdir()
        replay = Replay(broker)
        for case in recorded("grpc_store_health"):
            replay.run("FragmentStoreHealth", case)
            replay.verdicts[case["name"]].problems += left_problems(case, store)
        yield replay


@pytest.mark.parametrize("name", names("grpc_store_health"))
def test_store_health_answers_as_recorded(replay: Replay, name: str) -> None:
    replay.check(name)


def left_problems(case: dict[str, Any], store: Path) -> Iterator[str]:
    """Files, directories and modes that a probe left otherwise than recorded."""
    found = sorted(store.rglob("*"))
    paths = [f"{path.relative_to(store)}{'/' * path.is_dir()}" for path in found]
    if case.get("tree_after", paths) != paths:
        yield f"left are {paths}, recorded are {case['tree_after']}"
    for name, content in case.get("files_after", {}).items():
        if (store / name).read_text() != content:
            yield f"{name} holds {(store / name).read_text()!r}"
    for name, mode in case.get("modes_after", {}).items():
        if oct((store / name).stat().st_mode & 0o777) != mode:
            yield f"{name} has mode {oct((store / name).stat().st_mode)}"

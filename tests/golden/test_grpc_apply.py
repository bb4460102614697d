"""Apply, as recorded of another broker: every change, and every spec that is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.golden import names, recorded, running
from support.golden_compare import Replay

OURS = {
    # The recorded error is of the whole spec; ours names the field.
    "invalid: name with meta": {"message": "Changes[0].Upsert.Name: "},
}


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replay]:
    with running(tmp_path_factory.mktemp("apply")) as broker:
        replay = Replay(broker)
        for case in recorded("grpc_apply"):
            replay.run("Apply", case | OURS.get(case["name"], {}))
        yield replay


@pytest.mark.parametrize("name", names("grpc_apply"))
def test_apply_answers_as_recorded(replay: Replay, name: str) -> None:
    replay.check(name)


def test_what_was_refused_left_nothing(replay: Replay) -> None:
    """Of all changes only those are there which were answered with OK."""
    journals = [item.id for item in replay.broker.keyspace.items()]
    assert journals == [f"orders/part-00{number}" for number in range(4)]

from __future__ import annotations

import base64
import json

import msgspec
import pytest

from gazette_sdk.errors import ClosedError, ShardStoreError
from gazette_sdk.message.checkpoint import Checkpoint, ProducerState
from gazette_sdk.shard.recovery.hints import CreateFile, RenameFile, WriteFile
from gazette_sdk.shard.stores.json_store import JsonStore
from gazette_sdk.testing import store_contract
from support import vectors

Counts = JsonStore[dict[str, int]]


def test_it_keeps_the_contract(tmp_path) -> None:
    def write(store, number: int) -> None:
        store.state[f"key-{number % 5}"] = number

    store_contract.check(tmp_path, Counts, write=write, read=lambda store: dict(store.state))


def test_the_file_and_its_changes_are_those_of_the_reference(tmp_path) -> None:
    case = vectors.group("message", "json_state_file")
    checkpoint = Checkpoint(ack_intents={"echo/out": b"x\n"})
    for journal, source in case["checkpoint_in"]["sources"].items():
        checkpoint.offsets[journal] = source["read_through"]
        checkpoint.producers += [
            ProducerState(journal, bytes.fromhex(entry["id"]), entry["last_ack"], entry["begin"])
            for entry in source["producers"]
        ]
    store = JsonStore[dict[str, str]](tmp_path)
    assert store.restore() == Checkpoint()
    assert not list(tmp_path.iterdir()), "the first start writes no file"
    store.begin()
    store.state["key"] = "2"

    changes = store.start_commit(checkpoint)

    lines = case["expect_file_utf8"].encode().splitlines(keepends=True)
    assert (tmp_path / "state.json").read_bytes() == b"".join(lines)
    assert changes == [
        CreateFile("/next.json"),
        WriteFile("/next.json", 0, lines[0]),
        WriteFile("/next.json", len(lines[0]), lines[1]),
        WriteFile("/next.json", len(lines[0]) + len(lines[1]), lines[2]),
        RenameFile("/next.json", "/state.json"),
    ]
    assert store.restore() == checkpoint


def test_a_file_of_the_reference_is_read_and_written_alike(tmp_path) -> None:
    golden = vectors.golden("consumer/recoverylog/json-store.json")["state_json"]["bytes_b64"]
    (tmp_path / "state.json").write_bytes(content := base64.b64decode(golden))
    store = Counts(tmp_path)

    checkpoint = store.restore()
    store.begin()
    store.start_commit(checkpoint)

    assert store.state["<&>"] == 3
    assert checkpoint.offsets == {"gold/in/jstore": 535}
    assert (tmp_path / "state.json").read_bytes() == content


def test_offsets_of_the_first_document_hold(tmp_path) -> None:
    (tmp_path / "state.json").write_text(
        '{"a":5,"b":6}\n{}\n{"sources":{"a":{"read_through":4}}}\n'
    )
    assert Counts(tmp_path).restore().offsets == {"a": 5, "b": 6}


def test_journals_without_offset_and_producers_are_kept(tmp_path) -> None:
    store = Counts(tmp_path)
    store.restore()
    checkpoint = Checkpoint({"a": 0}, [ProducerState("a", b"\1abcde", 0, 0)], {}, {"a": 3})
    store.start_commit(checkpoint)
    assert store.restore() == checkpoint
    stored = json.loads((tmp_path / "state.json").read_text().splitlines()[2])
    assert stored["sources"]["a"]["producers"] == [{"id": "AWFiY2Rl", "state": {}}]


class Totals(msgspec.Struct):
    cents: int = 0


class TotalsStore(JsonStore[Totals]):
    pass


def test_the_state_may_be_of_any_type_and_queries_get_a_copy(tmp_path) -> None:
    store = TotalsStore(tmp_path)
    with pytest.raises(ClosedError), store.committed():
        pass
    store.restore()
    store.begin()
    store.state.cents = 7
    with store.committed() as view:
        assert view.state == Totals(0)
    store.start_commit(Checkpoint())
    with store.committed() as view:
        assert view.state == Totals(7)
        assert view.state is not store.state


@pytest.mark.parametrize(
    "content",
    [b"", b"{}\n{}\n", b"{}\n[]\n{}\n", b"{}\n{}\n[]\n", b'{}\n{"a":"b"}\n{}\n', b"{}\n{}\nx\n"],
)
def test_a_malformed_file_is_refused(tmp_path, content) -> None:
    (tmp_path / "state.json").write_bytes(content)
    with pytest.raises(ShardStoreError, match="declare the type that wrote it"):
        Counts(tmp_path).restore()


def test_a_state_that_is_no_json_is_refused(tmp_path) -> None:
    store = Counts(tmp_path)
    store.restore()
    store.state["a"] = object()
    with pytest.raises(ShardStoreError, match="cannot be encoded"):
        store.start_commit(Checkpoint())
    assert store.restore() == Checkpoint()

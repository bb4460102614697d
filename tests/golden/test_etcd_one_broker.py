"""What one broker writes to Etcd, as recorded of another broker: keys, values, transactions.

An empty Etcd counts its revisions from 1, so that here even those are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from gazette_sdk.cluster import etcd as etcd_client
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import (
    Compare,
    Delete,
    Get,
    KeyValue,
    Operation,
    Put,
    TxnResult,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.loop import run
from support.golden import TIMEOUT_S, GoldenBroker, connected, recorded, running, wire_of
from support.golden_compare import RECORDED_ENDPOINT
from support.vectors import golden

RECORDED = golden("broker/etcd_one_broker.json")
MEMBER = "/gazette/cluster/members/zone-a#broker-1"
LEASE = "LEASE_of_broker-1"


@dataclass
class Watched:
    """Dumps of the key space at named moments, and the transactions in between."""

    broker: GoldenBroker
    dumps: dict[str, list[dict[str, Any]]]
    joining: list[dict[str, Any]]
    applying: list[dict[str, Any]]
    leaving: list[dict[str, Any]]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with pytest.MonkeyPatch.context() as patch:
        transactions = listen(patch)
        with running(tmp_path_factory.mktemp("etcd_one")) as broker:
            joining = [shown(txn, broker) for txn in transactions]
            dumps = {"after_join": dump(broker)}
            transactions.clear()
            first = recorded("grpc_apply")[0]
            request = pb.ApplyRequest.FromString(wire_of(pb.ApplyRequest, first["requests"][0]))
            broker.client.call("Apply", [request.SerializeToString()])
            broker.wait_until_served(request.changes[0].upsert.name)
            dumps["after_first_journal"] = dump(broker)
            applying = [shown(txn, broker) for txn in transactions]
            transactions.clear()
            run(broker.served.broker.drain(), TIMEOUT_S)
            leaving = [shown(txn, broker) for txn in transactions]
            yield Watched(broker, dumps, joining, applying, leaving)


@pytest.mark.parametrize("moment", ["after_join", "after_first_journal"])
def test_keys_and_values_are_as_recorded(watched: Watched, moment: str) -> None:
    there = [key_recorded(entry, watched.broker) for entry in RECORDED[moment]]
    assert watched.dumps[moment] == there


def test_a_journal_is_applied_assigned_and_routed_as_recorded(watched: Watched) -> None:
    there = [txn_recorded(txn, watched.broker) for txn in RECORDED["transactions_first_journal"]]
    assert watched.applying == there


def test_a_broker_joins_as_recorded(watched: Watched) -> None:
    steps = golden("broker/etcd_transactions.json")["broker-1 joins"]
    there = [txn_recorded(step, watched.broker) for step in steps if "txn" in step]
    assert watched.joining == there


def test_a_broker_asks_to_leave_as_recorded(watched: Watched) -> None:
    shutdown = golden("broker/shutdown.json")["SIGTERM_of_the_only_broker_holding_journals"]
    (recorded_step,) = shutdown["transactions"]
    there = txn_recorded(recorded_step, watched.broker)
    (here,) = watched.leaving
    # Where it fails ours reads the key, to tell whether it was written by an answer that was lost.
    assert here.pop("failure") == [{"op": "get", "key": MEMBER}]
    assert there.pop("failure") == []
    # It had the revision that came next there, too.
    assert here.pop("revision") == watched.applying[-1]["revision"] + 1
    del there["revision"]
    assert here == there


# ------------------------------------------------------------------ what ours does


@dataclass(frozen=True)
class Txn:
    """A transaction which was sent, and its result."""

    compares: tuple[Compare, ...]
    then: tuple[Operation, ...]
    otherwise: tuple[Operation, ...]
    result: TxnResult


def listen(patch: pytest.MonkeyPatch) -> list[Txn]:
    """Keep every transaction that any client of this process sends."""
    heard: list[Txn] = []
    send = Etcd.txn

    async def txn(
        self: Etcd,
        compares: Iterable[Compare],
        then: Iterable[Operation],
        otherwise: Iterable[Operation] = (),
    ) -> TxnResult:
        sent = tuple(compares), tuple(then), tuple(otherwise)
        result = await send(self, *sent)
        heard.append(Txn(*sent, result))
        return result

    patch.setattr(etcd_client.Etcd, "txn", txn)
    return heard


def dump(broker: GoldenBroker) -> list[dict[str, Any]]:
    """All of Etcd, in the recordings' form."""

    async def read() -> tuple[KeyValue, ...]:
        client = await connected(broker.etcd_server)
        try:
            return (await client.range(b"\x00", b"\x00")).entries
        finally:
            await client.aclose()

    return [
        {
            "key": kv.key.decode(),
            "value_hex": kv.value.hex(),
            "create_revision": kv.create_revision,
            "mod_revision": kv.mod_revision,
            "version": kv.version,
            "lease": lease_name(kv.lease, broker),
        }
        for kv in run(read(), TIMEOUT_S)
    ]


def lease_name(lease: int, broker: GoldenBroker) -> str | None:
    membership = broker.served.broker._membership
    assert membership is not None
    assert lease in {0, membership.lease}
    return LEASE if lease else None


def shown(txn: Txn, broker: GoldenBroker) -> dict[str, Any]:
    """A transaction of ours, in the recordings' form."""
    return {
        "compare": unique(
            {
                "key": compare.key.decode(),
                "target": compare.target.removesuffix("_revision").upper(),
                "value": compare.value,
            }
            for compare in txn.compares
        ),
        "success": [operation(op, broker) for op in txn.then],
        "failure": [operation(op, broker) for op in txn.otherwise],
        "succeeded": txn.result.succeeded,
        "revision": txn.result.revision,
    }


def operation(op: Operation, broker: GoldenBroker) -> dict[str, Any]:
    match op:
        case Put(key, value, lease, ignore_lease):
            return {
                "op": "put",
                "key": key.decode(),
                "value_hex": value.hex(),
                "lease": lease_name(lease, broker),
                "ignore_lease": ignore_lease,
            }
        case Delete(key):
            return {"op": "delete", "key": key.decode()}
        case Get(key):
            return {"op": "get", "key": key.decode()}


# ------------------------------------------------------------------ what was recorded


def key_recorded(entry: dict[str, Any], broker: GoldenBroker) -> dict[str, Any]:
    names = ("key", "create_revision", "mod_revision", "version", "lease")
    return {name: entry[name] for name in names} | {"value_hex": value_of(entry, broker)}


def value_of(entry: dict[str, Any], broker: GoldenBroker) -> str:
    """A recorded value, with our endpoint in it."""
    if "BrokerSpec" not in entry["decoded"]:
        return str(entry["value_hex"])
    spec = pb.BrokerSpec.FromString(bytes.fromhex(entry["value_hex"]))
    assert spec.process_spec.endpoint == RECORDED_ENDPOINT
    assert spec.SerializeToString().hex() == entry["value_hex"]
    spec.process_spec.endpoint = broker.endpoint
    return spec.SerializeToString().hex()


def txn_recorded(entry: dict[str, Any], broker: GoldenBroker) -> dict[str, Any]:
    txn = entry["txn"]
    return {
        "compare": unique(
            {
                "key": compare["key"],
                "target": compare["target"],
                "value": compare.get("mod_revision", compare.get("version")),
            }
            for compare in txn["compare"]
        ),
        "success": [operation_recorded(op, broker) for op in txn["success"]],
        "failure": [operation_recorded(op, broker) for op in txn["failure"]],
        "succeeded": entry["succeeded"],
        "revision": entry["revision"],
    }


def operation_recorded(op: dict[str, Any], broker: GoldenBroker) -> dict[str, Any]:
    if op["op"] != "put":
        return {"op": op["op"], "key": op["key"]}
    return {
        "op": "put",
        "key": op["key"],
        "value_hex": value_of(op, broker),
        "lease": op.get("lease"),
        "ignore_lease": op.get("ignore_lease", False),
    }


def unique(compares: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A condition said twice is the same condition."""
    found: list[dict[str, Any]] = []
    for compare in compares:
        if compare not in found:
            found.append(compare)
    return found

"""``gazette spark transactions``, against a real cluster, and without Spark."""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gazette_sdk import Journals, Publisher, Reader, connect, mapping
from gazette_sdk.errors import GazetteError
from gazette_sdk.transport import Transport
from gazette_sdk.transport import loop as sdk_loop
from gazette_spark import transactions
from gazette_spark.transaction_log import Commit, TransactionLog, WriterKind, intents_text, line_of


@contextmanager
def opened(address: str) -> Iterator[Transport]:
    transport = connect(address)
    try:
        yield transport
    finally:
        sdk_loop.run(transport.aclose())


class Logs:
    """Journals of a topic, and the logs of their writers below a prefix of their own."""

    def __init__(self, tool, address: str) -> None:
        self.topic = f"topic-{uuid.uuid4().hex[:8]}"
        self.prefix = f"logs-{uuid.uuid4().hex[:8]}"
        self.address = address
        self._tool = tool
        with opened(address) as transport:
            Journals(transport).create(self.topic, partitions=2)

    def __call__(self, command: str, *arguments: str, ok: bool = True):
        call = self._tool.ok if ok else self._tool
        where = ("--address", self.address, "--transaction-log", self.prefix)
        return call("spark", "transactions", command, *arguments, *where)

    def objects(self, command: str, *arguments: str):
        text = self(command, *arguments, "-o", "json").text
        return [json.loads(line) for line in text.splitlines()]

    def write(self, writer: str, number: int, rows: int, *, dies: bool = False) -> None:
        """Write a transaction; a driver that dies leaves it decided."""
        with opened(self.address) as transport:
            by_number = mapping.modulo(f"topic={self.topic}", key=lambda message: str(message["n"]))
            with Publisher(transport=transport, mapping=by_number) as publisher:
                with publisher.transaction() as txn:
                    for n in range(rows):
                        txn.publish({"writer": writer, "number": number, "n": n})
                    prepared = txn.prepare()
                intents = [intents_text(prepared.intents)]
                log = TransactionLog(transport, f"{self.prefix}/{writer}", f"topic={self.topic}")
                if dies:
                    line = {"decided": number, "job": "dead", "intents": intents, "rows": rows}
                    sdk_loop.run(log._append(log.journal, line_of(line)))
                else:
                    commit = Commit(WriterKind.APPLICATION, number, f"job {number}")
                    sdk_loop.run(log.commit(commit, intents, rows))

    def visible(self) -> list[tuple[str, int]]:
        with opened(self.address) as transport:
            reader = Reader(dict, f"topic={self.topic}", transport=transport)
            return sorted((e.message["writer"], e.message["n"]) for e in reader)


@pytest.fixture
def logs(gazette, cluster) -> Logs:
    return Logs(gazette, cluster.address)


def state(logs: Logs, writer: str, state: str, transaction: int, messages: int) -> dict:
    return {
        "writer": writer,
        "state": state,
        "transaction": transaction,
        "messages": messages,
        "log": f"{logs.prefix}/{writer}",
    }


def test_logs_are_listed_for_people_and_for_programs(logs):
    assert logs.objects("list") == []
    logs.write("nightly", 3, 5)
    logs.write("weekly", 1, 2)
    logs.write("weekly", 2, 7, dies=True)
    assert logs.objects("list") == [
        state(logs, "nightly", "done", 3, 5),
        state(logs, "weekly", "decided", 2, 7),
    ]
    header, nightly, weekly = (line.split() for line in logs("list").text.splitlines())
    assert header == ["WRITER", "STATE", "TRANSACTION", "MESSAGES", "LOG"]
    assert nightly == ["nightly", "done", "3", "5", f"{logs.prefix}/nightly"]
    assert weekly[:4] == ["weekly", "decided", "2", "7"]
    where = {"address": logs.address, "transaction_log": logs.prefix}
    assert [each.is_open for each in transactions.list_logs(**where)] == [False, True]


def test_one_log_that_cannot_be_read_does_not_hide_the_others(logs, caplog):
    logs.write("nightly", 3, 5)
    logs.write("weekly", 1, 2)
    with opened(logs.address) as transport:
        direct = mapping.direct(f"{logs.prefix}/weekly")
        with Publisher(transport=transport, mapping=direct) as publisher:
            publisher.publish({"of": "another"}).result(20)
    assert logs.objects("list") == [
        state(logs, "nightly", "done", 3, 5),
        state(logs, "weekly", "unreadable", None, None),
    ]
    assert "the log of weekly cannot be read" in caplog.text


def test_what_a_dead_driver_decided_is_completed(logs):
    logs.write("weekly", 1, 2)
    logs.write("weekly", 2, 3, dies=True)
    assert logs.visible() == [("weekly", 0), ("weekly", 1)]
    assert "transaction 2 is complete" in logs("complete", "weekly").text
    assert logs.visible() == [("weekly", n) for n in (0, 0, 1, 1, 2)]
    assert logs.objects("list") == [state(logs, "weekly", "done", 2, 3)]
    assert "has nothing to complete" in logs("complete", "weekly").text


def test_a_log_with_an_open_transaction_is_deleted_only_if_it_is_told_to(logs):
    for writer in ("nightly", "weekly"):
        logs.write(writer, 1, 2)
    logs.write("weekly", 2, 3, dies=True)
    nightly, weekly = state(logs, "nightly", "done", 1, 2), state(logs, "weekly", "decided", 2, 3)

    shown = logs.objects("delete", "nightly", "weekly", "--dry-run")
    assert shown == [each | {"outcome": "would be deleted"} for each in (nightly, weekly)]
    assert logs.objects("list") == [nightly, weekly]

    outcome = logs("delete", "nightly", "weekly", "-o", "json")
    assert [json.loads(line) for line in outcome.text.splitlines()] == [
        nightly | {"outcome": "deleted"},
        weekly | {"outcome": "would be deleted"},
    ]
    assert "weekly: messages of transaction 2 would be lost" in outcome.stderr
    assert "transactions complete weekly" in outcome.stderr
    assert logs.objects("list") == [weekly]
    where = {"address": logs.address, "transaction_log": logs.prefix}
    with pytest.raises(GazetteError, match="transaction 2 is decided and not done"):
        transactions.delete("weekly", **where)
    assert logs.objects("list") == [weekly]

    assert "deleted" in logs("delete", "weekly", "--yes").text
    assert logs.objects("list") == []
    assert ("weekly", 2) not in logs.visible()


def test_a_writer_without_a_log_is_named(logs):
    for command in ("complete", "delete"):
        outcome = logs(command, "nobody", ok=False)
        assert outcome.status == 1
        assert f"{logs.prefix}/nobody" in outcome.stderr
        assert outcome.stderr.count("\n") == 1
    outcome = logs("delete", "nobody", "--yes", "--dry-run", ok=False)
    assert "give one of them" in outcome.stderr


@pytest.mark.parametrize("command", ["list", "complete", "delete"])
def test_a_broker_that_is_not_there_is_an_error_at_once(gazette, command):
    arguments = [] if command == "list" else ["nightly"]
    begun = time.monotonic()
    outcome = gazette(
        "spark", "transactions", command, *arguments, "--address", "http://127.0.0.1:9"
    )
    assert outcome.status == 1
    assert "cannot connect to http://127.0.0.1:9" in outcome.stderr
    assert time.monotonic() - begun < 30


def test_a_command_ends_after_its_timeout(gazette):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        where = ("--address", address, "--timeout", "1s")
        outcome = gazette("spark", "transactions", "complete", "nightly", *where)
    assert outcome.status == 124
    assert "did not end within 1s (--timeout); run it again" in outcome.stderr

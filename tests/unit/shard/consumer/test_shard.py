from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from gazette_sdk import shard as api
from gazette_sdk.cluster.consumer_keys import ConsumerKeySpace
from gazette_sdk.cluster.items import ItemEntry
from gazette_sdk.errors import DecodeError, JournalNotFoundError
from gazette_sdk.message.uuid import Envelope
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol import recoverylog_pb2 as rpb
from gazette_sdk.shard.consumer import shard as module
from gazette_sdk.shard.consumer.shard import LocalShard, ShardParts, ShardStepError
from gazette_sdk.shard.transaction.failure import HandlerFailedError, HookFailedError
from gazette_sdk.testing.handler_runs import MemoryOutput
from support.etcd import run
from support.order_totals import Order, totals

WAIT_S = 20.0


def a_shard(directory, shard="orders/part-000", **given):
    parts = ShardParts(
        application=given.pop("application", totals),
        transport=None,
        etcd=None,
        keyspace=ConsumerKeySpace("/app"),
        local_id=pb.ProcessSpec.ID(zone="local", suffix="process"),
        workers=None,
        directory=directory,
        lookups=asyncio.Semaphore(1),
        openings=asyncio.Semaphore(1),
        **given,
    )
    return LocalShard(an_entry(shard), parts)


def an_entry(shard):
    return ItemEntry(
        key=b"/app/items/" + shard.encode(),
        value=cpb.ShardSpec(id=shard),
        create_revision=1,
        mod_revision=1,
        version=1,
        lease=0,
        raw=b"",
        id=shard,
    )


def test_calls_that_use_a_store_too_long_are_named_when_it_is_closed(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "USE_TIMEOUT_S", 0.01)

    async def scenario():
        shard = a_shard(tmp_path)
        with shard.in_use():
            await shard.shut_down()
        assert not list(tmp_path.iterdir())

    run(scenario())
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "the store of orders/part-000 is closed under 1 calls" in record.getMessage()


def handler_failure(error):
    envelope = Envelope("orders/part-000", 8, 16, {})
    failure = HandlerFailedError(envelope, error)
    failure.__cause__ = error
    return failure


NO_NUMBER = ValueError("no number")
UNEXPECTED = ZeroDivisionError("unexpected")


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (JournalNotFoundError(journal="orders/part-000"), None),
        (DecodeError("the message at offset 8 cannot be decoded"), None),
        (handler_failure(NO_NUMBER), NO_NUMBER),
        (HookFailedError("consume", RuntimeError("deferred")), None),
        (UNEXPECTED, UNEXPECTED),
    ],
)
def test_only_code_that_is_to_be_fixed_is_shown_by_a_traceback(tmp_path, caplog, error, shown):
    async def scenario():
        shard = a_shard(tmp_path)

        async def work():
            raise error

        with pytest.raises(ShardStepError) as failed:
            await shard._step("runTransactions", work())
        shard._failed(failed.value)
        await shard.shut_down()

    run(scenario())
    (record,) = caplog.records
    assert record.getMessage().startswith("shard orders/part-000 failed: runTransactions: ")
    assert (record.exc_info or (None, None))[1] is shown


def test_a_shard_that_cannot_end_tells_what_it_waits_for(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "END_NOTICE_S", 0.01)

    async def scenario():
        shard, asked, released = a_shard(tmp_path), asyncio.Event(), asyncio.Event()

        async def goes_on():
            while not released.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await released.wait()

        def running_call(self):
            asked.set()
            return described(self)

        described = LocalShard.running_call
        monkeypatch.setattr(LocalShard, "running_call", running_call)
        shard._run(goes_on(), "primary")
        await asyncio.sleep(0)
        ending = asyncio.create_task(shard.shut_down())
        await asked.wait()
        assert not ending.done()
        released.set()
        await ending

    run(scenario())
    assert "a shard cannot end yet: orders/part-000:" in caplog.text


@pytest.mark.parametrize("shard", ["orders/part-000", "orders/" + "\U00010400" * 120])
def test_the_directory_of_a_shard_is_its_own_and_private(shard, tmp_path):
    async def scenario():
        local = a_shard(tmp_path / "removed", shard, application=application_of(api.JsonStore))
        local.is_primary = True
        local.start()
        await until(lambda: local.store is not None)
        (directory,) = (tmp_path / "removed").iterdir()
        assert local.store._directory == directory
        assert directory.stat().st_mode & 0o777 == 0o700
        await local.shut_down()
        assert not list((tmp_path / "removed").iterdir())

    run(scenario())


def test_a_directory_that_cannot_be_made_fails_the_shard_and_not_its_process(tmp_path):
    (tmp_path / "file").write_text("")

    async def scenario():
        local = a_shard(tmp_path / "file")
        local.is_primary = True
        local.start()
        await until(lambda: local.status.code == cpb.ReplicaStatus.FAILED)
        assert "Not a directory" in local.status.errors[0]
        await local.shut_down()

    run(scenario())


class Noted(api.JsonStore):
    destroyed = False
    refuses = None

    def restore(self):
        if self.refuses == "restore":
            raise ValueError("the store is broken")
        return super().restore()

    def destroy(self):
        self.destroyed = True
        if self.refuses == "destroy":
            raise ValueError("the store is broken")


def application_of(store):
    return api.handler(message=Order, store=store, name="test")(lambda txn, order: None)


def test_a_changed_spec_changes_the_limits_of_a_running_primary(tmp_path):
    async def scenario():
        local = a_shard(tmp_path)
        changed = []
        local._runner = SimpleNamespace(machine=RecordedLimits(), change_spec=changed.append)
        spec = cpb.ShardSpec(id=local.id, disable_wait_for_ack=True)
        spec.min_txn_duration.FromMilliseconds(250)
        spec.max_txn_duration.FromSeconds(3)
        local.update(replace(an_entry(local.id), value=spec), [], is_primary=False)
        assert local._runner.machine.limits == {
            "min_s": 0.25,
            "max_s": 3.0,
            "waits_for_acks": False,
        }
        assert changed == [spec]

    run(scenario())


class RecordedLimits:
    def change_limits(self, **limits):
        self.limits = limits


@pytest.mark.parametrize("log_prefix", ["", "other/logs"])
def test_hints_of_a_log_that_the_spec_no_longer_names_are_not_stored(tmp_path, log_prefix):
    async def scenario():
        local = a_shard(tmp_path)  # its `etcd` is None: a transaction would raise
        local._log = "recovery/orders/part-000"
        local._local_assignment = object
        local.spec.recovery_log_prefix = log_prefix
        await local._store_hints(rpb.FSMHints(log=local._log))

    run(scenario())


def test_a_store_that_is_made_while_its_shard_ends_is_destroyed(tmp_path):
    async def scenario():
        begun, released, made = asyncio.Event(), threading.Event(), []
        loop = asyncio.get_running_loop()

        def new_store(directory):
            loop.call_soon_threadsafe(begun.set)
            assert released.wait(WAIT_S)
            made.append(Noted(directory))
            return made[0]

        local = a_shard(tmp_path, application=application_of(new_store))
        local.is_primary = True
        local.start()
        async with asyncio.timeout(WAIT_S):
            await begun.wait()
        ending = asyncio.create_task(local.shut_down())
        await asyncio.sleep(0)
        released.set()
        await ending
        assert made[0].destroyed

    run(scenario())


def test_the_output_of_a_store_that_is_not_restored_is_closed(tmp_path, monkeypatch):
    class ClosedOutput(MemoryOutput):
        closed = False

        async def aclose(self):
            self.closed = True

    output = ClosedOutput()
    monkeypatch.setattr(module, "Output", lambda _: output)
    monkeypatch.setattr(Noted, "refuses", "restore")

    async def scenario():
        local = a_shard(tmp_path, application=application_of(Noted))
        local.is_primary = True
        local.start()
        await until(lambda: local.status.code == cpb.ReplicaStatus.FAILED)
        await local.shut_down()
        assert output.closed

    run(scenario())


def test_the_directory_is_removed_also_if_the_store_fails_to_close(tmp_path, monkeypatch):
    monkeypatch.setattr(Noted, "refuses", "destroy")

    async def scenario():
        local = a_shard(tmp_path)
        local._directory.mkdir(exist_ok=True)
        local.store = Noted(local._directory)
        with pytest.raises(ValueError, match="the store is broken"):
            await local.shut_down()
        assert not list(tmp_path.iterdir())

    run(scenario())


async def until(holds):
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110 - what is waited for is another's state
            await asyncio.sleep(0.001)

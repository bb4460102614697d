"""The shard service of two processes on a real Etcd: Stat, List, Apply, GetHints, Unassign."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest

from gazette_sdk.cluster.etcd_messages import prefix_end
from gazette_sdk.cluster.items import assignment_key, member_key
from gazette_sdk.errors import (
    CallError,
    DeadlineExceededError,
    EtcdUnavailableError,
    ShardStatusError,
    UnauthenticatedError,
    UnavailableError,
    ValidationError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol import recoverylog_pb2 as rpb
from gazette_sdk.protocol.authorization import Capability, FixedToken, authority_for
from gazette_sdk.protocol.labels import parse_selector
from gazette_sdk.protocol.rules import SHARD_RPCS_BY_NAME
from gazette_sdk.shard.consumer.client import ShardClient, apply_in_batches
from gazette_sdk.shard.consumer.shard import (
    ERROR_CHARACTERS_MAX,
    StatusReports,
    failed_status,
    local_assignment,
)
from gazette_sdk.shard.recovery.hints import load_hints, store_recorded_hints, store_recovered_hints
from support.etcd import run
from support.raw_http import exchange
from support.shard_services import (
    ROOT,
    assign,
    consumer_spec,
    process_id,
    put_shard,
    served_shards,
    shard_spec,
)
from support.vectors import golden, group

KEYS = base64.b64encode(b"a secret key of consumers, 32 by").decode()
PRIMARY, STANDBY, FAILED = 300, 200, 400


@asynccontextmanager
async def two_processes(etcd, *, auth_keys=""):
    async with AsyncExitStack() as stack:
        processes = [
            await stack.enter_async_context(served_shards(etcd.client, suffix, auth_keys=auth_keys))
            for suffix in ("aaaa", "bbbb")
        ]
        for process in processes:
            await process.settle()
        yield processes


async def a_primary(process, shard="shard-A", **values):
    """A shard whose primary is a process, with a ready store."""
    await put_shard(process.etcd, shard_spec(shard, labels={"team": "red"}))
    await assign(process.etcd, shard, process.suffix, 0, code=PRIMARY)
    await process.settle()
    local = process.resolver.local.get(shard)
    await local.change(is_ready=True, read_through={f"source/{shard}": 7}, **values)
    return local


def names(response):
    return [shard.spec.id for shard in response.shards]


def scenario(test):
    def run_it(etcd):
        run(test(etcd))

    run_it.__name__ = test.__name__
    return run_it


# ---------------------------------------------------------------- Stat


@scenario
async def test_stat_answers_here_and_is_forwarded_to_the_primary(etcd):
    async with two_processes(etcd) as (a, b):
        await a_primary(a, publish_at={"out/put": 99})
        await b.settle()
        for process in (a, b):
            response = await process.client.stat(cpb.StatRequest(shard="shard-A"))
            assert response.status == cpb.OK
            assert response.header.process_id == process_id("aaaa")
            assert list(response.header.route.endpoints) == [a.endpoint]
            assert dict(response.read_through) == {"source/shard-A": 7}
            assert dict(response.publish_at) == {"out/put": 99}


@scenario
async def test_stat_waits_for_offsets_until_the_callers_deadline(etcd):
    async with two_processes(etcd) as (a, b):
        shard = await a_primary(a)
        await b.settle()
        request = cpb.StatRequest(shard="shard-A", read_through={"source/shard-A": 8, "no": 1})
        pending = asyncio.create_task(b.client.stat(request))
        async with ShardClient(b.endpoint, call_timeout_s=0.2) as hasty:
            with pytest.raises(DeadlineExceededError):
                await hasty.stat(request)
        assert not pending.done()
        await shard.change(read_through={"source/shard-A": 9})
        assert (await pending).read_through["source/shard-A"] == 9


@scenario
async def test_stat_shows_a_recovery_at_once_and_event_time(etcd):
    async with two_processes(etcd) as (a, b):
        await put_shard(a.etcd, shard_spec("shard-A"))
        await assign(a.etcd, "shard-A", "aaaa", 0)
        for process in (a, b):
            await process.settle()
        shard = a.resolver.local.get("shard-A")
        await shard.change(recovery=(10, 30))
        request = cpb.StatRequest(shard="shard-A", at_once=True)
        for process in (a, b):  # here, and forwarded
            response = await process.client.stat(request)
            assert (response.status, dict(response.read_through)) == (cpb.OK, {})
            assert (response.recovered_bytes, response.recovery_bytes) == (10, 30)
        await shard.change(recovery=(0, 0), watermark_us=7, is_ready=True)
        assert (await b.client.stat(request)).watermark_us == 7


@scenario
async def test_impossible_requests_find_no_shard_or_are_ignored(etcd):
    async with two_processes(etcd) as (a, _):
        await a_primary(a)
        for shard in ("", "bad id", "no-such-shard"):
            response = await a.client.stat(cpb.StatRequest(shard=shard))
            assert response.status == cpb.SHARD_NOT_FOUND
            assert response.header.route.primary == -1
        request = cpb.StatRequest(
            shard="shard-A", read_through={"source/shard-A": -1, "/bad//name": 1}
        )
        assert (await a.client.stat(request)).status == cpb.OK


@scenario
async def test_a_forwarded_stat_is_not_forwarded_again(etcd):
    async with two_processes(etcd) as (a, b):
        await a_primary(a)
        await b.settle()
        header = pb.Header(process_id=process_id("bbbb"), etcd=b.keyspace.header)
        response = await b.client.stat(cpb.StatRequest(shard="shard-A", header=header))
        assert response.status == cpb.NOT_SHARD_PRIMARY
        assert response.header.process_id == process_id("bbbb")
        assert response.header.route.primary == 0
        header.process_id.suffix = "someone-else"
        with pytest.raises(CallError, match="the request is for consumer process") as caught:
            await b.client.stat(cpb.StatRequest(shard="shard-A", header=header))
        assert caught.value.code == "UNKNOWN"


@scenario
async def test_a_dead_primary_is_unavailable_at_once(etcd):
    async with two_processes(etcd) as (a, _):
        spec = consumer_spec("dead", "http://127.0.0.1:1")
        await a.etcd.put(member_key(ROOT, "zone", "dead"), spec.SerializeToString())
        await put_shard(a.etcd, shard_spec("shard-A"))
        await assign(a.etcd, "shard-A", "dead", 0, code=PRIMARY)
        await a.settle()
        with pytest.raises(UnavailableError):
            await a.client.stat(cpb.StatRequest(shard="shard-A"))
        await a.etcd.delete(member_key(ROOT, "zone", "dead"))
        await a.settle()
        with pytest.raises(UnavailableError, match="gone from Etcd"):
            await a.client.stat(cpb.StatRequest(shard="shard-A"))


# ---------------------------------------------------------------- List, Apply


@scenario
async def test_list_selects_by_labels_and_id_and_shows_statuses(etcd):
    async with two_processes(etcd) as (a, b):
        revision = await put_shard(a.etcd, shard_spec("shard-B", labels={"team": "blue"}))
        await put_shard(a.etcd, shard_spec("shard-A"))
        await assign(a.etcd, "shard-B", "bbbb", 0, code=FAILED, errors=("why",))
        await assign(a.etcd, "shard-B", "aaaa", 1, code=STANDBY)
        await a.settle()
        listed = await a.client.list()
        assert names(listed) == ["shard-A", "shard-B"]
        assert listed.header.process_id == process_id("aaaa")
        assert listed.header.route.primary == -1
        shard = listed.shards[1]
        assert (shard.mod_revision, shard.create_revision) == (revision, revision)
        assert shard.route.primary == 1
        assert [status.code for status in shard.status] == [STANDBY, FAILED]
        assert list(shard.status[1].errors) == ["why"]
        for text, expected in (
            ("id=shard-A", ["shard-A"]),
            ("team=blue", ["shard-B"]),
            ("!team", ["shard-A"]),
            ("id:prefix=shard,team!=red", ["shard-A", "shard-B"]),
        ):
            assert names(await a.client.list(parse_selector(text))) == expected
        bad = pb.LabelSelector(include={"labels": [{"name": "bad label!"}]})
        with pytest.raises(CallError, match=r"Selector\.Include\.Labels") as caught:
            await b.client.list(bad)
        assert caught.value.code == "UNKNOWN"


@scenario
async def test_the_application_and_its_processes_are_listed_if_asked_for(etcd):
    async with two_processes(etcd) as (a, b):
        listed = await a.client.list()
        assert (listed.application, list(listed.processes)) == ("", [])
        listed = await a.client.list(with_processes=True)
        assert listed.application == "app"
        found = {
            (each.process_spec.id.suffix, each.process_spec.endpoint) for each in listed.processes
        }
        assert found == {("aaaa", a.endpoint), ("bbbb", b.endpoint)}


@scenario
async def test_apply_creates_changes_and_deletes_in_one_transaction(etcd):
    async with two_processes(etcd) as (a, _):
        hints = rpb.FSMHints(log="recovery/logs/shard-A")
        hints.live_nodes.add(fnode=1).segments.add(author=5, first_seq_no=1, last_seq_no=2)
        created = await a.client.apply(
            cpb.ApplyRequest(
                changes=[
                    {"upsert": shard_spec("shard-A"), "primary_hints": hints},
                    {"upsert": shard_spec("shard-B")},
                ]
            )
        )
        revision = created.header.etcd.revision
        listed = await a.client.list()  # what was written can be read at once
        assert [shard.mod_revision for shard in listed.shards] == [revision, revision]
        stored = await a.etcd.range(b"/hints/shard-A.primary")
        assert json.loads(stored.entries[0].value)["log"] == "recovery/logs/shard-A"
        for change in (
            {"upsert": shard_spec("shard-A")},
            {"upsert": shard_spec("shard-A"), "expect_mod_revision": revision - 1},
            {"delete": "shard-C", "expect_mod_revision": 5},
        ):
            request = cpb.ApplyRequest(changes=[change, {"upsert": shard_spec("shard-D")}])
            with pytest.raises(ShardStatusError, match="ETCD_TRANSACTION_FAILED"):
                await a.client.apply(request)
        assert names(await a.client.list()) == ["shard-A", "shard-B"]
        await a.client.apply(
            cpb.ApplyRequest(
                changes=[
                    {"upsert": shard_spec("shard-A", hot_standbys=1), "expect_mod_revision": -1},
                    {"delete": "shard-B", "expect_mod_revision": revision},
                ]
            )
        )
        (left,) = (await a.client.list()).shards
        assert left.spec.hot_standbys == 1
        nothing = await a.client.apply(cpb.ApplyRequest())
        assert nothing.header.etcd.revision == left.mod_revision


@scenario
async def test_invalid_changes_are_refused_by_both_sides(etcd):
    async with two_processes(etcd) as (a, _):
        hints = hints_of(5)
        hints.live_nodes[0].fnode = 4
        change = {"upsert": shard_spec("shard-A"), "primary_hints": hints}
        with pytest.raises(CallError, match="expected Fnode to match Segment"):
            await a.client.apply(cpb.ApplyRequest(changes=[change]))
        assert not (await a.client.list()).shards
        request = cpb.ApplyRequest(changes=[{"upsert": shard_spec("zz")}])
        with pytest.raises(ValidationError, match=r"Changes\[0\].Upsert.Id: invalid length"):
            await a.client.apply(request)
        with pytest.raises(CallError, match=r"Changes\[0\].Upsert.Id: invalid length") as caught:
            await a.client._call("Apply", request)
        assert caught.value.code == "UNKNOWN"


def test_changes_are_applied_in_batches():
    (vector,) = (
        group_["cases"]
        for group_ in group("message", "api")
        if group_["source"].endswith("TestAPIApplyShardsInBatches")
    )

    class Counting:
        async def apply(self, request):
            sizes.append(len(request.changes))
            return cpb.ApplyResponse()

    async def apply_all(case):
        changes = [{"delete": f"shard-{n}"} for n in range(case["changes"])]
        request = cpb.ApplyRequest(changes=changes)
        return [each async for each in apply_in_batches(Counting(), request, case["size"])]

    for case in vector:
        sizes = []
        assert len(run(apply_all(case))) == len(sizes) == case["rpcs"]
        assert sum(sizes) == case["changes"]


# ---------------------------------------------------------------- hints


def hints_of(seq_no, log="recovery/logs/shard-A"):
    hints = rpb.FSMHints(log=log)
    segment = {"author": 1, "first_seq_no": seq_no, "last_seq_no": seq_no}
    hints.live_nodes.add(fnode=seq_no).segments.add(**segment)
    return hints


def seq_no_of(hints):
    return 0 if hints is None else hints.live_nodes[0].fnode


@scenario
async def test_hints_rotate_as_in_the_vectors(etcd):
    vector = group("message", "hints_rotation")
    async with two_processes(etcd) as (a, _):
        spec = shard_spec("shard-A", hint_backups=vector["hint_backups"])
        await put_shard(a.etcd, spec)
        await assign(a.etcd, "shard-A", "aaaa", 0)
        await assign(a.etcd, "shard-A", "aaaa", 0)  # updates compare its create revision
        await a.settle()

        def assignment():
            return local_assignment(a.keyspace, "shard-A", process_id("aaaa"))

        item = a.keyspace.item("shard-A")
        for step in vector["steps"]:
            if step.get("store") == "recorded":
                assert await store_recorded_hints(a.etcd, item, hints_of(step["id"]), assignment())
            elif step.get("store") == "recovered":
                await store_recovered_hints(a.etcd, item, hints_of(step["id"]), assignment)
            else:
                await a.etcd.delete(f"/hints/shard-A.{step['delete']}".encode())
            stored = await load_hints(a.etcd, spec)
            found = [seq_no_of(hints) for hints in (stored.primary, *stored.backups)]
            assert found == step["expect"]
            response = await a.client.get_hints("shard-A")
            assert response.primary_hints.HasField("hints") == (stored.primary is not None)
            assert [b.HasField("hints") for b in response.backup_hints] == [
                hints is not None for hints in stored.backups
            ]
        stale = assignment()
        await a.etcd.delete(stale.key)
        await a.settle()
        assert not await store_recorded_hints(a.etcd, item, hints_of(9), stale)
        await store_recovered_hints(a.etcd, item, hints_of(9), assignment)  # nobody's any more
        assert (await load_hints(a.etcd, spec)).backups == [None, None]


@scenario
async def test_a_deleted_shard_leaves_no_hints(etcd):
    async with two_processes(etcd) as (a, _):
        spec = shard_spec("shard-A", hint_backups=2)
        await put_shard(a.etcd, spec)
        await put_shard(a.etcd, shard_spec("shard-A.backup.1", hint_backups=2))
        await assign(a.etcd, "shard-A", "aaaa", 0)
        await a.settle()
        assignment = local_assignment(a.keyspace, "shard-A", process_id("aaaa"))
        item = a.keyspace.item("shard-A")
        for number in (1, 2):
            await store_recovered_hints(a.etcd, item, hints_of(number), lambda: assignment)
        assert await store_recorded_hints(a.etcd, item, hints_of(3), assignment)
        other = b"/hints/shard-A.backup.1.primary"
        await a.etcd.put(other, b"{}")
        change = {
            "delete": "shard-A",
            "expect_mod_revision": item.mod_revision,
            "delete_hints": True,
        }
        response = await a.client.apply(cpb.ApplyRequest(changes=[change]))
        assert response.status == cpb.OK
        # Its primary still runs: what it stores now would outlive the shard.
        assert not await store_recorded_hints(a.etcd, item, hints_of(4), assignment)
        found = await a.etcd.range(b"/hints/", prefix_end(b"/hints/"))
        assert [entry.key for entry in found.entries] == [other]


@scenario
async def test_a_rotation_whose_answer_was_lost_is_not_done_twice(etcd):
    async with two_processes(etcd) as (a, _):
        spec = shard_spec("shard-A", hint_backups=2)
        await put_shard(a.etcd, spec)
        await assign(a.etcd, "shard-A", "aaaa", 0)
        await a.settle()

        class LosesAnswers:
            lost = 0

            async def txn(self, compares, then, otherwise=()):
                result = await a.etcd.txn(compares, then, otherwise)
                if compares and not self.lost:
                    self.lost += 1
                    raise EtcdUnavailableError("no answer")
                return result

        def assignment():
            return local_assignment(a.keyspace, "shard-A", process_id("aaaa"))

        item = a.keyspace.item("shard-A")
        await store_recovered_hints(a.etcd, item, hints_of(1), assignment)
        losing = LosesAnswers()
        await store_recovered_hints(losing, item, hints_of(2), assignment)
        assert losing.lost == 1
        stored = await load_hints(a.etcd, spec)
        assert [seq_no_of(hints) for hints in stored.backups] == [2, 1]


@scenario
async def test_broken_hints_fail_the_call(etcd):
    async with two_processes(etcd) as (a, _):
        await put_shard(a.etcd, shard_spec("shard-A"))
        await put_shard(
            a.etcd,
            cpb.ShardSpec(id="no-log", max_txn_duration={"seconds": 1}, hint_backups=1),
        )
        await a.settle()
        for value, words in (
            (b"{broken", "hints cannot be decoded"),
            (b"\x0a\xff", "hints cannot be decoded"),
            (b"{}", "hints.log"),
            (b'{"log":"recovery/logs/other"}', "hints are of recovery/logs/other"),
            (
                json.dumps(
                    {
                        "log": "recovery/logs/shard-A",
                        "live_nodes": [
                            {
                                "fnode": 5,
                                "segments": [{"author": 1, "first_seq_no": 6, "last_seq_no": 7}],
                            }
                        ],
                    }
                ).encode(),
                "expected Fnode to match Segment",
            ),
        ):
            await a.etcd.put(b"/hints/shard-A.primary", value)
            with pytest.raises(CallError, match=words) as caught:
                await a.client.get_hints("shard-A")
            assert "/hints/shard-A.primary" in str(caught.value)
            assert caught.value.code == "UNKNOWN"
        as_protobuf = hints_of(30).SerializeToString()
        await a.etcd.put(b"/hints/shard-A.primary", as_protobuf)
        response = await a.client.get_hints("shard-A")
        assert response.primary_hints.hints == hints_of(30)
        assert len(response.backup_hints) == 2
        with pytest.raises(ShardStatusError, match="unknown: SHARD_NOT_FOUND"):
            await a.client.get_hints("unknown")
        empty = await a.client.get_hints("no-log")
        assert [b.HasField("hints") for b in empty.backup_hints] == [False]


# ---------------------------------------------------------------- status


@scenario
async def test_reported_codes_never_go_down(etcd):
    async with two_processes(etcd) as (a, _):
        await put_shard(a.etcd, shard_spec("shard-A"))
        lease = await a.etcd.grant(60)
        key = assignment_key(ROOT, "shard-A", "zone", "aaaa", 0)
        await a.etcd.put(key, b"", lease=lease)
        await a.settle()
        reports = StatusReports(a.etcd, a.keyspace, "shard-A", process_id("aaaa"))
        seen = []
        for status in (
            cpb.ReplicaStatus(code=100),
            cpb.ReplicaStatus(code=PRIMARY),
            cpb.ReplicaStatus(code=STANDBY),
            failed_status(["x" * 5000]),
            failed_status(["x" * 5000]),
            failed_status(["another"]),
        ):
            await reports.report(status)
            (held,) = a.keyspace.assignments("shard-A")
            seen.append((held.value.code, [len(text) for text in held.value.errors]))
            assert held.lease == lease
        cut = ERROR_CHARACTERS_MAX + len(" ...[truncated]")
        assert seen == [
            (100, []),
            (PRIMARY, []),
            (PRIMARY, []),
            (FAILED, [cut]),
            (FAILED, [cut]),
            (FAILED, [cut, 7]),
        ]
        await a.etcd.delete(key)
        await a.settle()
        await reports.report(cpb.ReplicaStatus(code=PRIMARY))  # not assigned to us any more
        assert not (await a.etcd.range(key)).entries


@scenario
async def test_a_report_that_loses_a_race_is_tried_again(etcd):
    async with two_processes(etcd) as (a, _):
        await put_shard(a.etcd, shard_spec("shard-A"))
        await assign(a.etcd, "shard-A", "aaaa", 0, code=100)
        await a.settle()
        reports = StatusReports(a.etcd, a.keyspace, "shard-A", process_id("aaaa"))
        report = asyncio.create_task(reports.report(cpb.ReplicaStatus(code=STANDBY)))
        await assign(a.etcd, "shard-A", "aaaa", 0, code=FAILED, errors=("first",))
        await report
        await a.settle()
        (held,) = a.keyspace.assignments("shard-A")
        assert held.value == cpb.ReplicaStatus(code=held.value.code, errors=held.value.errors)
        assert held.value.code in {STANDBY, FAILED}


# ---------------------------------------------------------------- Unassign


@scenario
async def test_unassign_removes_primaries_and_failed_assignments(etcd):
    async with two_processes(etcd) as (a, _):
        for shard, code in (("shard-A", PRIMARY), ("shard-B", FAILED), ("shard-C", STANDBY)):
            await put_shard(a.etcd, shard_spec(shard))
            errors = ("why",) if code == FAILED else ()
            await assign(a.etcd, shard, "aaaa", 1, code=code, errors=errors)
        await assign(a.etcd, "shard-A", "bbbb", 0, code=PRIMARY)
        await a.settle()

        async def unassign(*shards, **options):
            response = await a.client.unassign(cpb.UnassignRequest(shards=shards, **options))
            prefix = f"{ROOT}/assign/".encode()
            held = (await a.etcd.range(prefix, prefix_end(prefix))).entries
            return list(response.shards), [kv.key.rpartition(b"/")[2].decode() for kv in held]

        every = ("shard-B", "unknown", "shard-A", "shard-A", "shard-C")
        before = [
            "shard-A#zone#aaaa#1",
            "shard-A#zone#bbbb#0",
            "shard-B#zone#aaaa#1",
            "shard-C#zone#aaaa#1",
        ]
        assert await unassign(*every, dry_run=True) == (["shard-B", "shard-A"], before)
        found = await unassign(*every, only_failed=True, dry_run=True)
        assert found == (["shard-B"], before)
        shards, left = await unassign(*every, only_failed=True)
        assert (shards, "shard-B#zone#aaaa#1" in left, len(left)) == (["shard-B"], False, 3)
        assert await unassign(*every) == (
            ["shard-A"],
            ["shard-A#zone#aaaa#1", "shard-C#zone#aaaa#1"],
        )
        assert a.resolver.local.get("shard-B") is None


# ---------------------------------------------------------------- tokens


async def change_shards_by_tokens(etcd):
    async with two_processes(etcd, auth_keys=KEYS) as (a, _):
        await a_primary(a)

        def client(capability, subject):
            token = authority_for(KEYS).sign(
                capability, pb.LabelSelector(), 60, time.time(), subject=subject
            )
            return ShardClient(a.endpoint, authorizer=FixedToken(token))

        request = cpb.UnassignRequest(shards=["shard-A"], only_failed=True)
        async with client(Capability.APPLY, "ada") as ada, client(Capability.LIST, "eve") as eve:
            await ada.unassign(request)
            with pytest.raises(UnauthenticatedError):
                await eve.unassign(request)
            changes = [
                cpb.ApplyRequest.Change(upsert=shard_spec(f"shard-{name}")) for name in "NOPQ"
            ]
            await ada.apply(cpb.ApplyRequest(changes=changes))
            with pytest.raises(ShardStatusError):  # they exist by now
                await ada.apply(cpb.ApplyRequest(changes=changes[:1]))


def test_changes_and_refused_ones_are_in_the_audit_log_with_their_subject(etcd, caplog):
    caplog.set_level(logging.INFO, "gazette.audit")
    run(change_shards_by_tokens(etcd))
    found = [
        (each.getMessage(), each.subject, each.shard, each.outcome)
        for each in caplog.records
        if each.name == "gazette.audit"
    ]
    [unassigned, refused, applied, failed] = found
    assert unassigned == ("Unassign answered", "ada", "shard-A", "OK")
    assert refused[:3] == ("Unassign refused", "eve", "shard-A")
    assert "APPLY" in refused[3]
    assert applied == ("Apply answered", "ada", "shard-N, shard-O, shard-P and 1 more", "OK")
    assert failed == ("Apply answered", "ada", "shard-N", "ETCD_TRANSACTION_FAILED")


@scenario
async def test_tokens_limit_what_a_caller_sees_and_changes(etcd):
    async with two_processes(etcd, auth_keys=KEYS) as (a, b):
        await a_primary(a)
        await put_shard(a.etcd, shard_spec("shard-B", labels={"team": "blue"}))
        for process in (a, b):
            await process.settle()
        # The forwarded call has a token of its own, and the caller's selector still counts.
        assert (await b.client.stat(cpb.StatRequest(shard="shard-A"))).status == cpb.OK
        authority = authority_for(KEYS)

        def client(capability, selector):
            token = authority.sign(capability, parse_selector(selector), 60, time.time())
            return ShardClient(b.endpoint, authorizer=FixedToken(token.removeprefix("Bearer ")))

        async with ShardClient(b.endpoint) as anyone, client(0xFFFFFFFF, "team=red") as red:
            with pytest.raises(UnauthenticatedError):
                await anyone.list()
            assert names(await red.list()) == ["shard-A"]
            assert (await red.stat(cpb.StatRequest(shard="shard-A"))).status == cpb.OK
            hidden = await red.stat(cpb.StatRequest(shard="shard-B"))
            assert hidden.status == cpb.SHARD_NOT_FOUND
            with pytest.raises(ShardStatusError, match="SHARD_NOT_FOUND"):
                await red.get_hints("shard-B")
            assert not (await red.list(with_processes=True)).processes
            for change in (
                {"upsert": shard_spec("shard-N", labels={"team": "blue"})},
                # Its own label on a shard of others.
                {
                    "upsert": shard_spec("shard-B", labels={"team": "red"}),
                    "expect_mod_revision": -1,
                },
                {"delete": "shard-A", "expect_mod_revision": -1},
            ):
                with pytest.raises(UnauthenticatedError, match="not authorized to shard-"):
                    await red.apply(cpb.ApplyRequest(changes=[change]))
            await red.apply(
                cpb.ApplyRequest(
                    changes=[{"upsert": shard_spec("shard-N", labels={"team": "red"})}]
                )
            )
            with pytest.raises(UnauthenticatedError, match="not authorized to shard-A"):
                await red.unassign(cpb.UnassignRequest(shards=["shard-A"]))
        async with client(Capability.LIST, "") as lists:
            assert names(await lists.list()) == ["shard-A", "shard-B", "shard-N"]
            assert len((await lists.list(with_processes=True)).processes) == 2
            for call in (
                lists.stat(cpb.StatRequest(shard="shard-A")),
                lists.get_hints("shard-A"),
                lists.unassign(cpb.UnassignRequest()),
                lists.apply(cpb.ApplyRequest()),
            ):
                with pytest.raises(UnauthenticatedError, match=r"READ|APPLY"):
                    await call


def hints_with_another_log(log, other):
    part = rpb.Segment(author=1, first_seq_no=1, last_seq_no=1, last_offset=9, log=other)
    last = rpb.Segment(author=1, first_seq_no=2, first_offset=1, last_seq_no=2)
    node = rpb.FnodeSegments(fnode=1, segments=[part, last])
    return rpb.FSMHints(log=log, live_nodes=[node])


RED = {"labels": {"team": "red"}}
TAKEN_LOG = {"recovery_log_prefix": "recovery", "hint_prefix": "/evil"}
TAKEOVERS = {
    "the log of another shard, as its id has the rest": shard_spec(
        "logs/blue-one", **TAKEN_LOG, **RED
    ),
    "the log of another shard, for a shard of its own": shard_spec(
        "logs/red", **TAKEN_LOG, sources=[{"journal": "source/logs/red"}], **RED
    ),
    "the hints of another shard": shard_spec("hints/blue-one", hint_prefix="/gazette", **RED),
    "hints among the keys of brokers": shard_spec(
        "red-one", hint_prefix="/gazette/cluster/items", **RED
    ),
    "a log among other journals": shard_spec("red-one", recovery_log_prefix="payroll", **RED),
    "no log, and so no fence": shard_spec(
        "red-one", recovery_log_prefix="", hint_prefix="", hint_backups=0, **RED
    ),
    "the source of another shard": shard_spec(
        "red-one", sources=[{"journal": "source/blue-one"}, {"journal": "source/red-one"}], **RED
    ),
    "a journal that is no source of the application": shard_spec(
        "red-one", sources=[{"journal": "payroll/part-000"}], **RED
    ),
    "a journal with metadata that is no source": shard_spec(
        "red-one", sources=[{"journal": "payroll/part-000;a"}], **RED
    ),
    "a new shard over the source of another one": shard_spec(
        "red-two", sources=[{"journal": "source/blue-one"}], **RED
    ),
    "a new shard without sources": shard_spec("red-two", sources=[], **RED),
    "more hints than a process can hold": shard_spec("red-one", hint_backups=2**31 - 1, **RED),
}


@scenario
async def test_a_token_with_a_selector_takes_over_nothing_by_a_shard_of_its_own(etcd):
    async with two_processes(etcd, auth_keys=KEYS) as (a, b):
        red = shard_spec("red-one", **RED)
        blue = shard_spec("blue-one", hint_prefix="/gazette/hints", labels={"team": "blue"})
        await a.etcd.put(b"/gazette/hints/blue-one.primary", b'{"log":"recovery/logs/blue-one"}')
        for spec in (red, blue, shard_spec("red-by-hand", recovery_log_prefix="by/hand", **RED)):
            await put_shard(a.etcd, spec)
        for process in (a, b):
            await process.settle()
        held = (await a.etcd.range(b"/", b"0")).entries
        authority = authority_for(KEYS)

        def client(selector):
            token = authority.sign(0xFFFFFFFF, parse_selector(selector), 60, time.time())
            return ShardClient(b.endpoint, authorizer=FixedToken(token))

        async with client("team=red") as attacker, client("team!=blue") as other:
            for name, spec in TAKEOVERS.items():
                change = {"upsert": spec, "expect_mod_revision": -1}
                request = cpb.ApplyRequest(changes=[change])
                error = await asyncio.gather(attacker.apply(request), return_exceptions=True)
                assert "a token with a selector does not allow" in str(error[0]), name
            changed = shard_spec("red-one", **RED)
            hints = hints_with_another_log("recovery/logs/red-one", "recovery/logs/blue-one")
            for upsert, extra in (
                (changed, {"primary_hints": hints}),
                # Admitted with one that is refused: neither is applied.
                (TAKEOVERS["a log among other journals"], {}),
            ):
                changes = [
                    {"upsert": shard_spec("red-new", **RED)},
                    {"upsert": upsert, "expect_mod_revision": -1, **extra},
                ]
                with pytest.raises(UnauthenticatedError, match="a token with a selector"):
                    await attacker.apply(cpb.ApplyRequest(changes=changes))
            # A selector that matches an id without labels.
            delete = {"delete": "blue-one", "expect_mod_revision": -1}
            with pytest.raises(UnauthenticatedError, match="not authorized to blue-one"):
                await other.apply(cpb.ApplyRequest(changes=[delete]))
            with pytest.raises(UnauthenticatedError, match="not authorized to blue-one"):
                await other.unassign(cpb.UnassignRequest(shards=["blue-one"]))
            assert (await a.etcd.range(b"/", b"0")).entries == held

            # Its own shards, as they are or as the application has them.
            for spec in (
                shard_spec("red-one", hot_standbys=1, **RED),
                shard_spec("red-new", **RED),
                shard_spec("red-by-hand", recovery_log_prefix="by/hand", disable=True, **RED),
                shard_spec("red-by-hand", **RED),
            ):
                change = {"upsert": spec, "expect_mod_revision": -1}
                await attacker.apply(cpb.ApplyRequest(changes=[change]))
            own = rpb.FSMHints(log="recovery/logs/red-one")
            change = {"upsert": red, "expect_mod_revision": -1, "primary_hints": own}
            await attacker.apply(cpb.ApplyRequest(changes=[change]))
            delete = {"delete": "red-new", "expect_mod_revision": -1}
            await other.apply(cpb.ApplyRequest(changes=[delete]))
            await other.unassign(cpb.UnassignRequest(shards=["red-one"]))
        # Keys of the cluster and tokens without a selector are not limited.
        await a.client.apply(
            cpb.ApplyRequest(
                changes=[
                    {"upsert": TAKEOVERS["a log among other journals"], "expect_mod_revision": -1}
                ]
            )
        )


# ---------------------------------------------------------------- JSON


@scenario
async def test_the_gateway_answers_like_the_recorded_one(etcd):
    async with two_processes(etcd) as (a, _), aiohttp.ClientSession(a.endpoint) as session:
        spec = shard_spec("j-030", labels={"a-label": "one"})
        await put_shard(a.etcd, spec)
        await assign(a.etcd, "j-030", "aaaa", 0, code=PRIMARY)
        await a.settle()
        await a.resolver.local.get("j-030").change(
            is_ready=True, read_through={"gold/in/j-030": 192}, publish_at={"gold/out": 1 << 60}
        )
        for step in golden("consumer/rpc/gateway.json"):
            request = step["request"]
            if not request["path"].startswith("/v1/") or step["name"].startswith("proxied"):
                continue
            if step["name"] == "list, trailing data":  # we refuse what is no JSON document
                continue
            if step["name"].endswith("not mapped"):  # calls that only we have as JSON
                continue
            async with session.request(
                request["method"],
                request["path"],
                data=request["body"],
                headers=request["headers"],
            ) as response:
                assert response.status == step["status"], step["name"]
                text = await response.text()
                for name in ("Content-Type", "Grpc-Metadata-Content-Type"):
                    expected = step["headers"].get(name)
                    if expected is not None:
                        assert response.headers[name] == expected
            if not step["body"]:
                assert not text
                continue
            assert shape(json.loads(text)) == shape(json.loads(step["body"])), step["name"]


def shape(value):
    """Keys and types of JSON; lists by their first item, texts of errors and ids left out."""
    if isinstance(value, dict):
        if {"code", "message", "details"} == set(value):
            return value["code"]
        if all(name.startswith("gold/") for name in value):
            return "offsets"
        return {name: shape(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def test_every_call_has_its_own_path():
    assert SHARD_RPCS_BY_NAME["GetHints"].path == "/consumer.Shard/GetHints"


def test_changes_that_the_gateway_refuses_are_in_the_audit_log(etcd, caplog):
    caplog.set_level(logging.INFO, "gazette.audit")

    async def change():
        async with two_processes(etcd, auth_keys=KEYS) as (a, _):
            for path in ("/v1/shards/unassign", "/v1/shards/apply", "/v1/shards/list"):
                answer = await exchange(a.endpoint, "POST", path, body=b"{}")
                assert answer.status == 401

    run(change())
    found = [each.getMessage() for each in caplog.records if each.name == "gazette.audit"]
    assert found == ["Unassign refused", "Apply refused"], "as by gRPC, changes alone are recorded"

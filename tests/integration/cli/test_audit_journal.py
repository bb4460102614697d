"""Audit journal of brokers: records of calls as CloudEvents, which no call waits for."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import signal
import time
from contextlib import aclosing

import pytest

from gazette_sdk import Reader, connect
from gazette_sdk.broker.metrics import AUDIT_FAILING_SECONDS
from gazette_sdk.cli import audit
from gazette_sdk.cli.audit import AuditJournal
from gazette_sdk.errors import UnauthenticatedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.protocol.rules import EVENTS_RPC
from gazette_sdk.transport.append.append import append
from gazette_sdk.transport.listing import apply_journals, list_journals
from integration.broker.test_broker_health import checks
from integration.cli.test_processes import TIMEOUT_S, serve
from integration.cli.test_serve_peers import create
from support.brokers import journal_spec
from support.etcd import run
from support.served import STORE
from support.views import KEY, call, token, until, viewed_cluster

JOURNAL = "ops/audit"


def audit_spec(content_type="application/x-ndjson", **changes):
    labels = {"content-type": content_type}
    return journal_spec(JOURNAL, stores=[STORE], refresh_interval_s=1, labels=labels, **changes)


def audited_cluster(etcd, directory, *zones):
    """Return a cluster with a broker in each zone, all of which write all records."""
    return viewed_cluster(
        etcd,
        directory,
        zones,
        audit_output=lambda zone: AuditJournal(JOURNAL, f"/test/{zone}"),
        auth_keys=KEY,
        audited="all",
    )


def signed(capability, subject):
    lasts_s = 86_400.0  # longer than a run of all tests
    return Authority(KEY).sign(
        capability, pb.LabelSelector(), lasts_s, time.time(), subject=subject
    )


ADA = signed(Capability.ALL, "ada")


async def refused(endpoint, subject):
    """Ask for a listing with a token that does not allow it."""
    async with aclosing(
        connect(endpoint, auth_token=signed(Capability.READ, subject))
    ) as transport:
        with pytest.raises(UnauthenticatedError):
            await list_journals(transport)


async def recorded(endpoint, count):
    """Return so many events of the audit journal, once they are there."""
    found = []
    async with aclosing(connect(endpoint, auth_keys=KEY)) as transport:
        reader = Reader(dict, name=JOURNAL, transport=transport, block=True)
        async with asyncio.timeout(TIMEOUT_S), reader:
            async for envelope in reader:
                found.append(envelope.message)
                if len(found) == count:
                    return found
    raise AssertionError(found)


def summary(event):
    """Return the content of an event, without its time and id."""
    data = event["data"]
    return (
        event["source"],
        event["type"].removeprefix("dev.gazette.audit."),
        data["method"],
        data.get("journal", ""),
        data.get("subject", ""),
        data.get("repeated", 0),
    )


def test_calls_of_two_brokers_are_events_once_and_appends_to_the_journal_are_none(etcd, tmp_path):
    async def scenario():
        async with audited_cluster(etcd, tmp_path, *"ab") as cluster:
            await cluster.client.apply(audit_spec())
            for zone, endpoint in zip("ab", cluster.endpoints, strict=True):
                async with aclosing(connect(endpoint, auth_token=ADA)) as transport:
                    await create(transport, f"shop/{zone}")
                for _ in range(3):
                    await refused(endpoint, "reader")
                await cluster.client.append_when_ready(f"shop/{zone}", b"past the audit log")
                # Through both brokers: one of them proxies it, and both have a record.
                async with aclosing(connect(endpoint, auth_token=ADA)) as transport:
                    await append(transport, pb.AppendRequest(journal=f"shop/{zone}"), [b"content"])
            found = await recorded(cluster.endpoints[0], 6)
            await refused(cluster.endpoints[0], "last")
            await refused(cluster.endpoints[1], "last")
            for _ in range(2):  # equal ones of a minute, whose number is written at the end
                await refused(cluster.endpoints[0], "last")
            found = await recorded(cluster.endpoints[0], len(found) + 2)
            request = clpb.EventsRequest(no_wait=True)
            events = await call(cluster.endpoints[1], EVENTS_RPC, request, token())
            audited = [each for each in events if each.kind == "audit"]
            assert {each.member for each in audited} == {"a/in-a", "b/in-b"}
            assert sum(each.text.startswith("Apply by ada at ") for each in audited) == 2
            by_append = [each for each in found if each["data"]["method"] == "Append"]
            assert all(each["data"]["journal"].startswith("shop/") for each in by_append)
        store = connect((tmp_path / "fragments").as_uri(), content_type="application/x-ndjson")
        async with aclosing(store):
            reader = Reader(dict, name=JOURNAL, transport=store)
            return [envelope.message async for envelope in reader]

    found = run(scenario(), timeout_s=90)
    assert len({(each["source"], each["id"]) for each in found}) == len(found)
    said = [summary(each) for each in found]
    for zone in "ab":
        source = f"/test/{zone}"
        assert said.count((source, "answered", "Apply", f"shop/{zone}", "ada", 0)) == 1
        assert said.count((source, "refused", "List", "", "reader", 0)) == 1
        assert said.count((source, "refused", "List", "", "reader", 2)) == 1, said
        assert said.count((source, "refused", "List", "", "last", 0)) == 1
    assert said.count(("/test/a", "refused", "List", "", "last", 2)) == 1
    assert sum(each[2] == "Append" and each[3].startswith("shop/") for each in said) >= 2
    assert not any(each[2] == "Append" and each[3] == JOURNAL for each in said)
    [event] = [each for each in found if summary(each)[:3] == ("/test/a", "answered", "Apply")]
    assert event["specversion"] == "1.0"
    assert event["subject"] == "shop/a"
    assert event["datacontenttype"] == "application/json"
    assert event["time"].endswith("Z")
    assert event["data"]["outcome"] == "OK"
    assert event["data"]["peer"] in {"127.0.0.1", "::1"}


def test_a_missing_journal_disturbs_no_call_and_gets_its_records_once_it_exists(
    etcd, tmp_path, caplog
):
    async def scenario():
        async with audited_cluster(etcd, tmp_path, "a") as cluster:
            [endpoint] = cluster.endpoints
            async with aclosing(connect(endpoint, auth_token=ADA)) as transport:
                for name in ("shop/1", "shop/2", "shop/3"):
                    await create(transport, name)
            authorization = token()
            status, missing = await checks(endpoint, authorization)
            assert status == 503
            assert AUDIT_FAILING_SECONDS.collect()[0].samples[0].value > 0
            await cluster.client.apply(audit_spec("text/csv"))
            _, csv = await checks(endpoint, authorization)
            response = await cluster.client.delete(JOURNAL)
            assert response.status == pb.OK
            await cluster.client.apply(audit_spec())
            found = await recorded(endpoint, 3)

            async def health():
                return await checks(endpoint, authorization)

            await until(health, lambda answer: answer[1]["audit-journal"]["ok"])
            assert AUDIT_FAILING_SECONDS.collect()[0].samples[0].value == 0
            return missing, csv, found

    with caplog.at_level(logging.WARNING):
        missing, csv, found = run(scenario(), timeout_s=60)
    assert not missing["audit-journal"]["ok"]
    assert "gazctl journals apply" in missing["audit-journal"]["detail"]
    assert "3 records wait" in missing["audit-journal"]["detail"]
    assert "text/csv" in csv["audit-journal"]["detail"]
    assert [summary(each)[3] for each in found] == ["shop/1", "shop/2", "shop/3"]
    said = [each.getMessage() for each in caplog.records if each.name == "gazette_sdk.cli.audit"]
    assert len(said) == 2, "one line when it begins, and one when it has ended"
    assert f"the journal {JOURNAL} does not exist; create it" in said[0]
    assert "works again" in said[1]


def test_a_journal_that_takes_no_appends_holds_up_neither_calls_nor_the_end(
    etcd, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(audit, "LATE_S", 0.2)

    async def scenario():
        async with audited_cluster(etcd, tmp_path, "a") as cluster:
            [endpoint] = cluster.endpoints
            await cluster.client.apply(audit_spec(replication=2))

            async def health():
                await refused(endpoint, "reader")
                return (await checks(endpoint, token()))[1]["audit-journal"]

            late = await until(health, lambda check: "no acknowledgement within" in check["detail"])
            begun_s = time.monotonic()
            await cluster.client.apply(audit_spec(), expect=-1)
            found = await recorded(endpoint, 1)
            await cluster.client.apply(audit_spec(replication=2), expect=-1)
            await refused(endpoint, "last")
        return late, found, time.monotonic() - begun_s

    with caplog.at_level(logging.WARNING):
        late, found, took_s = run(scenario(), timeout_s=60)
    assert not late["ok"]
    assert summary(found[0]) == ("/test/a", "refused", "List", "", "reader", 0)
    assert took_s < 30


def test_a_broker_takes_the_option_and_writes_what_its_log_has(etcd, tmp_path):
    key = base64.b64decode(KEY).ljust(32, b".")
    keys = base64.b64encode(key).decode()
    ada = Authority(keys).sign(
        Capability.ALL, pb.LabelSelector(), 600.0, time.time(), subject="ada"
    )

    async def scenario(endpoint):
        async with aclosing(connect(endpoint, auth_token=ada)) as transport:
            change = pb.ApplyRequest.Change(upsert=audit_spec())
            await apply_journals(transport, pb.ApplyRequest(changes=[change]))
            reader = Reader(dict, name=JOURNAL, transport=transport, block=True)
            async with asyncio.timeout(TIMEOUT_S), reader:
                return (await anext(aiter(reader))).message

    (tmp_path / "fragments").mkdir()
    arguments = [
        *("--etcd.address", etcd.address, "--broker.spool-dir=s", "--broker.file-root=fragments"),
        *("--broker.auth-keys", keys, "--broker.audit=all", f"--broker.audit-journal={JOURNAL}"),
        *("--broker.zone=z", "--broker.id=broker-1", "--log.format=json"),
    ]
    with serve(tmp_path, *arguments) as process:
        while b'"serving"' not in (line := process.stderr.readline()):
            assert line
        event = asyncio.run(scenario(json.loads(line)["endpoint"]))
        process.send_signal(signal.SIGKILL)
    assert event["source"] == "/gazette/cluster/z/broker-1"
    assert summary(event)[1:5] == ("answered", "Apply", JOURNAL, "ada")

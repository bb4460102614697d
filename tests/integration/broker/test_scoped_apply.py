"""Changes of journals by callers whose token has a selector."""

from __future__ import annotations

import time

import pytest

from gazette_sdk.errors import UnauthenticatedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.protocol.labels import parse_selector
from gazette_sdk.server.authorization import Call
from support.brokers import a_broker, journal_spec
from support.etcd import run

KEYS = "c2VjcmV0IGtleSBvZiB0aGUgdGVzdHM="
AUTHORITY = Authority(KEYS)
STAGING, PROD = {"env": "staging"}, {"env": "prod"}
OPERATOR = ""
TEAM = "env=staging"


async def apply(broker, selector, *changes):
    scope = parse_selector(selector) if selector else pb.LabelSelector()
    header = AUTHORITY.header(Capability.APPLY, scope, 60, time.time())
    request = pb.ApplyRequest(changes=changes)
    return await broker.service.apply(request, Call(authorization=header))


def upsert(name, expect=-1, **spec):
    return pb.ApplyRequest.Change(upsert=journal_spec(name, **spec), expect_mod_revision=expect)


def delete(name):
    return pb.ApplyRequest.Change(delete=name, expect_mod_revision=-1)


def with_broker(etcd, directory, scenario, **config):
    async def whole():
        async with a_broker(etcd, directory, auth_keys=KEYS, **config) as (broker, _):
            await scenario(broker)

    run(whole())


def with_postfix(change, template):
    change.upsert.fragment.path_postfix_template = template
    return change


def test_a_label_does_not_make_the_journal_of_another_ones_own(etcd, tmp_path):
    async def scenario(broker):
        await apply(broker, OPERATOR, upsert("a/prod", labels=PROD))
        for change in (upsert("a/prod", labels=STAGING), upsert("a/prod", labels=PROD)):
            with pytest.raises(UnauthenticatedError, match="before and after the change"):
                await apply(broker, TEAM, change)
        assert broker.keyspace.item("a/prod").value.labels.labels[0].value == "prod"

    with_broker(etcd, tmp_path, scenario)


def test_a_journal_that_a_selector_excludes_is_not_deleted(etcd, tmp_path):
    async def scenario(broker):
        await apply(broker, OPERATOR, upsert("a/prod", labels=PROD), upsert("a/test"))
        with pytest.raises(UnauthenticatedError):
            await apply(broker, "env!=prod", delete("a/prod"))
        assert (await apply(broker, "env!=prod", delete("a/test"))).status == pb.OK
        assert broker.keyspace.item("a/prod") is not None
        assert broker.keyspace.item("a/test") is None

    with_broker(etcd, tmp_path, scenario)


def test_one_refused_change_refuses_all(etcd, tmp_path):
    async def scenario(broker):
        await apply(broker, OPERATOR, upsert("a/prod", labels=PROD))
        with pytest.raises(UnauthenticatedError):
            await apply(
                broker, TEAM, upsert("a/mine", labels=STAGING), upsert("a/prod", labels=STAGING)
            )
        assert broker.keyspace.item("a/mine") is None

    with_broker(etcd, tmp_path, scenario)


def test_own_journals_are_created_changed_and_deleted(etcd, tmp_path):
    async def scenario(broker):
        created = await apply(broker, "name:prefix=team/", upsert("team/one", expect=0))
        assert created.status == pb.OK
        revision = broker.keyspace.item("team/one").mod_revision
        changed = upsert("team/one", expect=revision, length=2048, labels=STAGING)
        assert (await apply(broker, "name:prefix=team/", changed)).status == pb.OK
        stale = await apply(broker, "name:prefix=team/", upsert("team/one", expect=revision))
        assert stale.status == pb.ETCD_TRANSACTION_FAILED
        many = [upsert(f"team/{number}", expect=0) for number in range(100)]
        assert (await apply(broker, "name:prefix=team/", *many)).status == pb.OK
        assert (await apply(broker, "name:prefix=team/", delete("team/one"))).status == pb.OK

    with_broker(etcd, tmp_path, scenario)


def test_a_journal_that_changes_after_its_check_is_not_overwritten(etcd, tmp_path):
    async def scenario(broker):
        await apply(broker, OPERATOR, upsert("a/mine", labels=STAGING))
        transact, key = broker._etcd.txn, broker.keyspace.item_key("a/mine")

        async def change_in_between(compares, then, otherwise=()):
            compares = list(compares)
            if key in [compare.key for compare in compares]:
                broker._etcd.txn = transact
                await apply(broker, OPERATOR, upsert("a/mine", labels=PROD))
            return await transact(compares, then, otherwise)

        broker._etcd.txn = change_in_between
        answer = await apply(broker, TEAM, upsert("a/mine", labels=STAGING))
        assert answer.status == pb.ETCD_TRANSACTION_FAILED
        assert broker.keyspace.item("a/mine").value.labels.labels[0].value == "prod"

    with_broker(etcd, tmp_path, scenario)


@pytest.mark.parametrize(
    "store", ["file:///", "file:///?find=team/&replace=other/", "s3://bucket/other/"]
)
def test_stores_are_not_given_to_journals(store, etcd, tmp_path):
    async def scenario(broker):
        await apply(broker, OPERATOR, upsert("team/kept", stores=["file:///kept/"]))
        for name in ("team/new", "team/kept"):
            with pytest.raises(UnauthenticatedError, match=r"--broker\.allow-store"):
                await apply(broker, "name:prefix=team/", upsert(name, stores=[store]))
        kept = upsert("team/kept", stores=["file:///kept/"], length=2048)
        assert (await apply(broker, "name:prefix=team/", kept)).status == pb.OK
        assert (await apply(broker, OPERATOR, upsert("team/new", stores=[store]))).status == pb.OK

    with_broker(etcd, tmp_path, scenario)


def test_stores_of_the_operators_list_are_given_to_journals(etcd, tmp_path):
    async def scenario(broker):
        allowed = upsert("team/new", stores=["file:///team/"])
        assert (await apply(broker, "name:prefix=team/", allowed)).status == pb.OK
        for store in ("file:///", "file:///team/more/", "file:///team/?find=team/&replace=a/"):
            with pytest.raises(UnauthenticatedError, match=r"--broker\.allow-store"):
                await apply(broker, "name:prefix=team/", upsert("team/new", stores=[store]))

    with_broker(etcd, tmp_path, scenario, allow_stores=("file:///team/",))


def test_the_path_postfix_is_not_changed(etcd, tmp_path):
    async def scenario(broker):
        date = '{{ .Spool.FirstAppendTime.Format "2006-01-02" }}'
        await apply(broker, OPERATOR, with_postfix(upsert("team/kept"), date))
        for name in ("team/new", "team/kept"):
            with pytest.raises(UnauthenticatedError, match="path postfix"):
                await apply(
                    broker, "name:prefix=team/", with_postfix(upsert(name), "another/journal")
                )
        kept = with_postfix(upsert("team/kept", length=2048), date)
        assert (await apply(broker, "name:prefix=team/", kept)).status == pb.OK

    with_broker(etcd, tmp_path, scenario)

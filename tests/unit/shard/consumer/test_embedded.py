"""Consumers inside a program, on a real cluster, and calls of their endpoints."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import threading
import time
import urllib.error
import urllib.request

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue, UInt64Value

from gazette_sdk import shard
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    GazetteError,
    LeaseLostError,
    UnauthenticatedError,
    UserCodeError,
)
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.authorization import (
    Authority,
    Capability,
    FixedToken,
    authority_for,
)
from gazette_sdk.protocol.labels import label_set, parse_selector
from gazette_sdk.shard import EmbeddedConsumer
from gazette_sdk.shard.consumer.client import ShardClient
from gazette_sdk.shard.consumer.endpoints import QUERIES_OF_PEER_MAX
from gazette_sdk.transport import loop as sdk_loop
from support import order_totals
from support.order_totals import BY_CUSTOMER, BY_NAME, CUSTOMERS, create_journals, publish

KEYS = base64.b64encode(b"a secret key of consumers, 32 by").decode()
TIMEOUT_S = 60.0


class Totals(shard.Application):
    """Totals of orders, by an application whose name is the test's."""

    message, store = order_totals.Order, shard.RocksStore[str, int]
    sources = "topic=orders"

    def __init__(self, name, hot_standbys=1):
        self.name, self.hot_standbys = name, hot_standbys
        super().__init__()
        self.calls = []
        self.get("/api/customers/{customer}", by=BY_CUSTOMER)(order_totals.customer_total)

    def rpcs(self):
        return [
            shard.Method(
                "/orders.Totals/Total", StringValue, UInt64Value, order_totals.total_of, by=BY_NAME
            ),
            shard.Method(
                "/orders.Totals/Echo",
                StringValue,
                StringValue,
                order_totals.echo_request,
                capability=shard.Capability.APPEND,
            ),
        ]

    def start(self, process):
        self.calls.append(("start", process.name))

    def stop(self):
        self.calls.append("stop")

    def consume(self, txn, order):
        if self.name == "refusing":
            raise ValueError("an order that is refused")
        txn.store[order.customer] = txn.store.get(order.customer, 0) + order.cents


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster"), sync_etcd=False) as cluster:
        create_journals(cluster.transport)
        publish(cluster.transport, 100)
        yield cluster


def consumer_of(cluster, application, **options):
    return EmbeddedConsumer(
        application, transport=cluster.transport, etcd=cluster.etcd_endpoint, **options
    )


def leaders(consumer):
    """The processes of the primaries."""
    routes = [each.route for each in consumer.list_shards()]
    return {route.members[route.primary].suffix for route in routes if route.primary >= 0}


def codes(consumer):
    """The statuses of all replicas."""
    return {status.code for each in consumer.list_shards() for status in each.status}


def wait_until(holds):
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ask(consumer, number, token=None):
    """The status and the total of a customer, asked over HTTP."""
    url = f"{consumer.address}/api/customers/customer-{number}"
    headers = {} if token is None else {"Authorization": token}
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.status, json.load(answer)["cents"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["error"]


def answer_of(consumer, path):
    """The status and the text of an answer over HTTP."""
    try:
        with urllib.request.urlopen(consumer.address + path, timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["error"]


def call(consumer, name, value, token=None, response=UInt64Value):
    """The code and the value of a gRPC method's response, or the text of a failure."""
    metadata = () if token is None else (("authorization", token),)
    with grpc.insecure_channel(consumer.address.removeprefix("http://")) as channel:
        method = channel.unary_unary(
            f"/orders.Totals/{name}", StringValue.SerializeToString, response.FromString
        )
        try:
            found = method(StringValue(value=value), timeout=TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            return error.code().name, error.details()
        return "OK", found.value


def test_consumers_share_shards_and_one_that_stops_hands_its_shards_over(cluster):
    one, two = Totals("sharing"), Totals("sharing")
    with consumer_of(cluster, two) as staying:
        with consumer_of(cluster, one) as leaving:
            wait_until(lambda: len(leaders(staying)) == 2)
            leaving.wait_caught_up(TIMEOUT_S)
            for consumer in (staying, leaving):
                for number in range(CUSTOMERS):
                    assert ask(consumer, number) == (200, 20)
                    assert call(consumer, "Total", f"customer-{number}") == ("OK", 20)
            assert one.calls == [("start", "sharing")]
        assert one.calls == [("start", "sharing"), "stop"]
        assert two.calls == [("start", "sharing")]
        wait_until(lambda: ask(staying, 1)[0] == 200)
        staying.wait_caught_up(TIMEOUT_S)
        assert [ask(staying, number) for number in range(CUSTOMERS)] == [(200, 20)] * CUSTOMERS


def test_callers_need_tokens_where_there_are_keys(cluster):
    def token(capability, selector="", keys=KEYS):
        signer = authority_for(keys)
        assert isinstance(signer, Authority)
        return signer.header(capability, parse_selector(selector), 60.0, time.time())

    options = {"auth_keys": KEYS}
    with (
        consumer_of(cluster, Totals("guarded"), **options) as one,
        consumer_of(cluster, Totals("guarded"), **options) as two,
    ):
        wait_until(lambda: len(leaders(one)) == 2)
        one.wait_caught_up(TIMEOUT_S)
        reading = token(Capability.READ)
        ids = [each.spec.id for each in one.list_shards()]
        answers = set()
        for consumer in (one, two):
            for number in range(CUSTOMERS):
                assert ask(consumer, number, reading) == (200, 20)
                name = f"customer-{number}"
                assert call(consumer, "Total", name, reading) == ("OK", 20)
                limited = token(Capability.READ, f"id={ids[0]}")
                code = call(consumer, "Total", name, limited)[0]
                assert ask(consumer, number, limited)[0] == {"OK": 200, "NOT_FOUND": 404}[code]
                answers.add(code)
            assert ask(consumer, 1)[0] == 401
            assert call(consumer, "Total", "customer-1")[0] == "UNAUTHENTICATED"
            code, text = call(consumer, "Echo", "here", reading, StringValue)
            assert (code, "APPEND" in text) == ("UNAUTHENTICATED", True)
            appending = token(Capability.APPEND)
            assert call(consumer, "Echo", "here", appending, StringValue) == ("OK", "here")
        assert answers == {"OK", "NOT_FOUND"}


def test_a_token_with_a_selector_takes_over_no_shard_of_a_running_consumer(cluster):
    authority = authority_for(KEYS)
    assert isinstance(authority, Authority)

    def apply(consumer, spec, selector=""):
        token = authority.sign(Capability.ALL, parse_selector(selector), 60.0, time.time())
        change = cpb.ApplyRequest.Change(upsert=spec, expect_mod_revision=-1)

        async def work():
            async with ShardClient(address, authorizer=FixedToken(token)) as client:
                await client.apply(cpb.ApplyRequest(changes=[change]))

        address = consumer.address
        sdk_loop.run(work(), TIMEOUT_S)

    application = Totals("attacked", hot_standbys=0)
    with consumer_of(cluster, application, auth_keys=KEYS) as consumer:
        consumer.wait_caught_up(TIMEOUT_S)
        first, second = (each.spec for each in consumer.list_shards())

        def changed(spec, **fields):
            made = cpb.ShardSpec()
            made.CopyFrom(spec)
            for name, value in fields.items():
                setattr(made, name, value)
            made.labels.CopyFrom(label_set([("team", "red")]))
            return made

        split = {
            "recovery_log_prefix": "recovery/attacked",
            "hint_prefix": "/gazette/hints/attacked",
        }
        secret = changed(first, id="attacked/totals/part-000")
        secret.sources[0].journal = "totals/part-000"
        for spec in (
            changed(first, id="orders/part-000", **split),
            changed(first, id="evil", hint_prefix="/gazette/cluster/items"),
            changed(first, id="attacked/orders/part-002"),
            secret,
        ):
            with pytest.raises(UnauthenticatedError, match="a token with a selector"):
                apply(consumer, spec, "team=red")
        # What the application gives to a shard, its holder may give back to it.
        moved = changed(second, hint_prefix="/elsewhere")
        apply(consumer, moved)
        with pytest.raises(UnauthenticatedError, match="hint_prefix '/other'"):
            apply(consumer, changed(second, hint_prefix="/other"), "team=red")
        apply(consumer, changed(second), "team=red")

        assert [each.spec for each in consumer.list_shards()] == [first, changed(second)]
        assert codes(consumer) == {cpb.ReplicaStatus.PRIMARY}
        assert ask(
            consumer, 1, authority.header(Capability.READ, parse_selector(""), 60.0, time.time())
        ) == (200, 20)


def test_a_shard_that_has_failed_is_named_when_it_does_not_catch_up(cluster):
    with consumer_of(cluster, Totals("refusing", hot_standbys=0)) as consumer:
        wait_until(lambda: codes(consumer) == {cpb.ReplicaStatus.FAILED})
        with pytest.raises(TimeoutError, match=r"FAILED .*an order that is refused"):
            consumer.wait_caught_up(0.1)


def test_a_shard_whose_store_was_changed_fails_and_goes_on_with_the_store_that_it_had(cluster):
    class Kept(Totals):
        store = shard.JsonStore[dict[str, int]]

        def consume(self, txn, order):
            counts = txn.store.state
            counts[order.customer] = counts.get(order.customer, 0) + 1

    def application(store):
        kept = Kept("relabelled", hot_standbys=0)
        kept.store = store
        return kept

    with consumer_of(cluster, application(Kept.store)) as consumer:
        consumer.wait_caught_up(TIMEOUT_S)
    sqlite = shard.SqliteStore.of(schema="CREATE TABLE t (k)")
    for other in (shard.RocksStore[str, int], sqlite):
        with consumer_of(cluster, application(other)) as consumer:
            wait_until(lambda: codes(consumer) == {cpb.ReplicaStatus.FAILED})
            texts = [error for each in consumer.list_shards() for error in each.status[0].errors]
            assert all("files of JsonStore (state.json), and none of" in text for text in texts)
            assert len(texts) == 2
    with consumer_of(cluster, application(Kept.store)) as consumer:
        consumer.wait_caught_up(TIMEOUT_S)
        local = consumer._served.consumer.resolver.local
        states = [local.get(each.spec.id).store.state for each in consumer.list_shards()]
    assert sum(sum(state.values()) for state in states) == 100


def test_a_journal_whose_shard_has_another_id_gets_no_second_one(cluster):
    by_hand = cpb.ShardSpec(id="by-hand", sources=[cpb.ShardSpec.Source(journal="orders/part-000")])
    by_hand.max_txn_duration.FromSeconds(1)
    application = Totals("manual", hot_standbys=0)
    application.sources = None
    with consumer_of(cluster, application) as consumer:
        change = cpb.ApplyRequest.Change(upsert=by_hand)
        address = consumer.address

        async def apply():
            async with ShardClient(address) as client:
                await client.apply(cpb.ApplyRequest(changes=[change]))

        sdk_loop.run(apply(), TIMEOUT_S)
    with consumer_of(cluster, Totals("manual", hot_standbys=0)) as consumer:
        consumer.wait_caught_up(TIMEOUT_S)
        ids = {each.spec.id for each in consumer.list_shards()}
    assert ids == {"by-hand", "manual/orders/part-001"}


def test_queries_that_raise_what_ends_a_task_or_the_process_are_answered(cluster):
    application = Totals("answering", hot_standbys=0)
    for name, error in (
        ("stop", StopIteration()),
        ("cancel", asyncio.CancelledError()),
        ("text", ValueError("file \udcff")),
        ("exit", SystemExit(3)),
    ):

        def fail(query, customer, error=error):
            raise error

        async def fail_later(query, customer, error=error):
            raise error

        application.get(f"/api/{name}/{{customer}}", by=BY_CUSTOMER)(fail)
        application.get(f"/api/{name}-later/{{customer}}", by=BY_CUSTOMER)(fail_later)
    with consumer_of(cluster, application) as consumer:
        consumer.wait_caught_up(TIMEOUT_S)
        for name in ("stop", "cancel", "text", "stop-later", "cancel-later", "text-later"):
            status, text = answer_of(consumer, f"/api/{name}/customer-1")
            assert (status, name[:4] in text.lower() or "\\udcff" in text) == (500, True)
        consumer.wait_caught_up(TIMEOUT_S)
        assert "SystemExit: 3" in answer_of(consumer, "/api/exit-later/customer-1")[1]
        with pytest.raises(UserCodeError, match="SystemExit: 3"):  # the process is to end
            consumer.wait_caught_up(TIMEOUT_S)


def test_slow_queries_do_not_stop_a_shard_and_those_left_are_interrupted(cluster):
    application = Totals("asked", hot_standbys=0)
    begun, may_end = threading.Semaphore(0), threading.Event()
    statuses = []

    @application.get("/api/slow/{customer}", by=BY_CUSTOMER)
    def slow(query, customer):
        begun.release()
        while not may_end.is_set():
            may_end.wait(0.01)
        return "done"

    with consumer_of(cluster, application, workers=2) as consumer:
        consumer.wait_caught_up(TIMEOUT_S)
        host, port = consumer.address.removeprefix("http://").split(":")

        def leave():
            """Ask, and leave once the query runs."""
            connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S)
            connection.request("GET", "/api/slow/customer-1")
            assert begun.acquire(timeout=TIMEOUT_S)
            connection.close()

        for _ in range(QUERIES_OF_PEER_MAX + 2):  # each one's place is free for the next
            leave()
        asking = [
            threading.Thread(target=lambda: statuses.append(answer_of(consumer, "/api/slow/c")[0]))
            for _ in range(40)
        ]
        for thread in asking:
            thread.start()
        publish(cluster.transport, 100)
        consumer.wait_caught_up(TIMEOUT_S)  # though 40 queries are asked
        wait_until(lambda: len(statuses) >= 40 - QUERIES_OF_PEER_MAX)
        assert set(statuses) == {429}
        may_end.set()
        for thread in asking:
            thread.join(TIMEOUT_S)
        assert statuses.count(200) == QUERIES_OF_PEER_MAX
        assert len(statuses) == 40


def test_a_handler_that_ends_the_process_is_reported_first(cluster):
    class Exiting(Totals):
        def consume(self, txn, order):
            raise SystemExit(3)

    with consumer_of(cluster, Exiting("exiting", hot_standbys=0)) as consumer:
        with pytest.raises(GazetteError, match="SystemExit: 3"):
            sdk_loop.run(consumer.ended(), TIMEOUT_S)
        with pytest.raises(GazetteError, match="SystemExit: 3"):
            consumer.wait_caught_up(TIMEOUT_S)


def test_a_handler_that_cancels_its_own_task_fails_its_shard(cluster):
    class Cancelling(shard.Application):
        message, store, sources = order_totals.Order, shard.RocksStore[str, int], "topic=orders"
        name, hot_standbys = "cancelling", 0

        async def consume(self, txn, order):
            asyncio.current_task().cancel()
            await asyncio.sleep(0)

    with consumer_of(cluster, Cancelling()) as consumer:
        wait_until(lambda: codes(consumer) == {cpb.ReplicaStatus.FAILED})


def test_a_consumer_that_loses_its_lease_says_so(cluster, caplog):
    consumer = consumer_of(cluster, Totals("losing"), suffix="losing")
    with consumer:
        keyspace = consumer._served.consumer.keyspace

        async def revoke():
            etcd = await Etcd.connect(cluster.etcd_endpoint)
            await etcd.revoke(keyspace.member("local", "losing").lease)
            await etcd.aclose()

        sdk_loop.run(revoke(), TIMEOUT_S)
        with pytest.raises(LeaseLostError):
            sdk_loop.run(consumer.ended(), TIMEOUT_S)
        with pytest.raises(LeaseLostError):
            consumer.wait_caught_up(TIMEOUT_S)
    assert "the consumer of losing in this process has failed" in caplog.text


def test_the_broker_is_asked_for_etcd(cluster, monkeypatch):
    monkeypatch.setenv("GAZETTE_ADDRESS", cluster.address)

    async def work():
        async with EmbeddedConsumer(Totals("asking")) as consumer:
            assert consumer.address.startswith("http://localhost:")

    asyncio.run(work())


@pytest.mark.parametrize("given", [Totals, print, "orders:totals"])
def test_what_is_no_application_is_refused(given):
    with pytest.raises(ConfigurationError, match="is no application; give a function decorated"):
        EmbeddedConsumer(given)


def test_a_broker_that_does_not_answer_is_named_with_the_parameter(monkeypatch):
    monkeypatch.setenv("GAZETTE_ADDRESS", "http://localhost:1")
    with pytest.raises(
        ConfigurationError, match=r"localhost:1 .*: Connection refused; .*transport=connect"
    ) as caught:
        EmbeddedConsumer(Totals("asking")).start()
    assert "--" not in str(caught.value)


def test_a_consumer_that_cannot_start_says_why_and_leaves_nothing(cluster):
    consumer = EmbeddedConsumer(Totals("starting"), transport=cluster.transport)
    with pytest.raises(
        ConfigurationError, match=r"without an address .* give its address as etcd="
    ):
        consumer.start()
    with pytest.raises(ClosedError, match="start"):
        _ = consumer.address
    with consumer_of(cluster, Totals("starting")) as running:
        port = int(running.address.rpartition(":")[2])
        with pytest.raises(ConfigurationError, match=str(port)):
            consumer_of(cluster, Totals("starting"), port=port).start()

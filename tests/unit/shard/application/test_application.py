"""Declarations of applications: what is refused where it is declared, and default values."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from operator import attrgetter

import msgspec
import pydantic
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from gazette_sdk import JsonMessage, mapping, shard
from gazette_sdk.errors import ConfigurationError, ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import label_set
from gazette_sdk.shard.application.handler import HandlerApplication
from gazette_sdk.shard.consumer.service import application_methods


@dataclass
class Order(JsonMessage):
    customer: str


@dataclass
class Customer(JsonMessage):
    name: str


class Store:
    def __init__(self, directory):
        self.directory = directory


def made(**declared):
    @shard.handler(**{"message": Order, "store": Store, **declared})
    def totals(txn, order):
        """Nothing."""

    return totals


def test_a_function_becomes_an_application():
    application = made()
    assert isinstance(application, HandlerApplication)
    assert application.full_name == f"{__name__}.made.totals"
    assert not application.is_async
    assert application.consume is application.function
    assert (application.min_txn_s, application.max_txn_s, application.hot_standbys) == (0, 1, 1)
    assert application.new_message(None) is Order


def test_the_default_store_is_made_of_the_directory(tmp_path):
    handle = shard.Shard("a/shard", None, tmp_path, "app/a/shard")
    assert made().new_store(handle).directory == tmp_path


def test_a_store_that_wants_more_is_made_for_the_shard(tmp_path):
    class Declared:
        def for_shard(self, handle):
            return handle.full_name

    handle = shard.Shard("a/shard", None, tmp_path, "app/a/shard")
    assert made(store=Declared()).new_store(handle) == "app/a/shard"


CLASSES = {"topic=orders": Order, "topic=customers": Customer}


def joined(**given):
    topics = shard.partitions("topic=orders", "topic=customers")
    return made(**{"message": CLASSES, "sources": topics, **given})


def test_messages_of_several_topics_have_a_class_for_each():
    application = joined()
    for topic, wanted in [("orders", Order), ("customers", Customer)]:
        spec = pb.JournalSpec(name=f"{topic}/part-000", labels=label_set(topic=topic))
        assert application.new_message(spec) is wanted
    with pytest.raises(ConfigurationError, match="is of none of topic=orders, topic=customers"):
        application.new_message(pb.JournalSpec(name="a/journal"))


@pytest.mark.parametrize(
    "declared",
    [
        {"message": {"topic=orders": Order}},
        {"message": {**CLASSES, "topic=others": Order}},
        {"sources": "topic=orders"},
        {"sources": None},
    ],
)
def test_classes_by_topic_that_are_not_those_of_the_sources_are_refused(declared):
    with pytest.raises(ConfigurationError, match="declare one class for each selector"):
        joined(**declared)


def test_partitions_that_are_joined_are_not_chosen_by_their_names():
    by_names = mapping.rendezvous("topic=orders", key=attrgetter("customer"))
    with pytest.raises(ConfigurationError, match="joins partitions of one number"):
        joined().get("/orders/{customer}", by=by_names)(lambda query, customer: None)
    by_number = mapping.modulo("topic=orders", key=attrgetter("customer"))
    joined().get("/orders/{customer}", by=by_number)(lambda query, customer: None)
    made().get("/orders/{customer}", by=by_names)(lambda query, customer: None)


class Ride(msgspec.Struct, tag=True):
    driver: str


class Driver(msgspec.Struct, tag=True):
    driver: str


def test_messages_of_a_topic_may_be_of_several_classes_with_tags():
    assert made(message=Ride | Driver).new_message(None) == Ride | Driver
    spec = pb.JournalSpec(name="orders/part-000", labels=label_set(topic="orders"))
    application = joined(message={**CLASSES, "topic=orders": Ride | Driver})
    assert application.new_message(spec) == Ride | Driver


def test_classes_that_cannot_be_distinguished_are_refused_where_they_stand():
    text = r"totals: message=.*Order \| .*Ride: Order \| Ride is no class of messages.*tag=True"
    for message in (Order | Ride, {**CLASSES, "topic=orders": Order | Ride}):
        with pytest.raises(ConfigurationError, match=text):
            joined(message=message)
    with pytest.raises(ConfigurationError, match=r"the table of topic=a: .*Order \| Ride"):
        shard.table("topic=a", key=attrgetter("driver"), message=Order | Ride)


def test_a_module_that_runs_as_main_needs_a_name():
    def totals(txn, order):
        """Nothing."""

    totals.__module__ = "__main__"
    application = shard.handler(message=Order, store=Store)(totals)
    with pytest.raises(ConfigurationError, match="run-consumer"):
        _ = application.full_name
    assert shard.handler(message=Order, store=Store, name="t")(totals).full_name == "t"


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        ({"message": None}, "class of messages"),
        ({"message": int}, "int can carry no message UUID"),
        ({"message": Order("ada")}, "is no class of messages"),
        ({"message": list[int]}, "is no class of messages"),
        ({"store": None}, "no store"),
        ({"store": dict}, r"totals: store=<class 'dict'> is no store; use shard\.JsonStore"),
        ({"store": "rocks"}, "store='rocks' is no store"),
        ({"min_txn_s": -1}, "min_txn_s"),
        ({"max_txn_s": 0}, "max_txn_s"),
        ({"hot_standbys": -1}, "hot_standbys"),
        ({"on_error": "ignore"}, "on_error"),
        ({"sources": ["a//b"]}, "sources"),
        ({"sources": []}, "sources"),
        ({"sources": "=="}, "selector"),
        ({"name": "no spaces"}, "name"),
    ],
)
def test_values_that_cannot_be_used_are_refused(declared, text):
    with pytest.raises((ConfigurationError, ValidationError), match=text):
        made(**declared)


class Model(pydantic.BaseModel):
    name: str


@dataclass
class Node:
    child: Node | None = None


@dataclass
class Watched:
    event: threading.Event | None = None


ROCKS, JSON = shard.RocksStore, shard.JsonStore


class Totals(ROCKS[str, Model]):
    """Store of a class of its own."""


NO_KEY, NO_VALUE = "cannot be a key", "cannot be the type of a value"


@pytest.mark.parametrize(
    ("store", "text"),
    [
        (ROCKS[float, int], rf"<class 'float'> {NO_KEY}; declare str, bytes, int"),
        (ROCKS[tuple[str, ...], int], r"Ellipsis cannot be part of a key"),
        (ROCKS[list[str], int], NO_KEY),
        (ROCKS[str, Model], rf"Model'> {NO_VALUE}: .*declare a dataclass"),
        (ROCKS[str, dict[str, list[Watched]]], rf"{NO_VALUE}: .*threading.Event"),
        (ROCKS[str, dict[tuple[str, int], int]], rf"{NO_VALUE}: JSON has no keys but"),
        (ROCKS[str, "Model"], rf"Model'\) {NO_VALUE}"),
        (Totals, NO_VALUE),
        (ROCKS.of(key=float), NO_KEY),
        (ROCKS.of(value=Model), NO_VALUE),
        (ROCKS.of(families={"days": (float, int)}), NO_KEY),
        (JSON[dict[str, Model]], NO_VALUE),
        (JSON[Customer], r"cannot be the type of a state.*'name'; give its fields default"),
        (JSON[int | None], "cannot be the type of a state"),
    ],
)
def test_types_that_a_store_cannot_keep_are_refused(store, text):
    with pytest.raises(ConfigurationError, match=rf"made\.<locals>\.totals: its store: .*{text}"):
        made(store=store)


@pytest.mark.parametrize(
    "store",
    [
        ROCKS,
        ROCKS[str, Node],
        ROCKS[str, object],
        ROCKS[tuple[str, int], dict[int, object]],
        ROCKS.of(key=shard.codec.utf8, value=shard.codec.uvarint),
        ROCKS[bytes, pb.Label],
        JSON,
        JSON[list[int]],
        JSON[Node],
    ],
)
def test_types_that_a_store_keeps_are_declared(store):
    assert made(store=store).store is store


def test_types_of_states_of_windows_are_checked_where_they_stand():
    with pytest.raises(ConfigurationError, match=NO_VALUE):
        shard.windows.Tumbling(size_s=60, state=Model)


def test_a_function_takes_a_transaction_and_a_message():
    declare = shard.handler(message=Order, store=Store)
    with pytest.raises(ConfigurationError, match=r"one\(order\) cannot .*\(txn, message\)$"):

        @declare
        def one(order):
            """Nothing."""

    with pytest.raises(ConfigurationError, match=r"three\(txn, order, more\) .*'more'"):

        @declare
        async def three(txn, order, more):
            """Nothing."""

    @declare
    def with_default(txn, order, more=None):
        """Nothing."""

    declare(print)

    class Method(shard.Application):
        message, store = Order, Store

        def consume(self, order):
            """Nothing."""

    with pytest.raises(ConfigurationError, match=r"Method\(order\)"):
        Method()


def test_dead_letters_need_a_journal():
    assert made(on_error=shard.dead_letters("orders/rejected")).on_error.journal
    with pytest.raises(ValidationError):
        shard.dead_letters("")


def test_a_mixture_of_hooks_is_refused():
    class Mixed(shard.Application):
        message, store = Order, Store

        async def begin(self, txn):
            """Nothing."""

        def consume(self, txn, order):
            """Nothing."""

    with pytest.raises(ConfigurationError, match="async def"):
        Mixed()


def test_coroutine_functions_are_hooks():
    @shard.handler(message=Order, store=Store)
    async def totals(txn, order):
        """Nothing."""

    assert totals.is_async


def test_objects_whose_call_is_a_coroutine_function_are_hooks():
    class Totals:
        async def __call__(self, txn, order):
            """Nothing."""

    assert shard.handler(message=Order, store=Store)(Totals()).is_async


def test_a_function_with_a_yield_is_refused():
    def yielding(txn, order):
        yield

    async def yielding_async(txn, order):
        yield

    for function in (yielding, yielding_async):
        with pytest.raises(ConfigurationError, match="`consume` has a `yield`"):
            shard.handler(message=Order, store=Store)(function)


@pytest.mark.parametrize("hook", ["start", "stop", "new_store"])
def test_a_hook_that_is_never_awaited_is_refused(hook):
    async def never(self, *_):
        """Nothing."""

    def consume(self, txn, order):
        """Nothing."""

    declared = {"message": Order, "store": Store, "consume": consume, hook: never}
    with pytest.raises(ConfigurationError, match=f"`{hook}` is called by itself"):
        type("Started", (shard.Application,), declared)()


def test_a_function_on_an_asynchronous_store_is_refused():
    class Remote:
        is_async = True

    with pytest.raises(ConfigurationError, match="async def"):
        made(store=Remote)


def test_an_application_without_consume_is_refused():
    class Empty(shard.Application):
        message, store = Order, Store

    with pytest.raises(ConfigurationError, match="consume"):
        Empty()


def test_endpoints_are_declared_once():
    application = made()

    @application.get("/api/customers/{customer}/orders/{order}")
    def orders(query, customer, order):
        return {}

    [endpoint] = application.endpoints
    assert endpoint.parameters == ("customer", "order")
    assert endpoint.match("/api/customers/ada/orders/7") == {"customer": "ada", "order": "7"}
    assert endpoint.match("/api/customers/ada/orders") is None
    with pytest.raises(ConfigurationError, match="twice"):
        application.get("/api/customers/{customer}/orders/{order}")(orders)
    with pytest.raises(ConfigurationError, match="malformed"):
        application.get("api")(orders)
    with pytest.raises(ConfigurationError, match="malformed"):
        application.post("/{a}/{a}")(orders)


def test_methods_are_declared_by_full_names_and_served_once():
    application = made()

    @application.rpc("/shop.Orders/Count", StringValue, StringValue)
    def count(request):
        return request

    [method] = application.rpcs()
    assert method.is_about_no_shard
    assert method.serve is count
    assert method.capability is shard.Capability.READ
    for name in ("Count", "shop.Orders/Count", "/shop.Orders", "/shop.Orders/Count/"):
        with pytest.raises(ConfigurationError, match="full name"):
            application.rpc(name, StringValue, StringValue)(count)
    served = list(application_methods([method], None, None))
    assert [each.rpc.path for each in served] == ["/shop.Orders/Count"]
    with pytest.raises(ConfigurationError, match="declared twice"):
        list(application_methods([method, method], None, None))

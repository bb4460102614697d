"""Input that cannot be used: one clear error each, and nothing is changed by it."""

import asyncio
from contextlib import contextmanager

import pytest

from gazette_sdk import Publisher, Reader, connect, mapping
from gazette_sdk.errors import (
    ConfigurationError,
    EtcdTransactionFailedError,
    FragmentStoreUnhealthyError,
    GazetteError,
    JournalNotFoundError,
    MappingError,
    OffsetNotYetAvailableError,
    ValidationError,
    WrongAppendOffsetError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.listing import apply_journals, list_journals
from integration.failures.journals import Writer, append, read, read_on, run, spec, within
from support.raw_http import exchange


@pytest.fixture(params=["in this process", "grpc"])
def transport(cluster, request):
    if request.param == "in this process":
        yield cluster.transport
        return
    transport = connect(cluster.address)
    yield transport
    run(transport.aclose())


@pytest.fixture
def kept(cluster, name):
    """A journal which is as it was when the test is over."""
    cluster.apply(spec(name))
    writer = Writer(cluster.transport, name)
    writer.append()
    before = run(list_journals(cluster.transport)).journals
    yield name
    writer.append()
    writer.check()
    assert run(list_journals(cluster.transport)).journals == before


@contextmanager
def one_error(kind, *texts):
    """Exactly this error, in one line, that says all of this."""
    with within(5), pytest.raises(GazetteError) as caught:
        yield
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    for text in texts:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("journal", "text"),
    [
        ("/begins/with/slash", "'/begins/with/slash'"),
        ("ends/", "must be a clean path ('ends/': no `//`, no `.`, no trailing `/`)"),
        ("two//slashes", "must be a clean path ('two//slashes'"),
        ("up/../and/down", "must be a clean path ('up/../and/down'"),
        ("with space", "not made of path characters ('with space'); use letters,"),
        ("abc", "invalid length (3; expected 4 <= length <= 512 bytes)"),
        ("x" * 600, "invalid length (600; expected 4 <= length <= 512 bytes)"),
    ],
)
def test_a_bad_name_of_a_journal_is_named(kept, transport, journal, text):
    with one_error(ValidationError, "Journal: ", text):
        append(transport, journal, b"content")
    with one_error(ValidationError, "Journal: ", text):
        raised(read(transport, journal))
    with one_error(ValidationError, "journal: ", text):
        Reader(dict, name=journal, transport=transport)


@pytest.mark.parametrize("journal", ["ends/", "with%20space", "", "%ff", "%zz"])
def test_a_bad_name_is_a_bad_request_over_http(cluster, kept, journal):
    for method, body in (("GET", None), ("HEAD", None), ("PUT", b"content")):
        answer = asyncio.run(exchange(cluster.address, method, f"/{journal}", body=body))
        assert answer.status == 400
        assert method == "HEAD" or answer.body.count(b"\n") == 1
        assert b"Traceback" not in answer.body


def test_a_journal_that_does_not_exist_is_named(cluster, kept, transport):
    for attempt in (
        lambda: append(transport, "no/such", b"content"),
        lambda: raised(read(transport, "no/such")),
        lambda: raised(read_on(transport, "no/such")),
        lambda: list(Reader(dict, name="no/such", transport=transport)),
    ):
        with one_error(JournalNotFoundError, "no/such", "gazctl journals apply"):
            attempt()
    answer = asyncio.run(exchange(cluster.address, "PUT", "/no/such", body=b"x"))
    assert (answer.status, answer.body) == (500, b"JOURNAL_NOT_FOUND\n")


def raised(outcome):
    raise outcome[1]


@pytest.mark.parametrize(
    "selector", ["topic ~ x", "topic in ()", "topic in (a", "!", "=orders", "topic,,zone", "a=b"]
)
def test_a_bad_selector_is_named(kept, transport, selector):
    with one_error(ValidationError, "could not match", "to a label selector expression"):
        Reader(dict, selector, transport=transport)
    with one_error(ValidationError, "could not match", "to a label selector expression"):
        mapping.modulo(selector, key=lambda _: "key")


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"replication": 0}, ["invalid replication (0; expected 1 <= replication <= 5)"]),
        ({"fragment": {"length": 10}}, ["invalid length", "1024 <="]),
        ({"fragment": {"stores": ["nope://bucket/"]}}, ["Stores[0]", "nope"]),
        ({"fragment": {"stores": ["s3://bucket/no/slash"]}}, ["Stores[0]", "/"]),
        ({"fragment": {"stores": ["file://host/"]}}, ["Stores[0]", "host"]),
        ({"fragment": {"stores": ["not a url"]}}, ["Stores[0]"]),
        ({"fragment": {"stores": ["s3:///"]}}, ["Stores[0]", "bucket"]),
        ({"fragment": {"compression_codec": 99}}, ["codec"]),
        ({"fragment": {"path_postfix_template": "{{ .Spec.Nope }}"}}, ["emplate"]),
        ({"max_append_rate": -1}, ["rate"]),
        ({"name": "bad//name"}, ["bad//name"]),
    ],
)  # fmt: skip
def test_a_bad_specification_changes_nothing(cluster, kept, transport, change, texts):
    good = {"name": "failures/fresh", "replication": 1}
    fragment = {
        "length": 1 << 20, "compression_codec": pb.NONE, "refresh_interval": {"seconds": 60},
    }  # fmt: skip
    fragment |= change.get("fragment", {})
    bad = pb.JournalSpec(**{**good, **change, "fragment": fragment})
    fine = pb.JournalSpec(
        name="failures/bystander",
        replication=1,
        fragment=pb.JournalSpec.Fragment(
            length=1 << 20, compression_codec=pb.NONE, refresh_interval={"seconds": 60}
        ),
    )
    request = pb.ApplyRequest(changes=[pb.ApplyRequest.Change(upsert=spec) for spec in (fine, bad)])
    with one_error(ValidationError, "Changes[1]", *texts):
        run(transport.apply(request))


@pytest.mark.parametrize(
    "document",
    [
        "name: [unclosed",
        "just text",
        "- a\n- list",
        "name: a/journal\nreplicaton: 1",
        "name: a/journal\nreplication: many",
        "name: a/\nreplication: 1\nchildren:\n  - name: b/outside",
    ],
)
def test_a_bad_document_changes_nothing(cluster, kept, document):
    with within(5), pytest.raises(ValidationError):
        cluster.apply(document)


def test_a_stale_revision_changes_nothing(cluster, kept, transport):
    listed = run(list_journals(transport)).journals[0]
    change = pb.ApplyRequest.Change(upsert=listed.spec, expect_mod_revision=1)
    response = run(transport.apply(pb.ApplyRequest(changes=[change])))
    assert response.status == pb.ETCD_TRANSACTION_FAILED
    change = pb.ApplyRequest.Change(delete="no/such", expect_mod_revision=5)
    with one_error(EtcdTransactionFailedError, "list again"):
        run(apply_journals(transport, pb.ApplyRequest(changes=[change])))


def test_a_bad_offset_is_told(cluster, kept, transport):
    with one_error(ValidationError, "ffset", "-2"):
        raised(read(transport, kept, -2))
    with one_error(OffsetNotYetAvailableError, kept, "block=True"):
        raised(read(transport, kept, 10**12))
    with one_error(WrongAppendOffsetError, kept, "offset 17", "read up to the head"):
        append(transport, kept, b"content", offset=17)
    with one_error(ValidationError, "ffset"):
        append(transport, kept, b"content", offset=-5)
    with one_error(ConfigurationError, "-7", kept):
        Reader(dict, name=kept, transport=transport, offsets={kept: -7})
    for query in ("offset=-2", "offset=x", "offset=99999999999999999999", "ofset=1", "block=maybe"):
        answer = asyncio.run(exchange(cluster.address, "GET", f"/{kept}?{query}"))
        assert answer.status == 400
        assert answer.body.count(b"\n") == 1
    answer = asyncio.run(exchange(cluster.address, "GET", f"/{kept}?offset={10**12}"))
    assert (answer.status, answer.body) == (416, b"OFFSET_NOT_YET_AVAILABLE\n")


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("s3://bucket/?region=nope&endpoint=http://127.0.0.1:1", "check the network"),
        ("s3://bucket/?profile=no-such-profile&region=us-east-1", "no-such-profile"),
        ("file:///no/such/directory/", "create it"),
    ],
)
def test_a_store_that_cannot_be_used_is_reported_by_appends(cluster, name, transport, url, text):
    cluster.apply(spec(name, url))
    with one_error(FragmentStoreUnhealthyError, name, url, text, "gazctl journals store-health"):
        append(transport, name, b"content")
    request = pb.FragmentStoreHealthRequest(fragment_store=url)
    response = run(transport.fragment_store_health(request))
    assert response.status == pb.FRAGMENT_STORE_UNHEALTHY
    assert text in response.store_health_error


@pytest.mark.parametrize(
    "url",
    [
        "", "localhost:8080", "http://", "http:///", "ftp://host", "http://host:port",
        "http://host:99999", "http://host/with/path", "http://host?x=y", "unix://", "embedded://",
        "embedded://host/path", "s3://", "://", "http://[::1", "s3://[", "\n", "file://host/x/",
        "s3://bucket/?unknown=1",
    ],
)  # fmt: skip
def test_a_bad_address_is_reported_where_it_is_given(url, monkeypatch):
    with within(5), pytest.raises(ConfigurationError) as caught:
        connect(url)
    assert url.strip() in str(caught.value)
    if not url.strip():
        return
    monkeypatch.setenv("GAZETTE_ADDRESS", url)
    for use in (
        connect,
        lambda: list(Reader(dict, "topic=orders")),
        lambda: Publisher(mapping.direct("a/journal")).publish({"_meta": {}}),
    ):
        with within(5), pytest.raises(ConfigurationError):
            use()


def test_a_mapping_to_nowhere_is_told(cluster, kept, transport):
    with Publisher(lambda _: "no/such", transport=transport) as publisher:
        with one_error(MappingError, "no/such", "gazctl journals apply"):
            publisher.publish({"number": 1})
        with one_error(ValidationError, "bad//name"):
            publisher.publish({"number": 1}, mapping=lambda _: "bad//name")
        with one_error(MappingError, "topic=nothing", "gazctl journals apply"):
            publisher.publish({"number": 1}, mapping=mapping.random("topic=nothing"))
        with one_error(MappingError, "returned 7"):
            publisher.publish({"number": 1}, mapping=lambda _: 7)

"""Connections of the driver: calls that are made again as a broker stops, and credentials."""

from pathlib import Path

import pytest

from gazette_sdk.errors import (
    CallCancelledError,
    DeadlineExceededError,
    GazetteError,
    NoJournalPrimaryBrokerError,
    UnavailableError,
)
from gazette_sdk.transport.fragment_store import FragmentStoreTransport
from gazette_sdk.transport.wire import ANYWHERE
from gazette_spark import options, planning
from gazette_spark import stream as following
from gazette_spark.source import GazetteBatchReader
from support.spark_stores import N, Stream, options_of, store_history
from support.written_messages import History


class Failing(FragmentStoreTransport):
    """Transport whose first calls fail."""

    list_failures: tuple[GazetteError, ...] = ()
    fragments_failures: tuple[GazetteError, ...] = ()

    async def list(self, request):
        if self.list_failures:
            failure, *self.list_failures = self.list_failures
            raise failure
        async for response in super().list(request):
            yield response

    async def list_fragments(self, request, target=ANYWHERE):
        if self.fragments_failures:
            failure, *self.fragments_failures = self.fragments_failures
            raise failure
        return await super().list_fragments(request, target)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> type[Failing]:
    for module in (planning, following):
        monkeypatch.setattr(module, "open_transport", Failing)
    cancelled, late = CallCancelledError("it stops"), DeadlineExceededError("it is late")
    monkeypatch.setattr(Failing, "list_failures", (cancelled, late))
    monkeypatch.setattr(
        Failing,
        "fragments_failures",
        (cancelled, late, NoJournalPrimaryBrokerError("it moves"), UnavailableError("it is gone")),
    )
    return Failing


@pytest.fixture
def store(tmp_path: Path) -> Path:
    history = History("a/part")
    history.outside(1)
    store_history(tmp_path, history, [1])
    return tmp_path


def parts(store: Path) -> list:
    return GazetteBatchReader(options_of(store), N).partitions()


def test_a_batch_is_planned_though_a_broker_stops(store: Path, failing: type[Failing]):
    [task] = parts(store)
    assert [part.journal for part in task.ranges] == ["a/part"]


def test_a_stream_begins_though_a_broker_stops(store: Path, failing: type[Failing]):
    stream = Stream(store)
    assert [row["n"] for row in stream.rows()] == [0]
    stream.reader.stop()


def test_that_there_is_no_broker_is_told_at_once(
    store: Path, failing: type[Failing], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(failing, "list_failures", (UnavailableError("no broker"),) * 2)
    with pytest.raises(UnavailableError, match="no broker"):
        parts(store)
    stream = Stream(store)
    with pytest.raises(UnavailableError, match="no broker"):
        stream.plan()
    stream.reader.stop()


def test_credentials_go_to_brokers_however_the_scheme_is_written(monkeypatch: pytest.MonkeyPatch):
    given = {}
    monkeypatch.setenv("BROKER_AUTH_TOKEN", "token")
    monkeypatch.setattr(
        "gazette_sdk.transport.connect", lambda url, **options: given.update({url: options})
    )
    for url in ("http://a:1", "HTTPS://a:1"):
        options.open_transport(url)
        assert given[url]["auth_token"] == "token"
    options.open_transport("file:///")
    assert given["file:///"] == {}

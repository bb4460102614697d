"""Streams without a Spark session: offsets, ranges and rows of micro-batches over file stores."""

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable

from gazette_sdk.errors import ConfigurationError, GazetteError
from gazette_sdk.message.uuid import clock_of_unix_ns
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport import Transport, connect
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.fragment_store import FragmentStoreTransport
from gazette_sdk.transport.wire import ANYWHERE
from gazette_spark import stream as following
from support.fragment_files import fragment_of, store_fragment
from support.spark_stores import (
    Stream,
    batch_rows,
    random_history,
    random_stops,
    store_history,
)
from support.written_messages import History

pytestmark = pytest.mark.timeout(300)


def numbers(rows, journal: str) -> list[int]:
    return [row["n"] for row in rows if row["_journal"] == journal]


@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(seed=st.integers(0, 1 << 32), limit=st.integers(1, 4000), restarts=st.booleans())
def test_micro_batches_deliver_what_a_sequencer_delivers_once(
    tmp_path_factory: pytest.TempPathFactory, seed: int, limit: int, restarts: bool
):
    chance, root = random.Random(seed), tmp_path_factory.mktemp("store")
    histories = [random_history(chance, f"a/part-{i}", 60) for i in range(2)]
    for history in histories:
        length = len(history.messages)
        store_history(root, history, random_stops(chance, length, 8))
    stream = Stream(root, maxBytesPerTrigger=str(limit))
    rows = stream.rows(restarts=restarts)
    for history in histories:
        assert Counter(numbers(rows, history.journal)) == Counter(history.committed())
        batch = numbers(batch_rows(root), history.journal)
        assert batch == history.committed()


def test_an_uncommitted_stream_delivers_each_message_as_it_is_written(tmp_path: Path):
    history = random_history(random.Random(7), "a/part", 50)
    store_history(tmp_path, history, [10, 30, len(history.messages)])
    stream = Stream(tmp_path, isolation="uncommitted", maxBytesPerTrigger="1")
    batches = list(stream.micro_batches(restarts=True))
    assert [len(batch) for batch in batches] == [10, 20, len(history.messages) - 30]
    found = [row["n"] for batch in batches for row in batch]
    assert found == [message.item for message in history.messages]


def test_the_offset_stays_the_same_text_while_there_is_nothing_new(tmp_path: Path):
    history = random_history(random.Random(1), "a/part", 40)
    store_history(tmp_path, history, [len(history.messages)])
    stream = Stream(tmp_path)
    assert stream.rows()
    assert stream.plan() is None
    stream.restart()
    assert stream.plan() is None
    position = json.loads(stream.offset)["journals"]["a/part"]
    assert position["next"] == len(history.content)


def opened_by(make: Callable[..., Transport], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Followers have transports whose listings are renewed at once; they are closed in the end."""
    opened: list[Transport] = []

    def open_prompt(url: str) -> Transport:
        opened.append(make(url, refresh_interval_s=0.05))
        return opened[-1]

    monkeypatch.setattr(following, "open_transport", open_prompt)
    yield
    for transport in opened:
        sdk_loop.run(transport.aclose())


@pytest.fixture
def prompt(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from opened_by(connect, monkeypatch)


def test_a_query_with_available_now_ends_at_the_heads_that_it_found_first(
    tmp_path: Path, prompt: None
):
    history, other = History("a/one"), History("a/two")
    for _ in range(20):
        history.outside(1)
        other.outside(1)
    store_history(tmp_path, history, [5, 10])
    stream = Stream(tmp_path, maxBytesPerTrigger="1")
    stream.reader.prepareForTriggerAvailableNow()
    batches = stream.micro_batches()
    assert numbers(next(batches), "a/one") == list(range(5))
    store_history(tmp_path, history, [5, 10, 20])
    store_history(tmp_path, other, [20])
    assert [row["n"] for batch in batches for row in batch] == list(range(5, 10))
    stream.restart()
    rows = stream.rows()
    assert numbers(rows, "a/one") == list(range(10, 20))
    assert numbers(rows, "a/two") == list(range(20))


def test_journals_that_appear_later_are_read_from_their_begin(tmp_path: Path, prompt: None):
    histories = [History(f"a/{name}") for name in ("one", "two")]
    for history in histories:
        for _ in range(10):
            history.outside(1)
    store_history(tmp_path, histories[0], [10])
    stream = Stream(tmp_path)
    assert numbers(stream.rows(), "a/one") == list(range(10))
    store_history(tmp_path, histories[1], [10])
    deadline = time.monotonic() + 60
    while (planned := stream.plan()) is None:
        assert time.monotonic() < deadline
    assert numbers(stream.rows_between(*planned), "a/two") == list(range(10))


def test_that_no_journal_matches_is_told_once(
    tmp_path: Path, prompt: None, caplog: pytest.LogCaptureFixture
):
    stream = Stream(tmp_path)
    for _ in range(2):
        assert stream.plan() is None
        stream.reader.prepareForTriggerAvailableNow()
    [record] = caplog.records
    assert record.message.startswith(f"no journal matches 'a/' at {tmp_path.as_uri()}; ")
    stream.reader.stop()


# ------------------------------------------------------------------ data loss


def stream_behind_ten(root: Path, **options: str) -> tuple[Stream, History]:
    """A stream that has read the first ten of thirty messages, of which ten are a fragment."""
    history = History("a/part")
    for _ in range(30):
        history.outside(1)
    store_history(root, history, [10, 20, 30])
    stream = Stream(root, maxBytesPerTrigger="1", **options)
    assert len(stream.next_rows()) == 10
    stream.restart()
    return stream, history


def remove_fragments(root: Path, count: int) -> None:
    for file in sorted((root / "a/part").iterdir())[:count]:
        file.unlink()


@pytest.mark.parametrize("isolation", ["committed", "uncommitted"])
def test_a_stream_fails_if_content_was_removed_before_it_was_read(tmp_path: Path, isolation: str):
    stream, history = stream_behind_ten(tmp_path, isolation=isolation)
    remove_fragments(tmp_path, 2)
    first, available = history.messages[10].begin, history.messages[20].begin
    with pytest.raises(
        GazetteError,
        match=f"^a/part: content from offset {first} to {available} was removed .*failOnDataLoss"
        ".*checkpointLocation begins anew; keep fragments for longer$",
    ):
        stream.plan()


@pytest.mark.parametrize("isolation", ["committed", "uncommitted"])
def test_without_fail_on_data_loss_a_stream_goes_on_with_what_there_is(
    tmp_path: Path, isolation: str
):
    stream, _ = stream_behind_ten(tmp_path, isolation=isolation, failOnDataLoss="false")
    remove_fragments(tmp_path, 2)
    assert numbers(stream.rows(restarts=True), "a/part") == list(range(20, 30))


@pytest.mark.parametrize("fails", ["true", "false"])
def test_a_journal_that_ends_before_what_was_read_is_another_one(
    tmp_path: Path, fails: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(following, "HEAD_LAG_MAX_S", 0)
    stream, _ = stream_behind_ten(tmp_path, failOnDataLoss=fails)
    remove_fragments(tmp_path, 3)
    other = History("a/part")
    for _ in range(3):
        other.outside(2)
    store_history(tmp_path, other, [3])
    if fails == "true":
        with pytest.raises(GazetteError, match="a/part: the journal ends at offset"):
            stream.plan()
    else:
        assert numbers(stream.rows(), "a/part") == [0, 1, 2]


@pytest.mark.parametrize("fails", ["true", "false"])
def test_a_transaction_whose_begin_was_removed_is_a_loss(tmp_path: Path, fails: str):
    history = History("a/part")
    for _ in range(10):
        history.pending(1)
    history.outside(2)
    history.ack(1)
    history.outside(2)
    store_history(tmp_path, history, [5, 11, 13])
    stream = Stream(tmp_path, maxBytesPerTrigger="1", failOnDataLoss=fails)
    for expected in ([], [10]):
        assert numbers(stream.next_rows(), "a/part") == expected
    stream.restart()
    remove_fragments(tmp_path, 1)
    if fails == "true":
        with pytest.raises(GazetteError, match="content from offset 0 to"):
            stream.plan()
    else:
        assert numbers(stream.rows(), "a/part") == [5, 6, 7, 8, 9, 12]


def test_a_transaction_that_is_open_for_a_day_may_lose_its_begin(tmp_path: Path):
    history = History("a/part")
    for _ in range(10):
        history.pending(1)
    history.outside(2, at=86_400 * 1_000_000 + 100)
    history.outside(2)
    history.pending(3)
    history.ack(3)
    store_history(tmp_path, history, [5, 11, 14])
    stream = Stream(tmp_path, maxBytesPerTrigger="1")
    for expected in ([], [10]):
        assert numbers(stream.next_rows(), "a/part") == expected
    stream.restart()
    remove_fragments(tmp_path, 1)
    assert numbers(stream.rows(restarts=True), "a/part") == [11, 12]


def test_a_message_of_next_year_loses_no_transaction(tmp_path: Path):
    history, now = History("a/part"), clock_of_unix_ns(time.time_ns()) // 160
    history.pending(1, at=now)
    history.outside(2, at=now)
    history.outside(3, at=now + 400 * 86_400 * 1_000_000)
    history.again(1, 2)
    history.ack(1)
    store_history(tmp_path, history, range(1, 6))
    rows = Stream(tmp_path, maxBytesPerTrigger="1").rows(restarts=True)
    assert numbers(rows, "a/part") == [1, 2, 0]


def remove_fragment(root: Path, at: int) -> None:
    """Remove one fragment; the others are so old that readers do not wait for it."""
    files = sorted((root / "a/part").iterdir())
    files.pop(at).unlink()
    for file in files:
        os.utime(file, (time.time() - 7 * 3600,) * 2)


@pytest.mark.parametrize("isolation", ["committed", "uncommitted"])
@pytest.mark.parametrize("fails", ["true", "false"])
def test_a_gap_in_what_was_not_read_is_a_loss(tmp_path: Path, isolation: str, fails: str):
    stream, history = stream_behind_ten(tmp_path, isolation=isolation, failOnDataLoss=fails)
    remove_fragment(tmp_path, 1)
    if fails == "true":
        first, last = history.messages[10].begin, history.messages[20].begin
        with pytest.raises(
            GazetteError,
            match=f"a/part: content from offset {first} to {last} was removed .*failOnDataLoss",
        ):
            stream.plan()
    else:
        assert numbers(stream.rows(restarts=True), "a/part") == list(range(20, 30))


@pytest.mark.parametrize("isolation", ["committed", "uncommitted"])
@pytest.mark.parametrize("fails", ["true", "false"])
@pytest.mark.parametrize("at", [1, 2])
def test_content_that_is_gone_as_a_micro_batch_is_run_again_is_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolation: str, fails: str, at: int
):
    monkeypatch.setattr(following, "HEAD_LAG_MAX_S", 0)
    stream, history = stream_behind_ten(tmp_path, isolation=isolation, failOnDataLoss=fails)
    ends = ReadAllAvailable()
    behind = json.dumps(stream.reader.latestOffset(json.loads(stream.offset), ends))
    stream.restart()
    remove_fragment(tmp_path, at)
    if fails == "true":
        gone = history.messages[at * 10].begin
        with pytest.raises(GazetteError, match=f"a/part: .* offset {gone}.*fail"):
            stream.rows_between(stream.offset, behind)
    else:
        rows = stream.rows_between(stream.offset, behind)
        left = range(20, 30) if at == 1 else range(10, 20)
        assert numbers(rows, "a/part") == list(left)


def test_a_journal_whose_begin_is_not_written_yet_is_read_once_it_is(tmp_path: Path, prompt: None):
    history = History("a/part")
    for _ in range(30):
        history.outside(1)
    store_history(tmp_path, history, [10])
    begin = history.messages[20].begin
    stream = Stream(tmp_path, begin=json.dumps({"a/part": begin}))
    assert stream.rows() == []
    store_history(tmp_path, history, [10, 20, 30])
    time.sleep(0.1)
    assert numbers(stream.rows(), "a/part") == list(range(20, 30))


class BrokersListing(FragmentStoreTransport):
    """Fragments of a store as brokers list them: also of journals without any, with revisions."""

    created = 7
    wanted = "a/part"

    def _listing(self, specs):
        listing = super()._listing(specs or [self._spec(self.wanted, pb.NONE)])
        for journal in listing.journals:
            journal.create_revision = self.created
        return listing

    async def list_fragments(self, request, target=ANYWHERE):
        response = await super().list_fragments(request, target)
        if response.status == pb.JOURNAL_NOT_FOUND:
            return pb.FragmentsResponse(status=pb.OK, header=self._header())
        return response


@pytest.fixture
def brokers(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[BrokersListing]]:
    monkeypatch.setattr(BrokersListing, "created", 7)
    for _ in opened_by(BrokersListing, monkeypatch):
        yield BrokersListing


def test_an_idle_journal_whose_content_was_read_and_removed_is_no_loss(
    tmp_path: Path, brokers: type[BrokersListing]
):
    stream, history = stream_behind_ten(tmp_path)
    assert numbers(stream.rows(), "a/part") == list(range(10, 30))
    remove_fragments(tmp_path, 3)
    for _ in range(2):
        stream.restart()
        assert stream.plan() is None
    later = Stream(tmp_path)
    assert later.plan() is None
    for _ in range(10):
        history.outside(1)
    store_history(tmp_path, history, [30, 40])
    remove_fragments(tmp_path, 1)
    for each in (stream, later):
        each.restart()
        assert numbers(each.rows(restarts=True), "a/part") == list(range(30, 40))


def test_a_journal_that_was_created_anew_is_read_once_over_restarts(
    tmp_path: Path, brokers: type[BrokersListing]
):
    stream, _ = stream_behind_ten(tmp_path, failOnDataLoss="false")
    remove_fragments(tmp_path, 3)
    other = History("a/part")
    for _ in range(25):
        other.outside(2)
    store_history(tmp_path, other, [5, 25])
    brokers.created = 8
    assert numbers(stream.rows(restarts=True), "a/part") == list(range(25))


def test_a_micro_batch_of_a_journal_that_was_created_anew_since_reads_nothing_of_it(
    tmp_path: Path, brokers: type[BrokersListing]
):
    stream, history = stream_behind_ten(tmp_path, failOnDataLoss="false")
    planned = stream.plan()
    assert planned is not None
    stream.restart()
    brokers.created = 8
    assert stream.rows_between(*planned) == []
    stream.offset = planned[1]
    assert numbers(stream.rows(), "a/part") == list(range(len(history.messages)))


def test_a_journal_that_lost_its_end_is_read_on_from_there(
    tmp_path: Path, brokers: type[BrokersListing], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(following, "HEAD_LAG_MAX_S", 0)
    stream, history = stream_behind_ten(tmp_path, failOnDataLoss="false")
    assert numbers(stream.rows(), "a/part") == list(range(10, 30))
    remove_fragment(tmp_path, 2)
    stream.restart()
    assert stream.rows(restarts=True) == []
    for _ in range(5):
        history.outside(1)
    again = bytes(history.content[history.messages[30].begin :])
    begin = history.messages[20].begin
    store_fragment(tmp_path, fragment_of("a/part", begin, again), again)
    stream.restart()
    assert numbers(stream.rows(restarts=True), "a/part") == list(range(30, 35))


def test_a_head_that_lags_behind_what_was_read_is_waited_for_with_an_open_transaction(
    tmp_path: Path, brokers: type[BrokersListing], monkeypatch: pytest.MonkeyPatch
):
    history = History("a/part")
    history.pending(1)
    for _ in range(20):
        history.outside(2)
    history.ack(1)
    store_history(tmp_path, history, [10, 21, 22])
    stream = Stream(tmp_path, maxBytesPerTrigger="1")
    assert numbers(stream.next_rows() + stream.next_rows(), "a/part") == list(range(1, 21))
    contents = {file: file.read_bytes() for file in sorted((tmp_path / "a/part").iterdir())[1:]}
    for file in contents:
        file.unlink()

    async def pause(attempt: int) -> None:
        for file, content in contents.items():
            file.write_bytes(content)
        await asyncio.sleep(0.05)  # until the listing is renewed

    monkeypatch.setattr(following, "pause", pause)
    stream.restart()
    assert numbers(stream.rows(), "a/part") == [0]


# ----------------------------------------------------------------- refused


def test_a_checkpoint_of_another_isolation_or_version_is_refused(tmp_path: Path):
    history = random_history(random.Random(1), "a/part", 10)
    store_history(tmp_path, history, [len(history.messages)])
    other = Stream(tmp_path, isolation="uncommitted")
    stream = Stream(tmp_path)
    stream.offset = other.offset
    with pytest.raises(ConfigurationError, match="written with isolation=uncommitted"):
        stream.plan()
    stream.offset = stream.offset.replace('"version": 1', '"version": 9')
    with pytest.raises(ConfigurationError, match="offsets of version 9"):
        stream.plan()


def test_a_stream_has_no_end(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="a stream has no end"):
        Stream(tmp_path, end="2026-01-01T00:00:00Z")

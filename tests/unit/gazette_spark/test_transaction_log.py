"""The transaction log under crashes, rivals, lost answers and appends that come late."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import pytest

from gazette_sdk.errors import CallError, GazetteError, JournalNotFoundError, UnavailableError
from gazette_sdk.message import AckIntents
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.loop import on_sdk_loop, run
from gazette_spark import transaction_log
from gazette_spark.transaction_log import (
    Commit,
    Fate,
    TransactionLog,
    WriterKind,
    fate_of,
    intents_text,
    line_of,
)
from support.memory_transport import MemoryTransport

LOG = "gazette-spark/transactions/a-query"
WAIT_S = 60.0


class CrashError(BaseException):
    """The driver's process dies here."""


class Chaos(MemoryTransport):
    """A cluster whose calls are delayed, end in crashes of their callers, or lose answers.

    An append that did not come back may be written later, when its caller is long dead.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.late: list[asyncio.Task] = []
        self.is_quiet = False

    async def delay(self) -> None:
        for _ in range(self.random.randrange(4)):
            await asyncio.sleep(0)

    async def append(self, requests, target=None):
        items = [item async for item in requests]
        await self.delay()
        chance = 1.0 if self.is_quiet else self.random.random()
        if chance < 0.05:
            raise CrashError
        if chance < 0.20:
            self.late.append(asyncio.create_task(self.append_late(items)))
            raise self.random.choice([CrashError, UnavailableError("lost")])
        response = await super().append(again(items))
        if chance < 0.35:
            raise self.random.choice([CrashError, UnavailableError("lost")])
        await self.delay()
        return response

    async def append_late(self, items) -> None:
        for _ in range(self.random.randrange(200)):
            await asyncio.sleep(0)
        await super().append(again(items))

    async def read(self, request, target=None):
        await self.delay()
        async for item in super().read(request):
            yield item


async def again(items):
    for item in items:
        yield item


def acks(transport: MemoryTransport, journal: str = "a/target") -> list[str]:
    return [json.loads(line)["ack"] for line in transport.content_of(journal).splitlines()]


def lines(transport: MemoryTransport) -> list[dict]:
    return [json.loads(line) for line in transport.content_of(LOG).splitlines()]


def intents_of_job(job: str, *journals: str) -> str:
    frame = b'{"ack":"%s"}\n' % job.encode()
    return intents_text(AckIntents(dict.fromkeys(journals or ["a/target"], frame)))


async def commit(transport, kind, number, job) -> bool:
    """Commit as a driver that may die; True if it was told that all is well."""
    log = TransactionLog(transport, LOG, "topic=target")
    try:
        is_repeated = await has_reached(log, number)
        await transport.delay()  # tasks
        commit = Commit(kind, number, job, is_repeated=is_repeated)
        await log.commit(commit, [intents_of_job(job)], 1)
    except CrashError:
        return False
    except GazetteError as error:
        check_is_beaten(transport, job, str(error))
        return False
    if number is not None and not is_repeated:
        check_is_winner(transport, job, number)
    return True


def check_is_beaten(transport, job: str, error: str) -> None:
    assert "another driver has written" in error
    assert not any(line.get("job") == job for line in lines(transport))


def check_is_winner(transport, job: str, number: int) -> None:
    jobs = [line["job"] for line in lines(transport) if line.get("decided") == number]
    assert jobs == [job]


async def has_reached(log: TransactionLog, number: int | None) -> bool:
    """Look at the log as a task does when it begins."""
    try:
        return (await log.read()).has_reached(number)
    except JournalNotFoundError:
        return False


@pytest.fixture(autouse=True)
def _pauses_are_turns(monkeypatch):
    turns = random.Random(1)

    async def pause(_attempt: int) -> None:
        for _ in range(turns.randrange(60)):
            await asyncio.sleep(0)

    monkeypatch.setattr(transaction_log, "pause_append", pause)
    monkeypatch.setattr(transaction_log, "pause", pause)


@pytest.fixture
def _short_window(monkeypatch):
    monkeypatch.setattr(transaction_log, "WINDOW_BYTES", 32)


def check(transport: Chaos) -> dict[int, str]:
    """Return the job of each number: one only, acknowledged, and once if its end was clean."""
    records = Counter(line["decided"] for line in lines(transport) if "decided" in line)
    assert set(records.values()) == {1}
    jobs = {line["decided"]: line["job"] for line in lines(transport) if "decided" in line}
    assert list(jobs) == sorted(jobs)
    counts = Counter(acks(transport))
    assert set(counts) == set(jobs.values())
    done = [line for line in lines(transport) if "done" in line]
    assert [line["done"] for line in done] == list(jobs)
    for line in done:
        if line["clean"]:
            assert counts[jobs[line["done"]]] == 1
    return jobs


@pytest.mark.usefixtures("_short_window")
@pytest.mark.parametrize("seeds", [range(n, n + 50) for n in range(0, 100, 50)], ids=str)
def test_of_rival_drivers_that_die_anywhere_one_decides_each_micro_batch(seeds: range):
    cleans = 0

    async def run_query(seed: int) -> None:
        nonlocal cleans
        transport = Chaos(seed)
        transport.create("a/target", topic="target")
        for number in range(4):
            attempt, is_committed = 0, False
            while not is_committed:
                transport.is_quiet = attempt > 20
                rivals = transport.random.choice([1, 1, 2, 3])
                outcomes = await asyncio.gather(
                    *(
                        commit(transport, WriterKind.STREAM, number, f"{number}-{attempt}-{rival}")
                        for rival in range(rivals)
                    )
                )
                is_committed = any(outcomes)
                attempt += 1
        await asyncio.gather(*transport.late)
        assert list(check(transport)) == [0, 1, 2, 3]
        cleans += sum(line.get("clean", False) for line in lines(transport))

    for seed in seeds:
        run(on_sdk_loop(run_query(seed)), WAIT_S)
    assert cleans > len(seeds)  # most transactions end clean in spite of all


@pytest.mark.usefixtures("_short_window")
@pytest.mark.parametrize("seeds", [range(n, n + 50) for n in range(0, 100, 50)], ids=str)
def test_of_unnamed_jobs_at_the_same_time_each_that_ends_well_is_written_once(seeds: range):
    async def run_jobs(seed: int) -> None:
        transport = Chaos(seed)
        transport.create("a/target", topic="target")
        jobs = [f"job {number}" for number in range(5)]
        ended = await asyncio.gather(
            *(commit(transport, WriterKind.UNNAMED, None, job) for job in jobs)
        )
        transport.is_quiet = True
        assert await commit(transport, WriterKind.UNNAMED, None, "last")
        await asyncio.gather(*transport.late)
        # What was decided late, by a dead driver, is completed by whoever comes next.
        assert await commit(transport, WriterKind.UNNAMED, None, "very last")
        written = check(transport).values()
        for job, well in zip(jobs, ended, strict=True):
            assert not well or job in written

    for seed in seeds:
        run(on_sdk_loop(run_jobs(seed)), WAIT_S)


# ----------------------------------------------------------------- single cases


@pytest.fixture
def transport() -> MemoryTransport:
    made = MemoryTransport()
    made.create("a/target", topic="target")
    return made


@pytest.fixture
def log(transport: MemoryTransport) -> TransactionLog:
    return TransactionLog(transport, LOG, "topic=target")


def work(coroutine):
    return run(on_sdk_loop(coroutine), WAIT_S)


def stream(number: int, job: str = "own", *, is_repeated: bool = False) -> Commit:
    return Commit(WriterKind.STREAM, number, job, is_repeated=is_repeated)


def test_the_log_is_created_like_the_journals_that_are_written(transport, log):
    transport.journals["a/target"].spec.fragment.stores.append("file:///there/")
    work(log.commit(stream(0), [intents_of_job("own")], 7))
    spec = transport.journals[LOG].spec
    assert spec.replication == 1
    assert list(spec.fragment.stores) == ["file:///there/"]
    assert not spec.fragment.HasField("retention")
    assert "app.gazette.dev/managed-by" in {label.name for label in spec.labels.labels}
    assert lines(transport) == [
        {"log": 1},
        {"decided": 0, "job": "own", "intents": [intents_of_job("own")], "rows": 7},
        {"done": 0, "clean": True},
    ]


def test_acknowledgements_of_a_journal_are_written_at_once(transport, log):
    transport.create("b/target", topic="target")
    intents = [intents_of_job(job, "a/target", "b/target") for job in ("one", "two")]
    work(log.commit(stream(0), intents, 2))
    assert acks(transport) == acks(transport, "b/target") == ["one", "two"]
    targets = [journal for journal, content in transport.appends if "target" in journal]
    assert sorted(targets) == ["a/target", "b/target"]


def test_a_journal_that_was_deleted_is_passed_over_with_a_warning(transport, log, caplog):
    work(log.commit(stream(0), [intents_of_job("own", "a/target", "gone/journal")], 2))
    assert "gone/journal was deleted" in caplog.text
    assert acks(transport) == ["own"]
    assert lines(transport)[-1] == {"done": 0, "clean": True}


def test_a_broker_that_does_not_know_a_new_journal_yet_is_asked_again(transport, log, caplog):
    work(log.commit(stream(0), [], 0))
    # look, decide, look, acknowledge
    transport.append_faults = [None, None, None, pb.JOURNAL_NOT_FOUND]
    work(log.commit(stream(1), [intents_of_job("own")], 1))
    assert acks(transport) == ["own"]
    assert lines(transport)[-1] == {"done": 1, "clean": True}
    assert "was deleted" not in caplog.text


def test_an_acknowledgement_that_was_sent_twice_is_not_clean(transport, log):
    work(log.commit(stream(0), [], 0))
    # look, decide, look, acknowledge
    transport.append_faults = [None, None, None, "lost"]
    work(log.commit(stream(1), [intents_of_job("own")], 1))
    assert acks(transport) == ["own", "own"]
    assert lines(transport)[-1] == {"done": 1, "clean": False}


class Stopping(MemoryTransport):
    """A cluster whose brokers stop: they refuse some appends without a status."""

    refused = 0

    async def append(self, requests, target=None):
        if self.refused:
            self.refused -= 1
            raise CallError("this broker is stopping")
        return await super().append(requests)


def test_a_commit_waits_for_brokers_that_refuse_appends_without_a_status():
    transport = Stopping()
    transport.create("a/target", topic="target")
    log = TransactionLog(transport, LOG, "topic=target")
    work(log.commit(stream(0), [], 0))
    transport.refused = 3
    work(log.commit(stream(1), [intents_of_job("own")], 1))
    assert acks(transport) == ["own"]


@pytest.mark.parametrize("position", [1, 4])
def test_a_lost_answer_of_the_log_is_found_in_the_log(transport, log, position):
    work(log.commit(stream(0), [], 0))
    transport.append_faults = [*[None] * position, "lost"]
    work(log.commit(stream(1), [intents_of_job("own")], 1))
    assert acks(transport) == ["own"]
    assert [line for line in lines(transport) if "done" in line][-1]["clean"] is True


def test_what_cannot_be_acknowledged_stays_decided_and_is_completed_later(transport, log):
    work(log.commit(stream(0), [], 0))
    transport.append_faults = [None, None, None, pb.NOT_ALLOWED]
    with pytest.raises(GazetteError) as caught:
        work(log.commit(stream(1), [intents_of_job("own")], 1))
    assert "the next commit of its writer completes it" in caught.value.__notes__[0]
    assert work(log.complete()) == 1
    assert work(log.complete()) is None
    assert acks(transport) == ["own"]
    assert [json.dumps(line) for line in lines(transport)[-2:]] == [
        '{"completing": 1}',
        '{"done": 1, "clean": false}',
    ]


def test_a_missing_log_stops_a_query_until_it_is_created(transport, log):
    with pytest.raises(GazetteError, match=r"has no transaction, .*create a-query --after 6`"):
        work(log.commit(stream(7), [intents_of_job("own")], 1))
    assert acks(transport) == []
    work(log.create(6))
    work(log.commit(stream(7), [intents_of_job("own")], 1))
    assert acks(transport) == ["own"]
    with pytest.raises(GazetteError, match="has records, the last of transaction 7"):
        work(log.create(7))


def test_a_log_is_created_though_the_answer_is_lost(transport, log):
    # look: none, look, header, look, done
    transport.append_faults = [None, None, None, None, "lost"]
    work(log.create(6))
    assert lines(transport) == [{"log": 1}, {"done": 6, "clean": False}]
    work(log.create(6))
    with pytest.raises(GazetteError, match="has records, the last of transaction 6"):
        work(log.create(7))


def test_a_log_that_lost_its_end_stops_a_query(transport, log):
    work(log.commit(stream(0), [], 0))
    with pytest.raises(GazetteError, match="ends with 0, and the query is at micro-batch 2"):
        work(log.commit(stream(2), [], 0))


def test_a_driver_that_is_behind_is_told_of_the_other(transport, log):
    for number in (0, 1):
        work(log.commit(stream(number, f"other {number}"), [], 0))
    with pytest.raises(GazetteError, match="another driver"):
        work(log.commit(stream(0), [intents_of_job("own")], 1))
    assert acks(transport) == []


def test_a_driver_whose_micro_batch_another_has_written_meanwhile_is_told_so(transport, log):
    work(log.commit(stream(0, "other"), [intents_of_job("other")], 1))
    with pytest.raises(GazetteError, match="another driver has written micro-batch 0 at the same"):
        work(log.commit(stream(0), [intents_of_job("own")], 1))
    assert acks(transport) == ["other"]
    # Started again, its tasks begin when the log has the micro-batch.
    work(log.commit(stream(0, "again", is_repeated=True), [intents_of_job("again")], 1))
    assert acks(transport) == ["other"]


def test_a_job_whose_version_another_has_written_meanwhile_is_told_so(transport, log):
    work(log.commit(Commit(WriterKind.APPLICATION, 3, "other"), [intents_of_job("other")], 1))
    for version in (2, 3):
        own = Commit(WriterKind.APPLICATION, version, "own")
        with pytest.raises(GazetteError, match=f"while this one wrote {version}, of which no row"):
            work(log.commit(own, [intents_of_job("own")], 1))
    assert acks(transport) == ["other"]


def test_an_application_may_repeat_earlier_versions_and_invent_none(transport, log):
    for version in (3, 5):
        commit = Commit(WriterKind.APPLICATION, version, f"job {version}")
        work(log.commit(commit, [intents_of_job(f"version {version}")], 1))
    for version in (3, 5):
        commit = Commit(WriterKind.APPLICATION, version, "repeated", is_repeated=True)
        work(log.commit(commit, [intents_of_job("repeated")], 1))
    old = Commit(WriterKind.APPLICATION, 4, "old", is_repeated=True)
    with pytest.raises(GazetteError, match="txnVersion 4 was never written"):
        work(log.commit(old, [intents_of_job("old")], 1))
    assert acks(transport) == ["version 3", "version 5"]


def test_a_long_log_is_read_from_its_end(transport, log):
    work(log.commit(stream(0), [], 0))
    journal = transport.journals[LOG]
    for number in range(1, 400):
        journal.content += line_of(
            {"decided": number, "job": "j", "intents": ["x" * 900], "rows": 1}
        )
        journal.content += line_of({"done": number, "clean": True})
    journal.content += line_of(
        {"decided": 400, "job": "other", "intents": [intents_of_job("long")] * 4000, "rows": 1}
    )
    assert len(journal.content) > 4 * transaction_log.WINDOW_BYTES
    work(log.commit(stream(401), [intents_of_job("own")], 1))
    assert acks(transport) == ["long"] * 4000 + ["own"]
    tail = work(log.read(1))
    assert tail.begin == 0
    assert work(log.read()).begin > 0
    bounded = work(log.read(1, bytes_max=2 * transaction_log.WINDOW_BYTES))
    assert bounded.number == 401
    assert tail.head > bounded.begin > 0


def test_the_record_of_an_earlier_transaction_is_read_though_it_is_long(transport, log):
    work(log.commit(stream(0), [], 0))
    work(log.commit(stream(1), [intents_of_job("own")] * 4000, 1))
    assert len(transport.journals[LOG].content) > 2 * transaction_log.WINDOW_BYTES
    tail = work(log.read(1))
    assert fate_of(tail, 1, "", intents_of_job("own")) is Fate.ACKNOWLEDGED


def test_long_content_of_another_kind_is_refused_by_the_name_of_the_log(transport, log):
    work(log.commit(stream(0), [], 0))
    transport.journals[LOG].content += bytes(2 * transaction_log.WINDOW_BYTES)
    with pytest.raises(GazetteError, match="a-query has a line that is none of a transaction log"):
        work(log.commit(stream(1), [], 0))


def test_without_journals_to_write_no_log_is_created(log):
    log = TransactionLog(MemoryTransport(), LOG, "topic=none")
    with pytest.raises(JournalNotFoundError, match="no journal matches 'topic=none'"):
        work(log.commit(stream(0), [], 0))

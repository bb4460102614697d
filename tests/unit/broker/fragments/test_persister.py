from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import threading
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from gazette_sdk.broker.fragments import persister
from gazette_sdk.broker.fragments.persister import Persister
from gazette_sdk.broker.metrics import SPOOLS_COMPLETED, SPOOLS_PERSISTED
from gazette_sdk.broker.spool.directory import SpoolDirectory
from gazette_sdk.fragment.listing import StoredFragment
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.fragment.stores import FileStore, open_store
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import content_name
from gazette_sdk.protocol.labels import label_set
from gazette_sdk.protocol.names import parse_store_url
from gazette_sdk.testing.store_faults import StoreFaultInjector, StoreFaults
from support.spools import REVISION, SpoolUser, files_below, until
from support.vectors import cases

JOURNAL = "a/journal"
CONTENT = b"content of 12"
GOOD = "file:///good/"


class Setting:
    """A persister with file stores, and closed spools for it."""

    def __init__(self, tmp_path, *, opener=None, **options):
        self.root = tmp_path / "stores"
        (self.root / "good").mkdir(parents=True)
        self.directory = SpoolDirectory(tmp_path / "spools")
        self.stores = StoreRegistry(self.root, opener=opener)
        self.spec = pb.JournalSpec(name=JOURNAL)
        self.revision = REVISION
        self.spec.fragment.stores.append(GOOD)
        self.user = SpoolUser(self.directory)
        options = {"tick_s": 3600, "retry_s_min": 0.01, **options}
        self.persister = Persister(self.stores, self.lookup, **options)

    def lookup(self, journal):
        assert journal == JOURNAL
        entry = SimpleNamespace(value=self.spec, create_revision=self.revision)
        return entry if self.spec is not None else None

    async def spool(self, content=CONTENT, *, primary=True, codec=pb.NONE):
        """A closed spool, whose file nobody else holds."""
        await self.user.roll(codec=codec)
        await self.user.append(content, label_set(region="north"))
        await self.user.roll(primary=primary)
        return self.user.completed.pop()

    def stored(self):
        return files_below(self.root)

    async def settled(self):
        """Wait for the attempts under way."""
        await until(lambda: not self.persister._attempts)

    @contextlib.asynccontextmanager
    async def running(self):
        run = asyncio.create_task(self.persister.run())
        try:
            yield
        finally:
            run.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await run


def scenario(tmp_path, body, **options):
    async def run():
        setting = Setting(tmp_path, **options)
        try:
            await body(setting)
        finally:
            await setting.persister.aclose()
            await setting.stores.aclose()
            await asyncio.to_thread(setting.directory.close)

    asyncio.run(run())


@pytest.mark.parametrize("case", cases("broker", "persist_fallback"))
def test_fallback_to_later_stores(case, tmp_path):
    async def body(setting):
        del setting.spec.fragment.stores[:]
        for number, kind in enumerate(case["stores"]):
            setting.spec.fragment.stores.append(f"file:///{number}/")
            if kind == "ok":
                (setting.root / str(number)).mkdir()
        if case["exiting"]:
            setting.persister.set_exiting()
        done = await setting.spool(b"twelve bytes")
        setting.persister.complete(done)
        await setting.settled()
        if case["expect"].startswith("stored"):
            [name] = setting.stored()
            assert name.startswith("2/a/journal/")
            assert setting.persister.pending == 0
            await until(lambda: not done.file.path.exists())
        else:
            assert setting.stored() == []
            assert done.file.path.exists(), "the only copy is not removed"
            assert setting.persister.pending == (1 if case["stores"] else 0)

    scenario(tmp_path, body)


PERSISTER_CASES = [case.values[0]["case"] for case in cases("broker", "persister")]


def test_all_vectors_have_a_test():
    assert PERSISTER_CASES == [
        "non-primary completion without content",
        "non-primary completion with content",
        "journal spec gone",
        "attempt fails",
    ]


def test_a_completion_without_content_is_ignored(tmp_path):
    async def body(setting):
        done = await setting.spool(primary=False)
        empty = type(done)(
            pb.Fragment(journal=JOURNAL, begin=9, end=9), done.registers, done.first_append_time,
            done.file, REVISION, primary=False,
        )  # fmt: skip
        setting.persister.complete(empty)
        assert setting.persister.pending == 0

    scenario(tmp_path, body)


def test_a_replica_waits_for_three_ticks_and_uploads_what_is_not_stored(tmp_path):
    async def body(setting):
        done = await setting.spool(primary=False)
        setting.persister.complete(done)
        for _ in range(2):
            setting.persister._rotate()
            await setting.settled()
            assert setting.stored() == []
        assert setting.persister.pending == 1
        setting.persister._rotate()
        await setting.settled()
        assert len(setting.stored()) == 1
        assert setting.persister.pending == 0

    scenario(tmp_path, body)


def test_ticks_come_by_themselves(tmp_path):
    async def body(setting):
        async with setting.running():
            setting.persister.complete(await setting.spool(primary=False))
            await until(setting.stored)

    scenario(tmp_path, body, tick_s=0.01)


def test_a_replica_that_finds_the_fragment_does_not_upload_it_again(tmp_path):
    async def body(setting):
        done = await setting.spool(primary=False, codec=pb.GZIP)
        path = setting.root / "good" / "a" / "journal" / content_name(done.fragment)
        path.parent.mkdir(parents=True)
        stored = gzip.compress(CONTENT, mtime=7)  # by the primary, in batches of its own
        path.write_bytes(stored)
        setting.persister.complete(done)
        for _ in range(3):
            setting.persister._rotate()
        await setting.settled()
        assert path.read_bytes() == stored
        await until(lambda: not done.file.path.exists())

    scenario(tmp_path, body)


def test_a_replica_checks_at_once_what_a_listing_shows(tmp_path):
    async def body(setting):
        done, kept = [await setting.spool(primary=False) for _ in range(2)]
        path = setting.root / "good" / "a" / "journal" / content_name(done.fragment)
        path.parent.mkdir(parents=True)
        path.write_bytes(CONTENT)
        for spool in (done, kept):
            setting.persister.complete(spool)
        setting.persister._rotate()
        other = pb.Fragment()
        other.CopyFrom(kept.fragment)
        other.sum.part1 += 1
        longer = pb.Fragment(journal=JOURNAL, end=done.fragment.end + 1)  # it has all of `done`
        whole = StoredFragment(done.fragment, len(CONTENT))
        torn = StoredFragment(kept.fragment, 3)
        setting.persister.check_listed("another/journal", [whole])
        assert setting.persister.pending == 2
        others = [StoredFragment(longer, -1), StoredFragment(other, -1), torn]
        setting.persister.check_listed(JOURNAL, [whole, *others])
        await setting.settled()
        await until(lambda: not done.file.path.exists())
        assert kept.file.path.exists()
        assert setting.persister.pending == 1
        assert len(setting.stored()) == 1

    scenario(tmp_path, body)


def place_of(setting, spool):
    """The file of a spool's fragment in the good store; its directory is made."""
    path = setting.root / "good" / "a" / "journal" / content_name(spool.fragment)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@pytest.mark.parametrize("codec", [pb.NONE, pb.GZIP])
@pytest.mark.parametrize(
    "found",
    [b"", CONTENT[:5], b"CONTENT OF 12", gzip.compress(b"other")],
    ids=["empty", "torn", "other", "other compressed"],
)
def test_an_object_with_other_content_is_replaced(found, codec, tmp_path, caplog):
    async def body(setting):
        done = await setting.spool(codec=codec)
        path = place_of(setting, done)
        path.write_bytes(found)
        setting.persister.complete(done)
        await setting.settled()
        stored = path.read_bytes()
        assert (stored if codec == pb.NONE else gzip.decompress(stored)) == CONTENT
        await until(lambda: not done.file.path.exists())
        assert f"other content ({len(found)} bytes)" in caplog.text

    scenario(tmp_path, body)


@pytest.mark.parametrize("fault", ["torn_uploads", "empty_uploads"])
def test_a_store_that_reports_success_for_a_part_is_not_believed(fault, tmp_path):
    faults = StoreFaultInjector(StoreFaults(**{fault: 1.0}), seed=3)

    def opener(url):
        return faults.wrap(open_store(url, file_root=tmp_path / "stores"))

    async def body(setting):
        done = await setting.spool()
        path = place_of(setting, done)
        setting.persister.complete(done)
        await setting.settled()
        assert len(path.read_bytes()) < len(CONTENT)
        assert done.file.path.exists(), "the only copy is not removed"
        assert setting.persister.pending == 1
        faults.heal()
        async with setting.running():
            await until(lambda: setting.persister.pending == 0)
        assert path.read_bytes() == CONTENT

    scenario(tmp_path, body, opener=opener)


def test_what_cannot_be_verified_stays_until_a_listing_shows_its_length(tmp_path):
    class Unverifiable(FileStore):
        asked = 0

        def _status_of(self, key):
            self.asked += 1
            if self.asked > 1:  # of an object that is there
                raise PermissionError("no")

    def opener(url):
        return Unverifiable(parse_store_url(url), tmp_path / "stores")

    async def body(setting):
        done = await setting.spool()
        setting.persister.complete(done)
        await setting.settled()
        assert place_of(setting, done).read_bytes() == CONTENT
        assert done.file.path.exists()
        assert setting.persister.pending == 1
        for length in (-1, 3):
            setting.persister.check_listed(JOURNAL, [StoredFragment(done.fragment, length)])
            assert setting.persister.pending == 1
        setting.persister.check_listed(JOURNAL, [StoredFragment(done.fragment, len(CONTENT))])
        assert setting.persister.pending == 0
        await until(lambda: not done.file.path.exists())

    scenario(tmp_path, body, opener=opener)


@pytest.mark.parametrize("has_sum", [True, False])
def test_large_uploads_are_not_read_back_and_objects_of_others_only_without_a_sum(
    has_sum, tmp_path, monkeypatch
):
    monkeypatch.setattr(persister, "_READ_BACK_BYTES_MAX", len(CONTENT) - 1)
    opened = []

    class Summing(FileStore):
        def _status_of(self, key):
            found = super()._status_of(key)
            if found is None or not has_sum:
                return found
            return replace(found, md5=hashlib.md5(self._path(key).read_bytes()).digest())

        def _open(self, key):
            opened.append(key)
            return super()._open(key)

    async def body(setting):
        done = await setting.spool()
        setting.persister.complete(done)
        await setting.settled()
        assert opened == []
        other = await setting.spool()
        place_of(setting, other).write_bytes(CONTENT)
        setting.persister.complete(other)
        await setting.settled()
        assert setting.persister.pending == 0
        assert len(opened) == (0 if has_sum else 1)

    scenario(
        tmp_path,
        body,
        opener=lambda url: Summing(parse_store_url(url), tmp_path / "stores"),
    )


def test_spools_that_are_not_stored_yet_are_known(tmp_path):
    def backlog():
        """Backlog as the metrics show it."""
        return SPOOLS_COMPLETED.value - SPOOLS_PERSISTED._value.get()

    async def body(setting):
        persister = setting.persister
        before = backlog()
        queued, failed, without_store, uploading, stored = [
            await setting.spool(primary=number > 0) for number in range(5)
        ]
        persister.complete(queued)
        (setting.root / "good").rmdir()
        (setting.root / "good").touch()  # the store fails
        persister.complete(failed)
        await setting.settled()
        (setting.root / "good").unlink()
        setting.spec.fragment.stores.clear()
        persister.complete(without_store)
        await setting.settled()
        setting.spec.fragment.stores.append(GOOD)
        (setting.root / "good").mkdir()
        persister.complete(uploading)
        found = persister.unstored(JOURNAL, REVISION)
        assert found == [queued, failed, without_store, uploading]
        assert backlog() == before + len(found)
        assert persister.unstored(JOURNAL, REVISION + 1) == []
        assert persister.unstored("another/journal", REVISION) == []
        persister.complete(stored)
        await setting.settled()
        assert persister.unstored(JOURNAL, REVISION) == [queued, without_store]
        assert backlog() == before + 2
        setting.spec = None  # the journal is deleted
        for _ in range(3):
            persister._rotate()
        await setting.settled()
        assert persister.unstored(JOURNAL, REVISION) == []
        assert backlog() == before

    scenario(tmp_path, body)


def test_what_is_stored_is_told(tmp_path):
    told = []

    async def body(setting):
        done = await setting.spool()
        setting.persister.complete(done)
        await setting.settled()
        assert told == [done]

    scenario(tmp_path, body, stored=told.append)


@pytest.mark.parametrize("how", ["deleted", "created again"])
def test_spools_of_a_deleted_journal_are_dropped(how, tmp_path):
    async def body(setting):
        done = await setting.spool()
        if how == "deleted":
            setting.spec = None
        else:
            setting.revision += 1
        setting.persister.complete(done)
        await setting.settled()
        assert (setting.stored(), setting.persister.pending) == ([], 0)
        await until(lambda: not done.file.path.exists())

    scenario(tmp_path, body)


def test_a_failed_attempt_uses_the_stores_of_its_time_when_tried_again(tmp_path):
    async def body(setting):
        setting.spec.fragment.stores[:] = ["file:///missing/"]
        setting.persister.complete(await setting.spool())
        async with setting.running():
            await until(lambda: setting.persister._backlogs and setting.persister.pending == 1)
            setting.spec.fragment.stores[:] = [GOOD]
            await until(setting.stored)

    scenario(tmp_path, body)


def test_when_a_store_recovers_its_whole_backlog_goes_out(tmp_path):
    async def body(setting):
        setting.spec.fragment.stores[:] = ["file:///later/"]
        spools = [await setting.spool(b"fragment %d" % number) for number in range(50)]
        for done in spools:
            setting.persister.complete(done)
        async with setting.running():
            await until(lambda: len(setting.persister._backlogs) == 1)
            [backlog] = setting.persister._backlogs.values()
            await until(lambda: len(backlog.spools) == 50)
            await until(lambda: backlog.failures >= 3)
            assert backlog.failures < 10, "only probes make pauses longer"
            await until(lambda: setting.persister.pending == 50)
            (setting.root / "later").mkdir()
            await until(lambda: setting.persister.pending == 0)
        assert len(setting.stored()) == 50
        await until(lambda: not any(done.file.path.exists() for done in spools))

    scenario(tmp_path, body)


def test_content_that_changed_on_disk_is_never_uploaded(tmp_path, caplog):
    async def body(setting):
        for codec in (pb.NONE, pb.GZIP):
            done = await setting.spool(b"precious", codec=codec)
            done.file.path.write_bytes(b"precioux")
            setting.persister.complete(done)
            await setting.settled()
            assert setting.stored() == []
            assert done.file.path.exists()
            assert "restart this broker" in caplog.text
            caplog.clear()
        # Others of the same store do not wait for it.
        setting.persister.complete(await setting.spool(b"other"))
        await setting.settled()
        assert len(setting.stored()) == 1

    scenario(tmp_path, body)


def test_postfix_codec_and_encoding_of_a_stored_fragment(tmp_path):
    async def body(setting):
        setting.spec.fragment.path_postfix_template = (
            'date={{ .Spool.FirstAppendTime.Format "2006-01-02" }}'
            '/region={{ .Spool.Registers.ValueOf "region" }}'
        )
        done = await setting.spool(b"content", codec=pb.GZIP_OFFLOAD_DECOMPRESSION)
        assert done.first_append_time.date() == datetime.now(UTC).date()
        setting.persister.complete(done)
        await setting.settled()
        [name] = setting.stored()
        date = done.first_append_time.strftime("%Y-%m-%d")
        assert name == (f"good/a/journal/date={date}/region=north/{content_name(done.fragment)}")
        assert gzip.decompress((setting.root / name).read_bytes()) == b"content"
        assert done.fragment.path_postfix == "", "the local fragment is not changed"

    scenario(tmp_path, body)


def test_a_template_that_cannot_be_evaluated_fails_and_drops_nothing(tmp_path):
    async def body(setting):
        setting.spec.fragment.path_postfix_template = "{{ .Unsupported }}"
        done = await setting.spool()
        setting.persister.complete(done)
        await setting.settled()
        assert setting.stored() == []
        assert setting.persister.pending == 1
        assert done.file.path.exists()

    scenario(tmp_path, body)


def test_content_of_a_journal_without_stores_stays_until_it_gets_one_or_is_deleted(tmp_path):
    async def body(setting):
        del setting.spec.fragment.stores[:]
        one, two = await setting.spool(b"one"), await setting.spool(b"two")
        setting.persister.complete(one)
        await setting.settled()
        assert (setting.persister.pending, one.file.path.exists()) == (0, True)
        await asyncio.wait_for(setting.persister.finish(), 5)

        setting.spec.fragment.stores.append(GOOD)
        setting.persister._rotate()
        await setting.settled()
        assert len(setting.stored()) == 1

        del setting.spec.fragment.stores[:]
        setting.persister.complete(two)
        await setting.settled()
        setting.spec = None
        setting.persister._rotate()
        await setting.settled()
        await until(lambda: not two.file.path.exists())

    scenario(tmp_path, body)


def test_finish_awaits_attempts_and_all_queues(tmp_path):
    async def body(setting):
        for number in range(40):
            done = await setting.spool(b"fragment %d" % number, primary=number % 2 == 0)
            setting.persister.complete(done)
        await asyncio.wait_for(setting.persister.finish(), 10)
        assert len(setting.stored()) == 40

    scenario(tmp_path, body)


def test_finish_continues_while_a_store_fails_and_can_be_cancelled(tmp_path):
    async def body(setting):
        setting.spec.fragment.stores[:] = ["file:///missing/"]
        setting.persister.complete(await setting.spool())
        finish = asyncio.create_task(setting.persister.finish())
        done, _ = await asyncio.wait({finish}, timeout=0.1)
        assert not done
        finish.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finish
        assert setting.persister.pending == 1

    scenario(tmp_path, body)


def test_an_upload_that_hangs_is_given_up_and_tried_again(tmp_path):
    release, hanging = threading.Event(), threading.Event()

    class Hanging(FileStore):
        def _put(self, key, content, length, content_encoding, overwrite):
            if not hanging.is_set():
                hanging.set()
                release.wait(10)
            super()._put(key, content, length, content_encoding, overwrite)

    def opener(url):
        parsed = open_store(url, file_root=tmp_path / "stores")._parsed
        return Hanging(parsed, tmp_path / "stores")

    async def body(setting):
        setting.persister.complete(await setting.spool())
        async with setting.running():
            await until(setting.stored)
            assert hanging.is_set()
            await until(lambda: setting.persister.pending == 0)
        release.set()

    scenario(tmp_path, body, opener=opener, upload_timeout_s=0.05)


def test_uploads_are_outdated_when_another_store_became_the_first(tmp_path):
    release, hanging = threading.Event(), threading.Event()
    other = "file:///other/"

    class Hanging(FileStore):
        def _put(self, key, content, length, content_encoding, overwrite):
            if self.url == GOOD:
                hanging.set()
                release.wait(10)
            super()._put(key, content, length, content_encoding, overwrite)

    def opener(url):
        parsed = open_store(url, file_root=tmp_path / "stores")._parsed
        return Hanging(parsed, tmp_path / "stores")

    async def body(setting):
        (setting.root / "other").mkdir()
        setting.persister.complete(await setting.spool())
        await until(hanging.is_set)
        assert setting.persister.outdated_uploads(GOOD) == 0, "it is the first store"
        setting.spec.fragment.stores.insert(0, other)
        assert setting.persister.outdated_uploads(GOOD) == 1
        setting.persister.complete(await setting.spool(b"goes elsewhere"))
        await until(lambda: [name for name in setting.stored() if name.startswith("other/")])
        assert setting.persister.outdated_uploads(GOOD) == 1
        assert setting.persister.outdated_uploads(other) == 0
        release.set()
        await setting.settled()
        assert setting.persister.outdated_uploads(GOOD) == 0

    scenario(tmp_path, body, opener=opener)

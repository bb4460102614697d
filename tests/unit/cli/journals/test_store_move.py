from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
from functools import partial
from types import SimpleNamespace

import pytest

from gazette_sdk.broker.fragments.index import OFFSET_JUMP_AGE_S
from gazette_sdk.cli.formats import Progress
from gazette_sdk.cli.journals import fragments, store_move
from gazette_sdk.cli.journals.commands import MoveStoreSettings
from gazette_sdk.cli.journals.fragments import FragmentCopies, Pace, removal_of
from gazette_sdk.cli.journals.store_move import (
    Listings,
    StoreMoves,
    check_new_store,
    hindrance_of,
    missing_of,
    moved_first,
    plan_of,
)
from gazette_sdk.cli.program import CommandFailedError
from gazette_sdk.errors import (
    ConfigurationError,
    CorruptFragmentError,
    FragmentNotFoundError,
    StoreError,
    UnavailableError,
)
from gazette_sdk.fragment.codecs import CODECS, compressor
from gazette_sdk.fragment.listing import StoredFragment
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.fragment.stores import FileStore, ObjectStatus
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import content_path
from gazette_sdk.protocol.names import parse_store_url
from gazette_sdk.transport.wire import ANYWHERE, Target
from support.fragment_files import fragment_of
from support.memory_transport import MemoryTransport
from support.spools import files_below

JOURNAL = "a/journal"
OLD, NEW = "file:///old/", "file:///new/"
CONTENT = b"all of the content\n" * 7
NOW_S = 1_800_000_000.0


def spec_of(*stores, **fields):
    spec = pb.JournalSpec(name=JOURNAL, **fields)
    spec.fragment.stores[:] = stores
    return spec


def listed(begin, end, *, store=OLD, length=None, age_s=0.0):
    fragment = pb.Fragment(
        journal=JOURNAL,
        begin=begin,
        end=end,
        compression_codec=pb.NONE,
        backing_store=store,
        mod_time=int(NOW_S - age_s),
    )
    return StoredFragment(fragment, end - begin if length is None else length)


# ---------------------------------------------------------------- plans


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("s3://bucket/${ENV}/", "no templates"),
        ("s3://bucket/{{ .Name }}/", "no templates"),
        ("ftp://host/path/", "invalid scheme"),
        ("s3://bucket/prefix", "doesn't end in '/'"),
        ("bucket/prefix/", "not absolute"),
        ("s3://bucket/prefix/?regoin=eu", "no argument regoin"),
        ("memory://name/", "a memory store is in one process"),
    ],
)
def test_a_new_store_that_can_be_none_is_refused(url, reason):
    with pytest.raises(ConfigurationError, match=r"^--to ") as failure:
        check_new_store(url)
    assert reason in str(failure.value)


@pytest.mark.parametrize(
    ("stores", "old"),
    [
        ([OLD], [OLD]),
        ([OLD, "s3://bucket/more/"], [OLD, "s3://bucket/more/"]),
        ([OLD, NEW], [OLD]),
        ([NEW, OLD], [OLD]),
    ],
)
def test_a_journal_leaves_all_stores_but_the_new_one(stores, old):
    move = plan_of(spec_of(*stores), check_new_store(NEW))
    assert (move.outcome, list(move.old)) == ("unfinished", old)
    assert moved_first(stores, NEW) == [NEW, *old]


def test_a_journal_that_has_the_new_store_only_is_unchanged():
    assert plan_of(spec_of(NEW), check_new_store(NEW)).outcome == "unchanged"


@pytest.mark.parametrize(
    ("stores", "to", "fields", "reason"),
    [
        ([], NEW, {}, "it has no store"),
        ([OLD], NEW, {"flags": pb.JournalSpec.O_RDONLY}, "it is read-only"),
        (["s3://b/p/"], "s3://b/p/?region=eu", {}, "the same place"),
        (["azure://c/p/"], "az://c/p/", {}, "the same place"),
        (["hdfs://name:1/p/"], "webhdfs://name:1/p/", {}, "the same place"),
        (["s3://b/"], "s3://b/a/journal/", {}, "one inside the other"),
        (["s3://b/a/journal/more/"], "s3://b/", {}, "one inside the other"),
        (["memory://name/"], NEW, {}, "in the memory of a broker"),
        (["s4://b/"], NEW, {}, "correct it with `gazctl journals edit`"),
    ],
)
def test_a_journal_that_cannot_be_moved_is_refused(stores, to, fields, reason):
    move = plan_of(spec_of(*stores, **fields), check_new_store(to))
    assert move.outcome == "refused"
    assert reason in move.error


def test_stores_of_one_bucket_are_different_places():
    assert plan_of(spec_of("s3://b/old/"), check_new_store("s3://b/new/")).is_open
    assert plan_of(spec_of("s3://b/?endpoint=http://a"), check_new_store("s3://b/")).is_open


def test_the_missing_fragments_are_whole_and_not_verified_yet():
    first, second, torn = listed(0, 9), listed(9, 12), listed(12, 20, length=3)
    other = listed(0, 9, store="file:///older/")
    assert missing_of([first, second, torn, other], [], set()) == [first, second]
    new = [listed(0, 9, store=NEW), listed(9, 12, store=NEW, length=1)]
    paths = {content_path(each.fragment) for each in new}
    assert missing_of([first, second], new, set()) == [first, second]
    assert missing_of([first, second], new, paths) == [second]
    assert missing_of([first], new, paths) == []
    assert missing_of([first], [], paths) == [first], "it was removed there"


def test_a_torn_object_keeps_an_old_store_unless_others_have_its_content():
    torn = listed(5, 20, length=3)
    new = [listed(0, 9, store=NEW), listed(9, 12, store=NEW)]
    assert "cut off (3 bytes)" in hindrance_of(Listings([torn], new), NOW_S)
    new.append(listed(12, 20, store=NEW))
    assert hindrance_of(Listings([torn], new), NOW_S) == ""


def test_a_gap_keeps_an_old_store_until_the_copy_after_it_is_as_old_as_readers_need():
    old = [listed(10, 20, age_s=1e6), listed(30, 40, age_s=1e6)]
    young = [listed(10, 20, store=NEW), listed(30, 40, store=NEW, age_s=OFFSET_JUMP_AGE_S)]
    assert "has its bytes [20, 30)" in hindrance_of(Listings(old, young), NOW_S)
    assert hindrance_of(Listings(old, young), NOW_S + 1) == ""
    assert hindrance_of(Listings(old[:1], young), NOW_S) == "", "no copy is after the gap"


@pytest.mark.parametrize(
    ("url", "command"),
    [
        (OLD, "rm -r -- '/srv/the root/old/a/journal'"),
        (
            "s3://b/p/?region=eu&endpoint=http://h:1",
            "aws s3 rm --recursive s3://b/p/a/journal/ --endpoint-url http://h:1 --region eu",
        ),
        ("s3://b/p/?find=a/&replace=z/", "aws s3 rm --recursive s3://b/p/z/journal/"),
        ("gs://b/", "gcloud storage rm --recursive gs://b/a/journal/"),
        (
            "azure-ad://tenant/acme/c/p/",
            "az storage blob delete-batch --source c --pattern 'p/a/journal/*' --account-name acme",
        ),
        ("hdfs://name:8020/p/", "hdfs dfs -rm -r hdfs://name:8020/p/a/journal"),
        ("memory://name/", ""),
    ],
)
def test_the_command_that_removes_old_content_names_the_journal(url, command, tmp_path):
    root = type(tmp_path)("/srv/the root")
    assert removal_of(url, JOURNAL, root) == command


# ---------------------------------------------------------------- copies


class Setting:
    """Two file stores, and copies from one to the other."""

    def __init__(self, root, *, new=FileStore, old=FileStore, pace=None):
        self.root = root
        self.taken = []
        for name in ("old", "new"):
            (root / name).mkdir()
        kinds = {OLD: old, NEW: new}
        self.stores = StoreRegistry(opener=lambda url: kinds[url](parse_store_url(url), root))
        self.copies = FragmentCopies(self.stores, NEW, pace or Pace(0, self.taken.append))

    def file(self, fragment, store):
        return self.root / store / content_path(fragment)

    def put(self, content=CONTENT, *, codec=pb.NONE, store="old", stored=None):
        """A fragment in a store, whose file has its content, or what is given."""
        fragment = fragment_of(JOURNAL, 5, content, codec)
        fragment.backing_store = OLD
        file = self.file(fragment, store)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encoded(content, codec) if stored is None else stored)
        return fragment

    def copy(self, fragment):
        async def scenario():
            try:
                async with self.copies:
                    return await self.copies.copy(StoredFragment(fragment, -1))
            finally:
                await self.stores.aclose()

        return asyncio.run(scenario())


def encoded(content, codec):
    file = io.BytesIO()
    writer = compressor(codec, file)
    writer.write(content)
    writer.close()
    return file.getvalue()


@pytest.mark.parametrize("codec", CODECS)
def test_a_copy_has_the_stored_bytes(codec, tmp_path):
    setting = Setting(tmp_path)
    fragment = setting.put(codec=codec)
    assert setting.copy(fragment) is True
    copied = setting.file(fragment, "new").read_bytes()
    assert copied == setting.file(fragment, "old").read_bytes()
    assert sum(setting.taken) == len(copied)
    assert len(files_below(tmp_path)) == 2


@pytest.mark.parametrize(
    ("codec", "encoding"), [(pb.GZIP, ""), (pb.GZIP_OFFLOAD_DECOMPRESSION, "gzip")]
)
def test_the_encoding_of_offloaded_gzip_is_declared_again(codec, encoding, tmp_path):
    declared = []

    class Declares(FileStore):
        def _put(self, key, content, length, content_encoding, overwrite):
            assert not overwrite
            declared.append(content_encoding)
            super()._put(key, content, length, content_encoding, overwrite)

    setting = Setting(tmp_path, new=Declares)
    assert setting.copy(setting.put(codec=codec)) is True
    assert declared == [encoding]


@pytest.mark.parametrize("codec", [pb.NONE, pb.GZIP, pb.ZSTANDARD])
@pytest.mark.parametrize("wrong", [CONTENT[::-1], CONTENT[:-1], CONTENT + b"x", b""])
def test_a_damaged_fragment_is_not_copied(codec, wrong, tmp_path):
    setting = Setting(tmp_path)
    fragment = setting.put(codec=codec, stored=encoded(wrong, codec))
    with pytest.raises(CorruptFragmentError, match="damaged"):
        setting.copy(fragment)
    assert files_below(tmp_path / "new") == []


@pytest.mark.parametrize("codec", [pb.NONE, pb.GZIP])
def test_a_fragment_that_is_there_is_verified_and_passed_over(codec, tmp_path):
    setting = Setting(tmp_path)
    fragment = setting.put(codec=codec)
    # Two brokers compress the same content to different bytes.
    stored = gzip.compress(CONTENT, 9) if codec == pb.GZIP else CONTENT
    setting.put(codec=codec, store="new", stored=stored)
    assert setting.copy(fragment) is False
    assert setting.file(fragment, "new").read_bytes() == stored
    assert setting.taken == [len(stored)]


@pytest.mark.parametrize("codec", [pb.NONE, pb.GZIP])
@pytest.mark.parametrize("other", [CONTENT[::-1], CONTENT[:-2], b""])
def test_something_else_of_its_name_is_not_replaced(codec, other, tmp_path):
    setting = Setting(tmp_path)
    fragment = setting.put(codec=codec)
    stored = encoded(other, codec) if other else b""
    setting.put(codec=codec, store="new", stored=stored)
    with pytest.raises(CorruptFragmentError, match="with other content, which is not replaced"):
        setting.copy(fragment)
    assert setting.file(fragment, "new").read_bytes() == stored


def test_a_put_that_came_second_is_not_taken_for_a_copy(tmp_path):
    class Rival(FileStore):
        def _put(self, key, content, length, content_encoding, overwrite):
            setting.put(store="new", stored=CONTENT[::-1])
            super()._put(key, content, length, content_encoding, overwrite)

    setting = Setting(tmp_path, new=Rival)
    with pytest.raises(CorruptFragmentError, match="not replaced"):
        setting.copy(setting.put())


def test_a_store_that_takes_nothing_is_an_error(tmp_path, monkeypatch):
    class Liar(FileStore):
        def _put(self, *_):
            pass

    without_pauses(monkeypatch)
    setting = Setting(tmp_path, new=Liar)
    with pytest.raises(StoreError, match=r"reported success .* and nothing is there"):
        setting.copy(setting.put())


def test_equal_sums_of_the_stores_spare_the_read(tmp_path):
    class Sums(FileStore):
        def _status_of(self, key):
            found = super()._status_of(key)
            if found is None:
                return None
            return ObjectStatus(
                found.length, md5=hashlib.md5(self._path(key).read_bytes()).digest()
            )

    class NeverRead(Sums):
        def _open(self, key):
            raise AssertionError(f"{key} is opened")

    setting = Setting(tmp_path, old=Sums, new=NeverRead)
    fragment = setting.put()
    assert setting.copy(fragment) is True
    (tmp_path / "again").mkdir()
    setting = Setting(tmp_path / "again", old=NeverRead, new=NeverRead)
    fragment = setting.put()
    setting.put(store="new")
    assert setting.copy(fragment) is False


def without_pauses(monkeypatch):
    async def no_pause(_):
        await asyncio.sleep(0)

    monkeypatch.setattr(fragments, "pause", no_pause)


def test_a_copy_is_tried_again_while_a_store_fails(tmp_path, monkeypatch):
    failures = [OSError("busy"), OSError("still busy")]

    class Fails(FileStore):
        def _put(self, *arguments):
            if failures:
                raise failures.pop()
            super()._put(*arguments)

    without_pauses(monkeypatch)
    setting = Setting(tmp_path, new=Fails)
    assert setting.copy(setting.put()) is True
    assert failures == []


def test_a_fragment_that_was_removed_meanwhile_is_not_found(tmp_path):
    setting = Setting(tmp_path)
    fragment = setting.put()
    setting.file(fragment, "old").unlink()
    with pytest.raises(FragmentNotFoundError):
        setting.copy(fragment)


def test_reads_keep_to_the_rate(monkeypatch):
    waits = []
    monkeypatch.setattr(fragments.time, "monotonic", lambda: 100.0)
    pace = Pace(1000.0)
    monkeypatch.setattr(pace._stopped, "wait", waits.append)
    for count in (500, 2000, 1):
        pace.take(count)
    assert waits == [0.0, 0.5, 2.5]


def test_stopped_copies_end_at_their_next_block(tmp_path, monkeypatch):
    without_pauses(monkeypatch)
    pace = Pace(0.001)
    setting = Setting(tmp_path, pace=pace)
    pace.stop()
    with pytest.raises(StoreError, match="run the same command again"):
        setting.copy(setting.put())
    assert files_below(tmp_path / "new") == []


# ---------------------------------------------------------------- brokers


class Broker(MemoryTransport):
    """Brokers whose answers about stores a test gives, one for each call."""

    def __init__(self, *answers):
        super().__init__()
        self.answers = list(answers)
        self.asked = []

    async def fragment_store_health(self, request, target=ANYWHERE):
        self.asked.append((target.member.suffix, request.fragment_store))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        response = pb.FragmentStoreHealthResponse(**answer)
        response.header.etcd.revision = 7
        return response


def asking(broker, monkeypatch, *suffixes):
    """The moves of a command whose cluster has some brokers, and no pauses."""
    invocation = SimpleNamespace(settings=lambda _: MoveStoreSettings(to=NEW))
    moves = StoreMoves(
        invocation,
        broker,
        StoreRegistry(),
        to=check_new_store(NEW),
        progress=Progress(),
        file_root=None,
    )

    async def brokers():
        members = [pb.ProcessSpec.ID(zone="a", suffix=suffix) for suffix in suffixes]
        return [Target(pb.Route(members=[each], endpoints=["http://x"]), each) for each in members]

    async def no_pause(_):
        await asyncio.sleep(0)

    monkeypatch.setattr(moves, "_brokers", brokers)
    monkeypatch.setattr(store_move, "pause", no_pause)
    return moves


def ask_for_uploads(moves, *, revision=7, age_s=0.0, timeout_s=5.0):
    async def scenario():
        changed_at = asyncio.get_running_loop().time() - age_s
        ask = partial(moves._uploads_problem, revision, changed_at)
        await moves._ask_brokers([OLD], ask, timeout_s, "run it again")

    asyncio.run(scenario())


def test_brokers_are_asked_until_none_has_an_outdated_upload(monkeypatch):
    broker = Broker(
        {"outdated_uploads": 0},
        {"outdated_uploads": 2},
        UnavailableError("it starts"),
        {"outdated_uploads": 0},
    )
    ask_for_uploads(asking(broker, monkeypatch, "one", "two"))
    assert broker.asked[:2] == [("one", OLD), ("two", OLD)]
    assert broker.asked[2:] == [("two", OLD)] * 2, "the first one has answered"


@pytest.mark.parametrize(
    ("answer", "revision", "reason"),
    [
        ({"outdated_uploads": 0}, 8, "does not know the changed specs yet"),
        ({"outdated_uploads": 3}, 7, "still uploads 3 fragments to file:///old/"),
        ({}, 7, "does not report its uploads; they end in 330 s"),
        (UnavailableError("frozen"), 7, "does not answer (frozen)"),
    ],
)
def test_a_broker_that_may_store_in_an_old_store_is_named(monkeypatch, answer, revision, reason):
    moves = asking(Broker(answer), monkeypatch, "one")
    with pytest.raises(CommandFailedError) as failure:
        ask_for_uploads(moves, revision=revision, timeout_s=0.0)
    assert str(failure.value) == f"broker a/one {reason}; run it again"


def test_uploads_of_other_implementations_have_ended_after_their_bound(monkeypatch):
    ask_for_uploads(asking(Broker({}), monkeypatch, "one"), age_s=331.0, timeout_s=0.0)


def test_a_broker_that_cannot_use_the_new_store_is_named(monkeypatch):
    answer = {"status": pb.FRAGMENT_STORE_UNHEALTHY, "store_health_error": "put: denied"}
    moves = asking(Broker({}, answer), monkeypatch, "one", "two")
    with pytest.raises(CommandFailedError, match=r"a/two cannot use the store .*: put: denied"):
        asyncio.run(moves._ask_brokers([NEW], moves._health_problem, 0.0, "nothing was changed"))

"""How much is kept of a recovered spool; the remedies for its files; the decisions, one by one."""

from __future__ import annotations

import asyncio
import hashlib
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.broker.recovery import quarantine as held_back
from gazette_sdk.broker.recovery import truncate as spool_remedies
from gazette_sdk.broker.recovery.quarantine import HeldBack
from gazette_sdk.broker.recovery.reconcile import kept_end
from gazette_sdk.broker.recovery.truncate import keep_beginning, put_superseded_aside
from gazette_sdk.broker.spool.directory import SpoolDirectory
from gazette_sdk.errors import UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import digest_of
from support.spools import CLUSTER, REVISION, SpoolUser, sum_of_content, until

JOURNAL = "a/journal"
CONTENTS = (b"one,", b"two,", b"three,")
WHOLE = b"".join(CONTENTS)


def fragment(begin: int, end: int, *, content: bytes = b"", store: str = "") -> pb.Fragment:
    return pb.Fragment(
        journal=JOURNAL, begin=begin, end=end, sum=sum_of_content(content), backing_store=store
    )


# ------------------------------------------------------------------ the rule


@pytest.mark.parametrize(
    ("known", "kept"),
    [
        ([], 20),
        ([fragment(0, 10), fragment(20, 30)], 20),
        ([fragment(0, 11)], 10),
        ([fragment(10, 11)], 10),
        ([fragment(0, 100)], 10),
        ([fragment(19, 40)], 19),
        ([fragment(18, 19), fragment(15, 16), fragment(30, 40)], 15),
        ([fragment(10, 20, content=b"other")], 10),
        ([fragment(10, 20, content=b"ours")], 20),
        ([fragment(10, 20, content=b"ours", store="file:///")], 20),
        ([fragment(15, 30), fragment(10, 20, content=b"ours")], 15),
        ([fragment(15, 30), fragment(10, 20, content=b"ours", store="file:///")], 20),
    ],
)
def test_it_is_kept_up_to_what_others_have(known, kept):
    assert kept_end(fragment(10, 20, content=b"ours"), known) == kept


spans = st.tuples(st.integers(0, 40), st.integers(1, 10)).map(
    lambda span: fragment(span[0], span[0] + span[1])
)


@given(spans, st.lists(spans))
def test_no_byte_is_kept_which_others_have_and_none_is_lost_before(ours, known):
    known = [each for each in known if (each.begin, each.end) != (ours.begin, ours.end)]
    theirs = {offset for each in known for offset in range(each.begin, each.end)}
    end = kept_end(ours, known)
    assert ours.begin <= end <= ours.end
    assert not theirs & set(range(ours.begin, end))
    assert end == ours.end or end in theirs


# ------------------------------------------------------------------ files


@pytest.fixture
def root(tmp_path):
    """A spool directory as a crash leaves it, with one spool of three commits."""

    async def write():
        with SpoolDirectory(tmp_path / "first") as directory:
            user = SpoolUser(directory, JOURNAL)
            for content in CONTENTS:
                await user.append(content)
            shutil.copytree(tmp_path / "first", tmp_path / "spools")

    asyncio.run(write())
    return tmp_path / "spools"


def recovered(root):
    with SpoolDirectory(root) as directory:
        return directory.recover(CLUSTER)


def content_of_spool(spool):
    fragment = spool.fragment
    content = spool.file.path.read_bytes()
    assert len(content) == fragment.end - fragment.begin
    assert hashlib.sha1(content).digest() == digest_of(fragment.sum)
    return content


@pytest.mark.parametrize("end", [1, 4, 5, 8, len(WHOLE) - 1])
@pytest.mark.parametrize("synced", [False, True])
def test_a_spool_is_cut(root, end, synced):
    (whole,) = recovered(root)
    cut = keep_beginning(whole, end, synced=synced)
    assert content_of_spool(cut) == WHOLE[:end]
    (again,) = recovered(root)
    assert (again.fragment, again.registers) == (cut.fragment, cut.registers)
    assert content_of_spool(again) == WHOLE[:end]
    if end > 1:
        assert content_of_spool(keep_beginning(again, 1, synced=synced)) == WHOLE[:1]


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("at", ["write", "rename", "truncate"])
def test_a_crash_while_it_is_cut_leaves_all_of_it_or_the_beginning(root, at, monkeypatch):
    (whole,) = recovered(root)

    def die(*_, **__):
        raise Killed

    steps = {
        "write": (spool_remedies.CommitLog, "append"),
        "rename": (spool_remedies.Path, "rename"),
        "truncate": (spool_remedies.os, "truncate"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*steps[at], die)
        with pytest.raises(Killed):
            keep_beginning(whole, 8, synced=False)
    (again,) = recovered(root)
    assert content_of_spool(again) == (WHOLE[:8] if at == "truncate" else WHOLE)
    if at != "truncate":
        assert content_of_spool(keep_beginning(again, 8, synced=False)) == WHOLE[:8]


def test_what_is_put_aside_stays_there(root):
    (spool,) = recovered(root)
    aside = put_superseded_aside(spool)
    assert aside.name.endswith(".content.superseded")
    assert recovered(root) == []
    assert aside.read_bytes() == WHOLE
    assert len(list(aside.parent.glob("*.superseded"))) == 2
    assert put_superseded_aside(spool) == aside


def test_a_crash_while_it_is_put_aside_loses_nothing(root):
    (spool,) = recovered(root)
    path = spool.file.path
    path.rename(f"{path}.superseded")
    assert recovered(root) == []
    assert sorted(each.name for each in path.parent.glob(f"{path.stem}*")) == [
        f"{path.stem}.content.superseded",
        f"{path.stem}.log.superseded",
    ]


def test_a_name_put_aside_is_not_given_again(root):
    (spool,) = recovered(root)
    put_superseded_aside(spool)

    async def scenario():
        with SpoolDirectory(root) as directory:
            directory.recover(CLUSTER)
            user = SpoolUser(directory, JOURNAL)
            await user.append(b"other")
            assert user.spool.content_file.path != spool.file.path

    asyncio.run(scenario())


def test_a_spool_that_others_passed_is_one_at_each_later_start_and_new_ones_are_not(root):
    async def scenario():
        with SpoolDirectory(root) as directory:
            (spool,) = directory.recover(CLUSTER)
            assert not directory.is_passed(spool)
            directory.forget_head(JOURNAL)
            assert directory.is_passed(spool)
        with SpoolDirectory(root) as directory:
            (spool,) = directory.recover(CLUSTER)
            assert directory.is_passed(spool)
            spool.file.discard()
        with SpoolDirectory(root) as directory:
            assert directory.recover(CLUSTER) == []
            user = SpoolUser(directory, JOURNAL)
            await user.append(b"new")
            file = user.spool.content_file
        with SpoolDirectory(root) as directory:
            (spool,) = directory.recover(CLUSTER)
            assert spool.file.path == file.path
            assert not directory.is_passed(spool)
            head = directory.head(JOURNAL, create_revision=REVISION, cluster_id=CLUSTER)
            assert head.end == 3

    asyncio.run(scenario())


# ------------------------------------------------------------------ decisions


class Elsewhere:
    """What others say, as the test has it: fragments, or errors before them."""

    def __init__(self, *answers, digest=None):
        self.answers = list(answers)
        self.content = digest
        self.asked = 0

    async def before(self, journal, end):
        assert (journal, end) == (JOURNAL, len(WHOLE))
        self.asked += 1
        await asyncio.sleep(0)
        answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return list(answer)

    async def digest(self, journal, begin, end):
        assert (journal, begin, end) == (JOURNAL, 0, len(WHOLE))
        return self.content


class Made:
    """What is held back of the fixture's directory."""

    def __init__(self, directory, others, *, exists=True):
        self.uploaded = []
        self.replica = None
        self.directory = directory
        self.held = HeldBack(
            directory,
            directory.recover(CLUSTER),
            exists=lambda *_: exists,
            others=others,
            upload=self.uploaded.append,
            replica_of=lambda *_: self.replica,
        )

    @property
    def spans(self):
        return [(spool.fragment.begin, spool.fragment.end) for spool in self.uploaded]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(held_back, "PAUSE_S_MIN", 0.001)


def decide(root, others, *, is_passed=True, exists=True):
    async def scenario():
        with SpoolDirectory(root) as directory:
            made = Made(directory, others, exists=exists)
            if is_passed:
                directory.forget_head(JOURNAL)
            await asyncio.wait_for(made.held.run(), 10)
            taken, ready = made.held.take(JOURNAL, REVISION)
            assert ready.fired
            return made, list(taken)

    return asyncio.run(scenario())


@pytest.mark.parametrize("is_passed", [False, True])
def test_what_nobody_else_has_is_uploaded_and_kept_for_a_replica(root, is_passed):
    made, taken = decide(root, Elsewhere([]), is_passed=is_passed)
    assert made.spans == [(0, len(WHOLE))]
    assert taken == made.uploaded


def test_what_others_have_just_so_within_more_is_used(root):
    others = Elsewhere([fragment(0, 100)], digest=hashlib.sha1(WHOLE).digest())
    made, _ = decide(root, others)
    assert made.spans == [(0, len(WHOLE))]


def test_the_beginning_is_used_where_others_wrote_the_rest(root, caplog):
    made, taken = decide(root, Elsewhere([fragment(8, 100)]))
    assert made.spans == [(0, 8)]
    assert content_of_spool(taken[0]) == WHOLE[:8]
    (record,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert f"offsets 8 to {len(WHOLE)} of {JOURNAL} are cut off" in record.getMessage()


def test_nothing_is_used_where_others_wrote_all_of_it(root, caplog):
    made, taken = decide(root, Elsewhere([fragment(0, 4), fragment(4, 9)]))
    assert made.spans == []
    assert taken == []
    (record,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert f"offsets 0 to {len(WHOLE)} of {JOURNAL} in " in record.getMessage()
    assert record.getMessage().endswith(".content.superseded")
    assert recovered(root) == []


def test_a_deleted_journal_is_left_to_who_drops_it(root):
    others = Elsewhere([fragment(0, 100)])
    made, taken = decide(root, others, exists=False)
    assert made.spans == [(0, len(WHOLE))]
    assert taken == []
    assert others.asked == 0


def test_who_has_no_answer_is_asked_again_and_that_is_told_once(root, caplog, monkeypatch):
    monkeypatch.setattr(held_back, "_TOLD_PAUSE_S", 0.002)
    errors = [UnavailableError("nobody leads it"), TimeoutError(), OSError("no"), KeyError("odd")]
    made, _ = decide(root, Elsewhere(*errors, []))
    assert made.spans == [(0, len(WHOLE))]
    (record,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert "spools of 1 journals are held back" in record.getMessage()


def test_a_disk_that_refuses_is_tried_again(root, monkeypatch):
    real, failures = held_back.put_superseded_aside, [OSError("no room")]

    def flaky(spool):
        if failures:
            raise failures.pop()
        return real(spool)

    monkeypatch.setattr(held_back, "put_superseded_aside", flaky)
    made, _ = decide(root, Elsewhere([fragment(0, 100)]))
    assert made.spans == []
    assert recovered(root) == []


def test_of_what_we_wrote_twice_the_later_counts(tmp_path, root):
    async def scenario():
        with SpoolDirectory(root) as directory:
            directory.recover(CLUSTER)
            user = SpoolUser(directory, JOURNAL)
            user.spool._begin_fragment(8, pb.NONE)
            await user.append(b"later")
            shutil.copytree(root, tmp_path / "again")
        with SpoolDirectory(tmp_path / "again") as directory:
            made = Made(directory, Elsewhere([]))
            directory.forget_head(JOURNAL)
            await asyncio.wait_for(made.held.run(), 10)
            assert sorted(made.spans) == [(0, 8), (8, 13)]

    asyncio.run(scenario())


def test_a_replica_gets_at_once_what_nobody_passed(root):
    async def scenario():
        with SpoolDirectory(root) as directory:
            made = Made(directory, Elsewhere([fragment(0, 100)]))
            taken, ready = made.held.take(JOURNAL, REVISION)
            assert list(taken) == made.uploaded
            assert made.spans == [(0, len(WHOLE))]
            assert ready.fired
            await made.held.run()
            assert len(made.uploaded) == 1

    asyncio.run(scenario())


def test_a_replica_waits_for_what_is_held_back(root):
    async def scenario():
        with SpoolDirectory(root) as directory:
            others = Elsewhere(UnavailableError("not yet"))
            made = Made(directory, others)
            directory.forget_head(JOURNAL)
            taken, ready = made.held.take(JOURNAL, REVISION)
            assert not taken
            running = asyncio.ensure_future(made.held.run())
            await until(lambda: others.asked > 2)
            assert not ready.fired
            others.answers = [[fragment(0, 100)]]
            await asyncio.wait_for(running, 10)
            assert ready.fired
            assert made.uploaded == []

    asyncio.run(scenario())


def test_where_nobody_went_on_a_shorter_copy_elsewhere_supersedes_nothing(root):
    """It is clear only when somebody goes on: without us, or with us."""

    async def scenario():
        with SpoolDirectory(root) as directory:
            others = Elsewhere([fragment(0, 4)])
            made = Made(directory, others)
            running = asyncio.ensure_future(made.held.run())
            await until(lambda: others.asked > 2)
            assert made.uploaded == []
            directory.forget_head(JOURNAL)
            await asyncio.wait_for(running, 10)
            assert made.uploaded == []
        assert recovered(root) == []

    asyncio.run(scenario())


def test_a_replica_that_comes_while_others_are_asked_gets_what_is_left(root):
    class Index:
        def __init__(self):
            self.added = []

        def commit(self, fragment, file):
            self.added.append((fragment, file))

    class Replica:
        index = Index()

    class Slow(Elsewhere):
        async def digest(self, journal, begin, end):
            taken, self.ready = made.held.take(journal, REVISION)
            assert not taken
            assert not self.ready.fired
            made.replica = Replica()
            return self.content

    with SpoolDirectory(root) as directory:
        others = Slow([fragment(0, 100)], digest=hashlib.sha1(WHOLE).digest())
        made = Made(directory, others)
        directory.forget_head(JOURNAL)
        asyncio.run(asyncio.wait_for(made.held.run(), 10))
        assert others.ready.fired
        assert made.spans == [(0, len(WHOLE))]
        assert [each.end for each, _ in Replica.index.added] == [len(WHOLE)]


def test_a_stop_lets_replicas_go_and_uploads_nothing(root):
    async def scenario():
        with SpoolDirectory(root) as directory:
            made = Made(directory, Elsewhere([]))
            directory.forget_head(JOURNAL)
            _, ready = made.held.take(JOURNAL, REVISION)
            made.held.let_go()
            assert ready.fired
            assert made.uploaded == []

    asyncio.run(scenario())

"""Decisions about spools in quarantine."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from gazette_sdk.broker.fragments.index import Index
from gazette_sdk.broker.recovery import quarantine
from gazette_sdk.broker.recovery.states import HeadInput
from gazette_sdk.broker.spool.directory import SpoolDirectory
from gazette_sdk.errors import UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from support.brokers import Mirror
from support.quarantine import (
    JOURNAL,
    OTHER,
    WHOLE,
    Made,
    ScriptedInventory,
    content_of_spool,
    decide,
    fragment,
    recovered,
    recovered_names,
)
from support.spools import CLUSTER, REVISION, SpoolUser, until


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(quarantine, "PAUSE_S_MIN", 0.001)


@pytest.mark.parametrize("is_contested", [False, True])
def test_a_spool_that_nobody_else_has_is_uploaded_and_kept_for_a_replica(root, is_contested):
    made, taken = decide(root, ScriptedInventory([]), is_contested=is_contested)
    assert made.spans == [(0, len(WHOLE))]
    assert taken == made.uploaded


def test_a_spool_whose_bytes_the_primary_serves_is_used(root):
    inventory = ScriptedInventory([fragment(0, 100)], digest=hashlib.sha1(WHOLE).digest())
    made, _ = decide(root, inventory)
    assert made.spans == [(0, len(WHOLE))]


def test_the_beginning_is_used_where_others_wrote_the_rest(root, caplog):
    made, taken = decide(root, ScriptedInventory([fragment(8, 100)]))
    assert made.spans == [(0, 8)]
    assert content_of_spool(taken[0]) == WHOLE[:8]
    (record,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert f"offsets 8 to {len(WHOLE)} of {JOURNAL} are cut off" in record.getMessage()


def test_nothing_is_used_where_others_wrote_all_of_it(root, caplog):
    made, taken = decide(root, ScriptedInventory([fragment(0, 4), fragment(4, 9)]))
    assert made.spans == []
    assert taken == []
    (record,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert f"offsets 0 to {len(WHOLE)} of {JOURNAL} in " in record.getMessage()
    assert record.getMessage().endswith(".content.superseded")
    assert recovered(root) == []


@pytest.mark.parametrize(
    ("theirs", "used"),
    [
        (WHOLE, [(0, 9)]),
        (b"other bytes" * 9, []),
    ],
)
def test_a_gap_of_what_only_we_have_is_closed_if_the_rest_is_the_same(root, theirs, used):
    def digest(begin, end):
        assert (begin, end) == (0, 4)
        return hashlib.sha1(theirs[begin:end]).digest()

    inventory = ScriptedInventory([fragment(0, 4), fragment(9, 100)], digest=digest)
    made, taken = decide(root, inventory)
    assert made.spans == used
    if used:
        assert content_of_spool(taken[0]) == WHOLE[:9]


def test_what_the_primary_cannot_read_yet_is_asked_again(root):
    answers = [None, None, hashlib.sha1(WHOLE[:4]).digest()]
    inventory = ScriptedInventory(
        [fragment(0, 4), fragment(9, 100)], digest=lambda *_: answers.pop(0)
    )
    made, _ = decide(root, inventory)
    assert made.spans == [(0, 9)]
    assert not answers


@pytest.mark.parametrize(("content", "used"), [(WHOLE, [(0, len(WHOLE))]), (b"other", [])])
@pytest.mark.parametrize("theirs", [[fragment(0, 100)], [fragment(0, 4), fragment(4, len(WHOLE))]])
def test_stores_are_not_listed_if_brokers_have_every_byte(root, theirs, content, used):
    digest = hashlib.sha1(content).digest()
    inventory = ScriptedInventory(theirs, digest=digest, stored=[OSError("the store fails")])
    made, _ = decide(root, inventory)
    assert made.spans == used
    assert inventory.listed == 0


@pytest.mark.parametrize("theirs", [[], [fragment(0, 4)], [fragment(0, 4), fragment(5, 100)]])
def test_nothing_is_decided_while_stores_fail_that_may_have_what_brokers_lack(root, theirs):
    async def scenario():
        with SpoolDirectory(root) as directory:
            inventory = ScriptedInventory(theirs, stored=[OSError("the store fails")])
            made = Made(directory, inventory)
            directory.forget_head(JOURNAL)
            running = asyncio.ensure_future(made.quarantine.run())
            await until(lambda: inventory.listed > 2)
            assert made.uploaded == []
            assert (JOURNAL, REVISION) in made.quarantine._ready
            inventory.stored = [fragment(0, len(WHOLE), content=WHOLE, store="file:///")]
            await asyncio.wait_for(running, 10)
            assert made.spans == [(0, len(WHOLE))]

    asyncio.run(scenario())


def test_stores_are_listed_before_a_spool_is_given_up_that_the_primary_has_not_whole(root):
    async def scenario():
        with SpoolDirectory(root) as directory:
            inventory = ScriptedInventory([fragment(0, 100)], stored=[OSError("the store fails")])
            made = Made(directory, inventory)
            directory.forget_head(JOURNAL)
            running = asyncio.ensure_future(made.quarantine.run())
            await until(lambda: inventory.listed > 1)
            assert inventory.asked > inventory.listed  # the primary may have it meanwhile
            assert recovered_names(root) == []
            inventory.stored = []
            await asyncio.wait_for(running, 10)
            assert made.spans == []
            assert len(recovered_names(root)) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("answers", [[fragment(0, 100)], []])
def test_a_spool_that_is_held_during_a_decision_is_decided_about_afterwards(root, answers):
    """Run once while the others are asked, and once while their bytes are read."""

    class Meanwhile(ScriptedInventory):
        async def fragments_of_brokers(self, journal, end):
            if self.asked == 0 and not answers:
                hold()
            return await super().fragments_of_brokers(journal, end)

        async def digest(self, journal, begin, end):
            if len(spools) == 1:
                hold()
                taken, self.ready = made.quarantine.take(JOURNAL, REVISION)
                assert not taken
            assert not self.ready.fired
            return self.content

    def hold():
        spools.append(replace(spools[0], fragment=fragment(0, len(WHOLE), content=WHOLE)))
        made.quarantine.hold(spools[1])

    with SpoolDirectory(root) as directory:
        inventory = Meanwhile(answers, digest=hashlib.sha1(WHOLE).digest())
        made = Made(directory, inventory)
        directory.forget_head(JOURNAL)
        spools = [made.quarantine._entries[JOURNAL, REVISION][0].spool]
        asyncio.run(asyncio.wait_for(made.quarantine.run(), 10))
        assert made.uploaded == spools
        assert inventory.asked == 2
        assert not made.quarantine.holds(JOURNAL, REVISION)


def test_a_spool_that_is_ahead_waits_while_others_may_write_there(root):
    async def scenario():
        with SpoolDirectory(root) as directory:
            inventory, goes_on = ScriptedInventory([]), [True]
            made = Made(directory, inventory, goes_on=lambda: goes_on[0])
            directory.forget_head(JOURNAL)
            running = asyncio.ensure_future(made.quarantine.run())
            await until(lambda: inventory.asked > 3)
            assert made.uploaded == []
            goes_on[0] = False  # the journal waits: nobody can
            await asyncio.wait_for(running, 10)
            assert made.spans == [(0, len(WHOLE))]

    asyncio.run(scenario())


def test_a_spool_of_this_process_is_decided_about_as_others_are(root):
    async def scenario():
        with SpoolDirectory(root) as directory:
            made = Made(directory, ScriptedInventory([]))
            (entry,) = made.quarantine._entries.pop((JOURNAL, REVISION))
            made.quarantine._ready.clear()
            made.quarantine.hold(entry.spool)
            assert made.quarantine.holds(JOURNAL, REVISION)
            await asyncio.wait_for(made.quarantine.run(), 10)
            assert made.uploaded == [entry.spool]
            assert not made.quarantine.holds(JOURNAL, REVISION)

    asyncio.run(scenario())


@pytest.mark.parametrize("head", [4, len(WHOLE)])
def test_a_spool_after_our_head_is_used_if_others_go_on_after_it(root, head):
    """It was kept at the end of a replica, and the next one begins before it: at our head."""

    async def scenario():
        with SpoolDirectory(root) as directory:
            inventory = ScriptedInventory([])
            inventory.head_offset = head
            made = Made(directory, inventory, other_members=lambda: [OTHER])
            (entry,) = made.quarantine._entries.pop((JOURNAL, REVISION))
            made.quarantine._ready.clear()
            directory._heads[JOURNAL] = replace(directory._heads[JOURNAL], end=4)
            made.quarantine.hold(entry.spool)
            taken, ready = made.quarantine.take(JOURNAL, REVISION)
            assert not taken
            assert not ready.fired
            agreed = []
            made.quarantine._upload_agreed = agreed.append
            made.replica = SimpleNamespace(index=Index())
            made.replica.index.hold(end=4, is_reported=True)
            await asyncio.wait_for(made.quarantine.run(), 10)
            assert made.uploaded == []
            assert agreed == ([] if head == 4 else [entry.spool])
            assert made.replica.index.readable_end == (0 if head == 4 else 4)
            assert ready.fired
        assert bool(recovered_names(root)) is (head == 4)

    asyncio.run(scenario())


def test_spools_of_a_deleted_journal_go_to_the_persister_which_drops_them(root):
    inventory = ScriptedInventory([fragment(0, 100)])
    made, taken = decide(root, inventory, exists=False)
    assert made.spans == [(0, len(WHOLE))]
    assert taken == []
    assert inventory.asked == 0


def test_peers_without_an_answer_are_asked_again_with_one_warning(root, caplog, monkeypatch):
    monkeypatch.setattr(quarantine, "_WARNING_PAUSE_S", 0.002)
    errors = [UnavailableError("nobody leads it"), TimeoutError(), OSError("no"), KeyError("odd")]
    made, _ = decide(root, ScriptedInventory(*errors, []))
    assert made.spans == [(0, len(WHOLE))]
    (record,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert "recovered spools of 1 journals stay in quarantine" in record.getMessage()


def test_a_disk_that_refuses_is_tried_again(root, monkeypatch):
    real, failures = quarantine.set_superseded_aside, [OSError("no room")]

    def flaky(spool):
        if failures:
            raise failures.pop()
        return real(spool)

    monkeypatch.setattr(quarantine, "set_superseded_aside", flaky)
    made, _ = decide(root, ScriptedInventory([fragment(0, 100)]))
    assert made.spans == []
    assert recovered(root) == []


def test_of_overlapping_spools_of_our_own_the_later_one_counts(tmp_path, root):
    async def scenario():
        with SpoolDirectory(root) as directory:
            directory.recover(CLUSTER)
            user = SpoolUser(directory, JOURNAL)
            user.spool._begin_fragment(8, pb.NONE)
            await user.append(b"later")
            shutil.copytree(root, tmp_path / "again")
        with SpoolDirectory(tmp_path / "again") as directory:
            made = Made(directory, ScriptedInventory([]))
            directory.forget_head(JOURNAL)
            await asyncio.wait_for(made.quarantine.run(), 10)
            assert sorted(made.spans) == [(0, 8), (8, 13)]

    asyncio.run(scenario())


def test_a_replica_gets_uncontested_spools_at_once(root):
    async def scenario():
        with SpoolDirectory(root) as directory:
            made = Made(directory, ScriptedInventory([fragment(0, 100)]))
            taken, ready = made.quarantine.take(JOURNAL, REVISION)
            assert list(taken) == made.uploaded
            assert made.spans == [(0, len(WHOLE))]
            assert ready.fired
            await made.quarantine.run()
            assert len(made.uploaded) == 1

    asyncio.run(scenario())


def test_a_replica_waits_while_spools_are_in_quarantine(root):
    async def scenario():
        with SpoolDirectory(root) as directory:
            inventory = ScriptedInventory(UnavailableError("not yet"))
            made = Made(directory, inventory)
            directory.forget_head(JOURNAL)
            taken, ready = made.quarantine.take(JOURNAL, REVISION)
            assert not taken
            running = asyncio.ensure_future(made.quarantine.run())
            await until(lambda: inventory.asked > 2)
            assert not ready.fired
            inventory.answers = [[fragment(0, 100)]]
            await asyncio.wait_for(running, 10)
            assert ready.fired
            assert made.uploaded == []

    asyncio.run(scenario())


@pytest.mark.parametrize(("content", "used"), [(WHOLE, [(0, len(WHOLE))]), (b"other", [])])
def test_a_replica_begins_without_what_others_have_and_cannot_read_yet(root, content, used):
    """They have it in a store that fails."""
    is_failing = True

    def digest(begin, end):
        if is_failing:
            raise UnavailableError("the store fails")
        return hashlib.sha1(content).digest()

    async def scenario():
        nonlocal is_failing
        with SpoolDirectory(root) as directory:
            inventory = ScriptedInventory([fragment(0, 100, store="file:///")], digest=digest)
            made = Made(directory, inventory, restores_head=True)
            directory.forget_head(JOURNAL)
            _, ready = made.quarantine.take(JOURNAL, REVISION)
            running = asyncio.ensure_future(made.quarantine.run())
            await until(lambda: inventory.asked > 2)
            assert ready.fired
            taken, ready = made.quarantine.take(JOURNAL, REVISION)
            assert (list(taken), ready.fired, made.uploaded) == ([], True, [])
            is_failing = False
            await asyncio.wait_for(running, 10)
            assert made.spans == used
            assert directory.head(JOURNAL, create_revision=REVISION, cluster_id=CLUSTER) is None

    asyncio.run(scenario())


@pytest.mark.parametrize(("content", "used"), [(WHOLE, [(0, len(WHOLE))]), (b"other", [])])
def test_nothing_is_decided_while_those_who_continued_the_journal_are_away(root, content, used):
    """They may have acknowledged other bytes there, and only they know it."""
    are_away = True

    async def scenario():
        nonlocal are_away
        with SpoolDirectory(root) as directory:
            inventory = ScriptedInventory([], digest=hashlib.sha1(content).digest())
            made = Made(directory, inventory, continued_by=[OTHER], waits=lambda: are_away)
            directory.forget_head(JOURNAL)
            _, ready = made.quarantine.take(JOURNAL, REVISION)
            running = asyncio.ensure_future(made.quarantine.run())
            await until(lambda: ready.fired)
            await asyncio.sleep(0.2)
            assert (made.uploaded, inventory.asked) == ([], 0)
            assert not made.quarantine.holds(JOURNAL, REVISION)
            inventory.answers = [[fragment(0, 100)]]
            are_away = False
            await asyncio.wait_for(running, 10)
            assert made.spans == used

    asyncio.run(scenario())


def test_nothing_is_decided_by_answers_asked_for_after_those_who_continued_had_left(root):
    """No one was left who could tell where they continued."""

    async def scenario():
        with SpoolDirectory(root) as directory:
            are_away = False

            class Leaving(ScriptedInventory):
                async def head(self, journal, members, unverified_end):
                    nonlocal are_away
                    are_away = True
                    return await super().head(journal, members, unverified_end)

            inventory = Leaving([])
            made = Made(directory, inventory, continued_by=[OTHER], waits=lambda: are_away)
            directory.forget_head(JOURNAL)
            running = asyncio.ensure_future(made.quarantine.run())
            await until(lambda: inventory.asked > 0)
            await asyncio.sleep(0.1)
            assert (made.uploaded, inventory.asked) == ([], 1)
            running.cancel()
            await asyncio.wait([running])

    asyncio.run(scenario())


def test_a_spool_after_the_end_of_others_is_not_used(tmp_path):
    """It follows another one of ours, and they continued at an offset within that."""

    async def scenario():
        with SpoolDirectory(tmp_path / "first") as directory:
            user = SpoolUser(directory, JOURNAL)
            await user.append(WHOLE[:10])
            await user.roll()
            await user.append(WHOLE[10:])
            shutil.copytree(tmp_path / "first", tmp_path / "spools")
        with SpoolDirectory(tmp_path / "spools") as directory:
            inventory = ScriptedInventory([fragment(4, 6)], digest=lambda *_: None)
            inventory.head_offset = 6
            made = Made(directory, inventory, continued_by=[OTHER])
            directory.forget_head(JOURNAL)
            await asyncio.wait_for(made.quarantine.run(), 10)
            assert made.spans == [(0, 4)]

    asyncio.run(scenario())


def test_those_who_continue_the_journal_during_a_decision_are_asked_for_their_head(root):
    """They had learned the end of a spool whose last bytes nobody else has."""

    def digest(begin, end):
        return hashlib.sha1(WHOLE[begin:end]).digest()

    async def scenario():
        with SpoolDirectory(root) as directory:
            others = []

            class Continuing(ScriptedInventory):
                async def fragments_of_brokers(self, journal, end):
                    if not others:
                        others.append(OTHER)
                        directory.forget_head(JOURNAL)
                    return await super().fragments_of_brokers(journal, end)

            inventory = Continuing([fragment(0, 4)], digest=digest)
            inventory.head_offset = len(WHOLE)
            made = Made(directory, inventory, other_members=lambda: others)
            await asyncio.wait_for(made.quarantine.run(), 10)
            assert inventory.asked == 2
            assert made.spans == [(0, len(WHOLE))]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "theirs", [[fragment(0, 4)], [fragment(0, 4), fragment(5, 100)], [fragment(4, 100)]]
)
def test_a_replica_waits_for_what_others_lack(root, theirs):
    def digest(begin, end):
        raise UnavailableError("the store fails")

    async def scenario():
        with SpoolDirectory(root) as directory:
            inventory = ScriptedInventory(theirs, digest=digest, stored=[OSError("it fails")])
            made = Made(directory, inventory)
            directory.forget_head(JOURNAL)
            _, ready = made.quarantine.take(JOURNAL, REVISION)
            running = asyncio.ensure_future(made.quarantine.run())
            await until(lambda: inventory.asked > 3)
            assert not ready.fired
            running.cancel()
            await asyncio.wait([running])

    asyncio.run(scenario())


def test_a_shorter_copy_elsewhere_supersedes_nothing_until_the_journal_is_continued(root):
    """It is clear only when somebody goes on: without us, or with us."""

    async def scenario():
        with SpoolDirectory(root) as directory:
            inventory = ScriptedInventory([fragment(0, 4)])
            made = Made(directory, inventory)
            running = asyncio.ensure_future(made.quarantine.run())
            await until(lambda: inventory.asked > 2)
            assert made.uploaded == []
            directory.forget_head(JOURNAL)
            await asyncio.wait_for(running, 10)
            assert made.uploaded == []
        assert recovered(root) == []

    asyncio.run(scenario())


@pytest.mark.parametrize("left_at", [4, len(WHOLE), len(WHOLE) + 1])
@pytest.mark.parametrize("is_contested", [False, True])
def test_a_spool_is_not_used_behind_the_end_at_which_others_left_the_journal(
    root, is_contested, left_at
):
    """All of theirs is stored, and no listing shows it yet. The journal continues at its end."""

    async def scenario():
        with SpoolDirectory(root) as directory:
            made = Made(directory, ScriptedInventory([]), stored_end=left_at)
            if is_contested:
                directory.forget_head(JOURNAL)
            await asyncio.wait_for(made.quarantine.run(), 10)
            is_theirs = is_contested and left_at < len(WHOLE)
            assert made.spans == ([] if is_theirs else [(0, len(WHOLE))])

    asyncio.run(scenario())


def test_bytes_that_others_write_meanwhile_are_no_gap(root):
    """The head is asked for first: what is in front of it is in the inventory."""

    class Growing(ScriptedInventory):
        async def head(self, journal, members, unverified_end):
            head = await super().head(journal, members, unverified_end)
            self.grows_to = [fragment(0, 100)]
            return head

    async def scenario():
        with SpoolDirectory(root) as directory:
            inventory = Growing([fragment(0, 4)])
            inventory.head_offset = 4
            made = Made(directory, inventory, goes_on=lambda: True, continued_by=[OTHER])
            directory.forget_head(JOURNAL)
            await asyncio.wait_for(made.quarantine.run(), 10)
            assert made.spans == []

    asyncio.run(scenario())


@pytest.mark.parametrize("others_have", [[], [fragment(0, 4)]])
@pytest.mark.parametrize("head", [None, 0, 4, len(WHOLE), len(WHOLE) + 1])
def test_a_spool_that_ends_behind_all_is_used_if_others_go_on_behind_it(root, others_have, head):
    """Others learned its end, and have not all of its bytes; or they write at its offsets."""

    def digest(_, end):
        return hashlib.sha1(WHOLE[:4]).digest() if end <= 4 else None

    async def scenario():
        with SpoolDirectory(root) as directory:
            inventory = ScriptedInventory(others_have, digest=digest)
            inventory.head_offset = head
            made = Made(directory, inventory, goes_on=lambda: True, continued_by=[OTHER])
            made.replica = SimpleNamespace(index=Index())
            directory.forget_head(JOURNAL)
            await asyncio.wait_for(made.quarantine.run(), 10)
            is_unknown = not head and not others_have  # with a head of 0 they know nothing
            is_used = is_unknown or (head or 0) >= len(WHOLE)
            assert made.spans == ([(0, len(WHOLE))] if is_used else [])

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("others_have", "head", "restored"),
    [
        ([], 0, True),
        ([], None, False),  # they may have nothing for another reason
        ([fragment(len(WHOLE), 100)], 0, False),
    ],
)
def test_a_journal_of_which_those_who_continued_it_have_nothing_begins_with_our_spools(
    root, others_have, head, restored
):
    """It answered INDEX_HAS_GREATER_OFFSET, as its primary's head is behind what it lists."""

    async def scenario():
        with SpoolDirectory(root) as directory:
            inventory = ScriptedInventory(others_have)
            inventory.head_offset = head
            made = Made(directory, inventory, goes_on=lambda: True, continued_by=[OTHER])
            made.replica = SimpleNamespace(index=Index())
            directory.forget_head(JOURNAL)
            await asyncio.wait_for(made.quarantine.run(), 10)
            found = directory.head(JOURNAL, create_revision=REVISION, cluster_id=CLUSTER)
            assert (found is not None) == restored
            if restored:
                assert found.end == len(WHOLE)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("others_have", "is_in_last_route", "restored"),
    [
        ([], True, True),
        ([fragment(0, len(WHOLE))], True, True),  # the same bytes
        ([fragment(0, 100)], True, False),  # and more
        ([], False, False),  # others may have gone on behind it
        ([fragment(8, 100)], True, False),
        ([fragment(len(WHOLE), 100)], True, False),  # others went on behind it
    ],
)
def test_an_unverified_head_is_used_if_its_spools_are_whole_and_nobody_has_more(
    root, others_have, is_in_last_route, restored
):
    async def scenario():
        with SpoolDirectory(root) as directory:
            inventory = ScriptedInventory(others_have, digest=hashlib.sha1(WHOLE).digest())
            made = Made(directory, inventory, restores_head=is_in_last_route, has_history=False)
            assert made.quarantine.holds(JOURNAL, REVISION)
            seen = []
            _, ready = made.quarantine.take(JOURNAL, REVISION)
            known = {"create_revision": REVISION, "cluster_id": CLUSTER}
            ready.on_fire(lambda: seen.append(directory.head(JOURNAL, **known)))
            await asyncio.wait_for(made.quarantine.run(), 10)
            (head,) = seen  # before a replica begins its spool
            assert (head is not None) == restored
            if restored:
                assert head.end == len(WHOLE)
            assert not made.quarantine.holds(JOURNAL, REVISION)
        with SpoolDirectory(root) as directory:
            directory.recover(CLUSTER)
            assert (directory.head(JOURNAL, **known) is not None) == restored
            unverified = [head.end for head in directory.unverified_heads()]
            assert unverified == ([] if restored else [len(WHOLE)])

    asyncio.run(scenario())


@pytest.mark.parametrize("is_in_last_route", [True, False])
def test_an_unverified_head_is_compared_with_those_of_others_if_it_is_of_the_last_route(
    root, is_in_last_route
):
    """All brokers of a journal may have started again: they must not wait for each other."""

    async def scenario():
        with SpoolDirectory(root) as directory:
            inventory = ScriptedInventory([])
            made = Made(
                directory,
                inventory,
                restores_head=is_in_last_route,
                has_history=False,
                other_members=lambda: [OTHER],
            )
            taken, ready = made.quarantine.take(JOURNAL, REVISION)
            assert not taken
            known = made.quarantine.unverified_end(JOURNAL, REVISION)
            assert known == (len(WHOLE) if is_in_last_route else None)
            await asyncio.wait_for(made.quarantine.run(), 10)
            assert inventory.unverified_end == known
            assert ready.fired
            assert made.quarantine.unverified_end(JOURNAL, REVISION) is None
            assert made.spans == [(0, len(WHOLE))]
            head = directory.head(JOURNAL, create_revision=REVISION, cluster_id=CLUSTER)
            assert (head is not None) == is_in_last_route

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("others_have", "restored"),
    [
        ([fragment(0, len(WHOLE))], True),
        ([], True),
        ([fragment(0, 4), fragment(len(WHOLE) + 5, 100)], False),
    ],
)
def test_an_unverified_head_without_spools_is_in_quarantine_too(root, others_have, restored):
    """All that this broker has written is stored."""

    async def scenario():
        with SpoolDirectory(root) as directory:
            for spool in directory.recover(CLUSTER):
                spool.file.discard()
        with SpoolDirectory(root) as directory:
            made = Made(
                directory, ScriptedInventory(others_have), restores_head=True, has_history=False
            )
            taken, ready = made.quarantine.take(JOURNAL, REVISION)
            assert not taken
            assert not ready.fired
            await asyncio.wait_for(made.quarantine.run(), 10)
            assert ready.fired
            head = directory.head(JOURNAL, create_revision=REVISION, cluster_id=CLUSTER)
            assert (head.end if head else None) == (len(WHOLE) if restored else None)

    asyncio.run(scenario())


def test_an_unverified_head_survives_restarts_until_others_continue_the_journal(root):
    def heads(directory):
        directory.recover(CLUSTER)
        known = directory.head(JOURNAL, create_revision=REVISION, cluster_id=CLUSTER)
        return [known, *(head.end for head in directory.unverified_heads())]

    with SpoolDirectory(root) as directory:
        directory.recover(CLUSTER)
        directory.forget_head(JOURNAL, HeadInput.HISTORY_LOST)
    with SpoolDirectory(root) as directory:
        assert heads(directory) == [None, len(WHOLE)]
        directory.forget_head(JOURNAL, HeadInput.HISTORY_LOST)
        assert directory.restore_head(directory.recover(CLUSTER)[0]) is None
        directory.forget_head(JOURNAL, HeadInput.CONTINUED_BY_OTHERS)
        assert directory.unverified_heads() == []
    with SpoolDirectory(root) as directory:
        assert heads(directory) == [None]


def test_a_change_of_the_route_ends_the_pause(root, monkeypatch):
    monkeypatch.setattr(quarantine, "PAUSE_S_MIN", 1000.0)
    mirror = Mirror()

    async def scenario():
        with SpoolDirectory(root) as directory:
            inventory = ScriptedInventory(UnavailableError("no primary"))
            made = Made(directory, inventory)
            mirror.keyspace.observers.append(
                lambda: made.quarantine.observe(mirror.keyspace.changes)
            )
            running = asyncio.ensure_future(made.quarantine.run())
            await until(lambda: inventory.asked == 1)
            mirror.put(dict([mirror.assignment("another/journal", "broker", 0)]))
            await asyncio.sleep(0.01)
            assert inventory.asked == 1
            inventory.answers = [[]]
            mirror.put(dict([mirror.assignment(JOURNAL, "broker", 0)]))
            await asyncio.wait_for(running, 10)
            assert made.spans == [(0, len(WHOLE))]

    asyncio.run(scenario())


def test_a_replica_that_is_made_during_the_decision_gets_the_usable_part(root):
    class Index:
        def __init__(self):
            self.added = []

        def add_unacknowledged(self, fragment, file):
            self.added.append((fragment, file))

    class Replica:
        index = Index()

    class Slow(ScriptedInventory):
        async def digest(self, journal, begin, end):
            taken, self.ready = made.quarantine.take(journal, REVISION)
            assert not taken
            assert not self.ready.fired
            made.replica = Replica()
            return self.content

    with SpoolDirectory(root) as directory:
        inventory = Slow([fragment(0, 100)], digest=hashlib.sha1(WHOLE).digest())
        made = Made(directory, inventory)
        directory.forget_head(JOURNAL)
        asyncio.run(asyncio.wait_for(made.quarantine.run(), 10))
        assert inventory.ready.fired
        assert made.spans == [(0, len(WHOLE))]
        assert [each.end for each, _ in Replica.index.added] == [len(WHOLE)]


def test_a_stop_releases_replicas_and_uploads_nothing(root):
    async def scenario():
        with SpoolDirectory(root) as directory:
            made = Made(directory, ScriptedInventory([]))
            directory.forget_head(JOURNAL)
            _, ready = made.quarantine.take(JOURNAL, REVISION)
            made.quarantine.stop()
            assert ready.fired
            assert made.uploaded == []

    asyncio.run(scenario())


def test_a_cancelled_decision_leaves_the_spool_in_quarantine(root):
    class Silent(ScriptedInventory):
        is_reading = False

        async def digest(self, journal, begin, end):
            self.is_reading = True
            await asyncio.Event().wait()

    async def scenario():
        with SpoolDirectory(root) as directory:
            inventory = Silent([fragment(0, 100)])
            made = Made(directory, inventory)
            directory.forget_head(JOURNAL)
            running = asyncio.ensure_future(made.quarantine.run())
            await until(lambda: inventory.is_reading)
            running.cancel()
            await asyncio.wait([running])
            taken, ready = made.quarantine.take(JOURNAL, REVISION)
            assert not taken
            assert not ready.fired
            assert made.uploaded == []

    asyncio.run(scenario())

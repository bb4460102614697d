"""The valid part of a recovered spool, and truncation of its files."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.broker.recovery import spools as truncate
from gazette_sdk.broker.recovery.spools import set_superseded_aside, truncate_spool, valid_end
from gazette_sdk.broker.spool.directory import SpoolDirectory
from support.quarantine import (
    JOURNAL,
    WHOLE,
    content_of_spool,
    fragment,
    recovered,
)
from support.spools import CLUSTER, REVISION, SpoolUser

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
def test_a_spool_is_valid_up_to_what_others_have(known, kept):
    assert valid_end(fragment(10, 20, content=b"ours"), known) == kept


spans = st.tuples(st.integers(0, 40), st.integers(1, 10)).map(
    lambda span: fragment(span[0], span[0] + span[1])
)


@given(spans, st.lists(spans))
def test_no_byte_is_kept_which_others_have_and_none_is_lost_before(ours, known):
    known = [each for each in known if (each.begin, each.end) != (ours.begin, ours.end)]
    theirs = {offset for each in known for offset in range(each.begin, each.end)}
    end = valid_end(ours, known)
    assert ours.begin <= end <= ours.end
    assert not theirs & set(range(ours.begin, end))
    assert end == ours.end or end in theirs


# ------------------------------------------------------------------ files


@pytest.mark.parametrize("end", [1, 4, 5, 8, len(WHOLE) - 1])
@pytest.mark.parametrize("synced", [False, True])
def test_a_spool_is_cut(root, end, synced):
    (whole,) = recovered(root)
    cut = truncate_spool(whole, end, synced=synced)
    assert content_of_spool(cut) == WHOLE[:end]
    (again,) = recovered(root)
    assert (again.fragment, again.registers) == (cut.fragment, cut.registers)
    assert content_of_spool(again) == WHOLE[:end]
    if end > 1:
        assert content_of_spool(truncate_spool(again, 1, synced=synced)) == WHOLE[:1]


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("at", ["write", "rename", "truncate"])
def test_a_crash_while_it_is_cut_leaves_all_of_it_or_the_beginning(root, at, monkeypatch):
    (whole,) = recovered(root)

    def die(*_, **__):
        raise Killed

    steps = {
        "write": (truncate.CommitLog, "append"),
        "rename": (truncate.Path, "rename"),
        "truncate": (truncate.os, "truncate"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*steps[at], die)
        with pytest.raises(Killed):
            truncate_spool(whole, 8, synced=False)
    (again,) = recovered(root)
    assert content_of_spool(again) == (WHOLE[:8] if at == "truncate" else WHOLE)
    if at != "truncate":
        assert content_of_spool(truncate_spool(again, 8, synced=False)) == WHOLE[:8]


def test_superseded_files_stay_where_they_are(root):
    (spool,) = recovered(root)
    aside = set_superseded_aside(spool)
    assert aside.name.endswith(".content.superseded")
    assert recovered(root) == []
    assert aside.read_bytes() == WHOLE
    assert len(list(aside.parent.glob("*.superseded"))) == 2
    assert set_superseded_aside(spool) == aside


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
    set_superseded_aside(spool)

    async def scenario():
        with SpoolDirectory(root) as directory:
            directory.recover(CLUSTER)
            user = SpoolUser(directory, JOURNAL)
            await user.append(b"other")
            assert user.spool.content_file.path != spool.file.path

    asyncio.run(scenario())


def test_a_contested_spool_is_contested_at_each_later_start_and_new_ones_are_not(root):
    async def scenario():
        with SpoolDirectory(root) as directory:
            (spool,) = directory.recover(CLUSTER)
            assert not directory.is_contested(spool)
            directory.forget_head(JOURNAL)
            assert directory.is_contested(spool)
        with SpoolDirectory(root) as directory:
            (spool,) = directory.recover(CLUSTER)
            assert directory.is_contested(spool)
            spool.file.discard()
        with SpoolDirectory(root) as directory:
            assert directory.recover(CLUSTER) == []
            user = SpoolUser(directory, JOURNAL)
            await user.append(b"new")
            file = user.spool.content_file
        with SpoolDirectory(root) as directory:
            (spool,) = directory.recover(CLUSTER)
            assert spool.file.path == file.path
            assert not directory.is_contested(spool)
            head = directory.head(JOURNAL, create_revision=REVISION, cluster_id=CLUSTER)
            assert head.end == 3

    asyncio.run(scenario())

"""The checker of a journal's promises: kept ones pass, and each violation is reported."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.testing.journal_checker import (
    Copy,
    JournalChecker,
    JournalPromiseError,
    Promise,
    raise_violations,
)

J = "a/journal"
ONE, TWO, THREE = b"one, " * 20, b"two, " * 30, b"three, " * 10
CONTENT = ONE + TWO + THREE


@pytest.fixture
def checker():
    """Events of a journal with three appends; the second one's answer was lost."""
    checker = JournalChecker()
    checker.acknowledged(J, 0, len(ONE), ONE, client="ada")
    checker.uncertain(J, TWO, client="bob")
    begin = len(ONE) + len(TWO)
    checker.acknowledged(
        J,
        begin,
        begin + len(THREE),
        sha1=hashlib.sha1(THREE).digest(),
        client="ada",
    )
    checker.read(J, 0, ONE[:50], reader="tail", write_head=len(ONE))
    checker.read(J, 50, CONTENT[50:], reader="tail", write_head=len(CONTENT))
    return checker


def copies(content=CONTENT, *others):
    return [Copy("broker a", 0, content), Copy("broker b", 0, content), *others]


def found(checker, copies, **more):
    """The violated promises, and the text of all violations."""
    violations = checker.check(J, copies, **more)
    return {each.promise for each in violations}, "\n".join(map(str, violations))


def test_a_journal_that_keeps_its_promises_has_no_violation(checker):
    fragments = [
        Copy("store", 0, CONTENT[:130], complete=False),
        Copy("store", 120, CONTENT[120:], complete=False),
    ]
    assert checker.check(J, copies(CONTENT, *fragments), stored=True) == []
    raise_violations([])
    assert checker.journals == [J]


def test_an_uncertain_append_may_be_absent():
    checker = JournalChecker()
    checker.acknowledged(J, 0, len(ONE), ONE)
    checker.uncertain(J, TWO)
    assert checker.check(J, copies(ONE)) == []


def test_lost_content_is_reported(checker):
    promises, text = found(checker, copies(ONE + TWO))
    assert promises == {Promise.READABLE, Promise.READ_COMMITTED, Promise.HEAD_ADVANCES}
    assert "the append of [250, 320) by 'ada' was acknowledged" in text
    assert "broker a has [0, 250) only" in text
    assert "was told the write head 320, and the journal ends at 250" in text


def test_changed_content_is_reported(checker):
    promises, text = found(checker, copies(b"X" + CONTENT[1:]))
    assert promises == {Promise.UNCHANGED, Promise.READ_COMMITTED}
    assert "a/journal at offset 0: the append of [0, 100) by 'ada'" in text
    assert "other bytes there" in text
    assert "reader 'tail' saw [0, 320) with other bytes" in text


def test_an_offset_that_is_given_twice_is_reported(checker):
    checker.acknowledged(J, 90, 95, b"again", client="eve")
    promises, text = found(checker, copies())
    assert promises == {Promise.OFFSETS_ONCE, Promise.UNCHANGED}
    assert "[90, 95) by 'eve' and the append of [0, 100) by 'ada' were both acknowledged" in text


@pytest.mark.parametrize(
    "between",
    [
        pytest.param(TWO[:40], id="torn"),
        pytest.param(TWO[:75] + b"ten" + TWO[75:], id="interleaved"),
        pytest.param(b"from nobody", id="foreign"),
    ],
)
def test_bytes_of_no_whole_append_are_reported(between):
    checker = JournalChecker()
    checker.acknowledged(J, 0, len(ONE), ONE)
    checker.uncertain(J, TWO)
    checker.uncertain(J, b"ten")
    promises, text = found(checker, copies(ONE + between))
    assert promises == {Promise.WHOLE_APPENDS}
    assert f"at offset 100: up to {100 + len(between)} stand bytes of no whole append" in text
    others = JournalChecker(knows_all_appends=False)
    others.acknowledged(J, 0, len(ONE), ONE)
    assert others.check(J, copies(ONE + between)) == []


def test_a_rejected_append_that_is_there_is_reported():
    checker = JournalChecker()
    checker.rejected(J, ONE, client="ada")
    checker.uncertain(J, TWO)
    promises, text = found(checker, copies(TWO + ONE))
    assert promises == {Promise.REJECTED_ABSENT}
    assert "at offset 150: an append of 100 bytes by 'ada' was rejected, and is there" in text


def test_an_append_that_is_there_twice_is_reported(checker):
    promises, text = found(checker, copies(CONTENT + ONE + TWO))
    assert promises == {Promise.APPENDED_ONCE}
    assert "at offset 320: an append of 100 bytes by 'ada' stands there once more" in text
    assert "at offset 420: an append of 150 bytes by 'bob' stands there once more" in text


def test_as_many_copies_are_allowed_as_there_were_attempts():
    checker = JournalChecker()
    checker.acknowledged(J, 100, 200, ONE, attempts=2)
    checker.uncertain(J, TWO, attempts=2)
    assert checker.check(J, copies(ONE + ONE + TWO + TWO)) == []
    promises, _ = found(checker, copies(ONE + ONE + TWO + TWO + TWO))
    assert promises == {Promise.APPENDED_ONCE}


def test_bytes_that_a_reader_saw_before_their_commit_are_reported(checker):
    checker.read(J, len(CONTENT), b"rolled back", reader="hasty")
    promises, text = found(checker, copies())
    assert promises == {Promise.READ_COMMITTED}
    assert "reader 'hasty' saw [320, 331), and the journal ends at 320" in text


def test_every_range_that_a_reader_saw_is_checked():
    content = bytes(range(256)) * 20_000
    checker = JournalChecker(knows_all_appends=False)
    for begin in range(0, len(content), 100_000):
        checker.read(J, begin, content[begin : begin + 100_000], reader="r")
    checker.read(J, 7, content[7:900], reader="r")
    assert checker.check(J, copies(content)) == []
    for at in (8, 2_000_000, len(content) - 1):
        changed = bytearray(content)
        changed[at] ^= 1
        promises, _ = found(checker, copies(bytes(changed)))
        assert promises == {Promise.READ_COMMITTED}


def test_brokers_and_stores_that_differ_are_reported(checker):
    changed = bytearray(CONTENT)
    changed[200] ^= 1
    promises, text = found(checker, [*copies(), Copy("broker c", 0, bytes(changed))])
    assert promises == {Promise.REPLICAS_EQUAL}
    assert "at offset 200: broker c and broker a differ" in text
    promises, text = found(checker, [*copies(), Copy("broker c", 0, CONTENT[:-1])])
    assert promises == {Promise.REPLICAS_EQUAL}
    assert "at offset 319: broker c ends there, and broker a at 320" in text
    fragment = Copy("store file:///", 100, bytes(changed[100:]), complete=False)
    promises, text = found(checker, copies(CONTENT, fragment))
    assert promises == {Promise.REPLICAS_EQUAL}
    assert "at offset 200: store file:/// and broker a differ" in text
    fragment = Copy("store file:///", 300, CONTENT[300:] + b"more", complete=False)
    promises, text = found(checker, copies(CONTENT, fragment))
    assert promises == {Promise.REPLICAS_EQUAL}
    assert "store file:/// has content up to 324 that no broker has" in text


def test_content_that_is_not_stored_is_reported(checker):
    fragment = Copy("store", 0, CONTENT[:300], complete=False)
    promises, text = found(checker, copies(CONTENT, fragment), stored=True)
    assert promises == {Promise.STORED}
    assert "[250, 320) by 'ada' was acknowledged, and no store has all of it" in text


def test_a_journal_that_no_broker_has_is_reported(checker):
    promises, text = found(checker, [])
    assert Promise.READABLE in promises
    assert "no broker has the journal" in text


def test_an_error_shows_the_first_violations():
    checker = JournalChecker()
    for number in range(20):
        checker.acknowledged(J, number * 3, number * 3 + 3, b"abc")
    with pytest.raises(JournalPromiseError, match="and 10 more") as caught:
        raise_violations(checker.check(J, copies(b"")))
    assert len(caught.value.violations) == 20


@pytest.mark.parametrize(
    ("arguments", "text"),
    [((0, 5, b"four"), "4 bytes"), ((0, 5), "SHA-1")],
)
def test_impossible_appends_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        JournalChecker().acknowledged(J, *arguments)


APPENDS = st.lists(
    st.tuples(st.binary(min_size=1, max_size=6), st.sampled_from(["ack", "written", "lost"])),
    max_size=12,
)


@given(APPENDS, st.data())
def test_no_history_that_is_true_is_a_violation(appends, data):
    checker = JournalChecker()
    content = b""
    for piece, outcome in appends:
        if outcome == "ack":
            checker.acknowledged(J, len(content), len(content) + len(piece), piece)
        else:
            checker.uncertain(J, piece)
        if outcome != "lost":
            content += piece
    for _ in range(3):
        begin = data.draw(st.integers(0, len(content)))
        end = data.draw(st.integers(begin, len(content)))
        checker.read(J, begin, content[begin:end], reader="r", write_head=end)
    assert checker.check(J, copies(content)) == []


@given(APPENDS.filter(lambda appends: any(o == "ack" for _, o in appends)), st.data())
def test_any_change_of_acknowledged_bytes_is_a_violation(appends, data):
    checker = JournalChecker()
    content, acknowledged = b"", []
    for piece, outcome in appends:
        if outcome == "ack":
            checker.acknowledged(J, len(content), len(content) + len(piece), piece)
            acknowledged += range(len(content), len(content) + len(piece))
        else:
            checker.uncertain(J, piece)
        if outcome != "lost":
            content += piece
    changed = bytearray(content)
    changed[data.draw(st.sampled_from(acknowledged))] ^= data.draw(st.integers(1, 255))
    promises, _ = found(checker, copies(bytes(changed)))
    assert Promise.UNCHANGED in promises
    promises, _ = found(checker, copies(content[: acknowledged[-1]]))
    assert Promise.READABLE in promises

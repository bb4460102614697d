"""Lost, duplicated, reordered and changed messages are named."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.cli.bench.site import Messages
from gazette_sdk.cli.bench.verify import NAMED_MAX, Chain, Findings, Ledger, Reading, journal_of
from gazette_sdk.cli.program import CommandFailedError
from gazette_sdk.message.uuid import Envelope

JOURNALS = ("a/0", "a/1", "a/2")
MESSAGES = Messages(100)
COUNT = 60


def envelope(number, journal=None, **changes):
    return Envelope(
        journal or journal_of(number, JOURNALS),
        number * 100,
        number * 100 + 100,
        {"UUID": "…", **MESSAGES.message(number), **changes},
    )


def by_journal(count=COUNT, begin=0):
    """Envelopes as a reader delivers them: journal by journal."""
    return [
        envelope(number)
        for journal in JOURNALS
        for number in range(begin, count)
        if journal_of(number, JOURNALS) == journal
    ]


def acknowledged(count=COUNT):
    ledger = Ledger(JOURNALS)
    ledger.acknowledge(ledger.take(count), [(journal, 1 + count) for journal in JOURNALS])
    return ledger


def read(envelopes, block=7, count=COUNT, begin=0):
    reading = Reading(JOURNALS, MESSAGES, begin)
    for start in range(0, len(envelopes), block):
        reading.feed(envelopes[start : start + block])
    chains = acknowledged(count).chains(MESSAGES) if begin == 0 else None
    return reading.finish(count, chains)


def counts(findings):
    return {kind: defects.count for kind, defects in findings.by_kind.items() if defects.count}


@pytest.mark.parametrize("block", [1, 7, 1000])
@pytest.mark.parametrize("count", [0, 1, 2, COUNT])
def test_what_was_acknowledged_is_flawless_however_it_comes(block, count):
    findings = read(by_journal(count), block, count)
    assert findings.is_flawless
    assert (findings.count, str(findings)) == (count, "")


def test_a_reading_may_begin_later():
    assert read(by_journal(begin=31), begin=31).is_flawless
    assert counts(read(by_journal(begin=32), begin=31)) == {"lost": 1}


def test_lost_messages_are_named():
    found = [each for each in by_journal() if each.message["n"] not in {4, 30, 33, 59}]
    findings = read(found)
    assert counts(findings) == {"lost": 4}
    assert findings.lost.named == [
        "a/0: 2 messages from 30 to 33",
        "a/1: message 4",
        "a/2: message 59",
    ]


def test_a_journal_of_which_nothing_came_is_lost():
    findings = read([each for each in by_journal() if each.journal != "a/1"])
    assert findings.lost.named == ["a/1: 20 messages from 1 to 58"]


@pytest.mark.parametrize("copies", [1, 3])
def test_duplicated_messages_are_named_where_they_stand(copies):
    found = by_journal()
    found[10:10] = [found[5]] * copies
    findings = read(found)
    assert counts(findings) == {"duplicated": copies}
    assert findings.duplicated.named == ["a/0: message 15 at offset 1500"] * copies


def test_reordered_messages_are_named():
    found = by_journal()
    found[3], found[4] = found[4], found[3]
    findings = read(found)
    assert counts(findings) == {"reordered": 1}
    assert findings.reordered.named == ["a/0: message 9 at offset 900"]


@pytest.mark.parametrize("block", [1, 7, 100])
def test_changed_messages_are_named(block):
    found = by_journal()
    found[3] = envelope(9, text="something else")
    findings = read(found, block)
    assert findings.changed.named == ["a/0: message 9 at offset 900"]


@pytest.mark.parametrize(
    ("strange", "shown"),
    [({"n": "9"}, "'9'"), ({"n": None}, "None"), ({"n": -3}, "-3"), ({"n": 10}, "10")],
)
def test_foreign_messages_are_changed_ones(strange, shown):
    found = by_journal()
    found.insert(3, envelope(9, **strange))
    findings = read(found)
    assert findings.changed.named == [f"a/0: a foreign message (n = {shown}) at offset 900"]


def test_messages_in_the_wrong_journal_are_foreign_there_and_lost_here():
    found = by_journal()
    found[3] = envelope(10, journal="a/0")
    assert counts(read(found)) == {"lost": 1, "changed": 1}


def test_messages_that_nobody_acknowledged_are_foreign():
    found = [*by_journal(), envelope(COUNT + 2)]
    findings = read(found)
    assert not findings.is_flawless
    assert findings.changed.named == ["a/2: message 62, which was not acknowledged"]


def test_only_the_first_defects_are_named_and_all_are_counted():
    findings = read([each for each in by_journal() if each.message["n"] % 2])
    assert findings.lost.count == COUNT // 2
    assert len(findings.lost.named) == NAMED_MAX
    assert str(findings).startswith("30 lost (a/0: message 0, a/0: message 6,")
    assert str(findings).endswith(", …)")


def test_findings_of_several_readers_add_up():
    both = Findings()
    both.add(read(by_journal()[1:]))
    both.add(read(by_journal()[:-1]))
    assert (both.count, both.lost.count) == (2 * COUNT - 2, 2)
    assert both.lost.named == ["a/0: message 0", "a/2: message 59"]


@given(st.data())
def test_no_change_of_the_sequence_goes_unnoticed(data):
    found = by_journal()
    place = data.draw(st.integers(0, len(found) - 1))
    other = data.draw(st.integers(0, len(found) - 1))
    kind = data.draw(st.sampled_from(["drop", "repeat", "move", "alter"]))
    if kind == "drop":
        del found[place]
    elif kind == "repeat":
        found.insert(other, found[place])
    elif kind == "alter":
        number = found[place].message["n"]
        found[place] = envelope(number, text=MESSAGES.text(number + 1))
    else:
        order = [each for each in found if each.journal == found[place].journal]
        found.insert(other, found.pop(place))
        if order == [each for each in found if each.journal == order[0].journal]:
            return  # between journals there is no order
    findings = read(found, data.draw(st.integers(1, 70)))
    assert not findings.is_flawless
    kinds = {"drop": "lost", "repeat": "duplicated", "move": "reordered", "alter": "changed"}
    assert kinds[kind] in counts(findings)


# ---------------------------------------------------------------------- chains


@given(st.lists(st.integers(0, 40), max_size=4))
def test_a_chain_does_not_depend_on_how_messages_are_grouped(cuts):
    numbers = range(40)
    whole, grouped = Chain(), Chain()
    whole.add(numbers, map(MESSAGES.text, numbers))
    places = [0, *sorted(cuts), 40]
    for begin, end in pairwise(places):
        grouped.add(numbers[begin:end], map(MESSAGES.text, numbers[begin:end]))
    assert grouped.end == whole.end


def test_a_chain_that_differs_is_told_of_where_nothing_else_is():
    reading = Reading(JOURNALS, MESSAGES)
    reading.feed(by_journal())
    chains = acknowledged().chains(MESSAGES)
    chains["a/1"] = "0" * 32
    findings = reading.finish(COUNT, chains)
    assert findings.changed.named == ["a/1: the chain over all its messages"]


# ---------------------------------------------------------------------- ledger


def test_acknowledgements_behind_earlier_ones_are_no_order():
    ledger = Ledger(JOURNALS)
    ledger.acknowledge(ledger.take(3), [("a/0", 100), ("a/1", 100), ("a/2", 100)])
    ledger.acknowledge(ledger.take(1), [("a/0", 200)])
    assert (ledger.acknowledged, ledger.length_bytes) == (4, 400)
    with pytest.raises(CommandFailedError, match=r"a/1: messages 4 to 4 .* offset 100"):
        ledger.acknowledge(ledger.take(1), [("a/1", 100)])

"""The checker of transactions finds everything that may go wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crash.transactions import History, Message, Transaction, check_uninterrupted


def history_of(*transactions: Transaction) -> History:
    history = History()
    for transaction in transactions:
        history.decide(transaction)
    return history


FIRST = Transaction("ada", 0, 7, ("a", "b", "a"))
SECOND = Transaction("ada", 1, 9, ("b", "a"))
OTHER = Transaction("bob", 0, 1, ("a", "b"))


def perfect() -> dict[str, list[Message]]:
    return {name: [m for t in (FIRST, OTHER, SECOND) for m in t.messages_of(name)] for name in "ab"}


def test_what_is_as_it_must_be_passes():
    history = history_of(FIRST, OTHER, SECOND)
    history.check(perfect())
    check_uninterrupted(perfect())
    assert history.decided_count == 3
    # Producers are independent of each other.
    history.check({"a": list(perfect()["a"][2:3] + perfect()["a"][:2] + perfect()["a"][3:]),
                   "b": perfect()["b"]})  # fmt: skip
    History().check({})


def test_a_lost_message_is_found():
    delivered = perfect()
    delivered["a"].remove(Message("ada", 0, 7, 2))
    with pytest.raises(AssertionError, match="a: transaction 0 of ada, which was decided, was del"):
        history_of(FIRST, OTHER, SECOND).check(delivered)


def test_a_transaction_that_is_missing_in_one_journal_is_found():
    delivered = perfect()
    delivered["b"].remove(Message("ada", 0, 7, 1))
    history = history_of(FIRST, OTHER, SECOND)
    history.acknowledge("ada", 0)
    with pytest.raises(AssertionError, match=r"b: transaction 0 .* was acknowledged, was lost"):
        history.check(delivered)


def test_a_journal_that_is_missing_altogether_is_found():
    delivered = perfect()
    del delivered["b"]
    with pytest.raises(AssertionError, match=r"b: transaction 0 of ada, .* was lost"):
        history_of(FIRST, OTHER, SECOND).check(delivered)


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_message_that_is_delivered_twice_is_found(place):
    delivered = perfect()
    delivered["a"].insert(place, Message("ada", 0, 7, 0))
    with pytest.raises(AssertionError, match="delivered 2 times"):
        history_of(FIRST, OTHER, SECOND).check(delivered)


def test_a_message_of_an_attempt_that_was_never_decided_is_found():
    for stranger in (Message("ada", 1, 8, 0), Message("ada", 2, 9, 0), Message("eve", 0, 0, 0)):
        delivered = perfect()
        delivered["a"].append(stranger)
        with pytest.raises(AssertionError, match="was never decided"):
            history_of(FIRST, OTHER, SECOND).check(delivered)
    delivered = {**perfect(), "c": [Message("ada", 0, 7, 0)]}
    with pytest.raises(AssertionError, match=r"c: .* was never decided"):
        history_of(FIRST, OTHER, SECOND).check(delivered)


def test_another_attempt_in_place_of_the_decided_one_is_found():
    delivered = {"a": [Message("bob", 0, 2, 0)], "b": [Message("bob", 0, 2, 1)]}
    with pytest.raises(AssertionError, match="was never decided"):
        history_of(OTHER).check(delivered)


def test_messages_out_of_order_are_found():
    history = history_of(FIRST, OTHER, SECOND)
    delivered = perfect()
    a = delivered["a"]
    a[0], a[1] = a[1], a[0]
    with pytest.raises(AssertionError, match=r"where .*index=0.* is due"):
        history.check(delivered)
    delivered = perfect()
    delivered["b"].reverse()
    with pytest.raises(AssertionError, match=r"b: .*number=1.* where .*number=0.* is due"):
        history.check(delivered)


def test_an_interrupted_transaction_is_found():
    delivered = perfect()
    a = delivered["a"]
    a[1], a[2] = a[2], a[1]
    history_of(FIRST, OTHER, SECOND).check(delivered)
    with pytest.raises(AssertionError, match="transaction 0 of ada was interrupted before mess"):
        check_uninterrupted(delivered)


def test_a_history_refuses_to_be_wrong_itself():
    history = history_of(FIRST)
    history.decide(FIRST)
    assert history.decided_count == 1
    with pytest.raises(AssertionError, match="behind"):
        history.decide(Transaction("ada", 2, 9, ("a",)))
    with pytest.raises(AssertionError, match="behind"):
        history.decide(Transaction("ada", 0, 8, ("a",)))
    with pytest.raises(AssertionError, match="before it was decided"):
        history.acknowledge("ada", 1)
    history.acknowledge("ada", 0)


transactions = st.lists(
    st.tuples(st.sampled_from(["ada", "bob"]), st.lists(st.sampled_from("abc"), min_size=1)),
    min_size=1,
)


@given(plan=transactions, data=st.data())
def test_no_single_change_escapes(plan, data):
    history = History()
    delivered: dict[str, list[Message]] = {name: [] for name in "abc"}
    for producer, journals in plan:
        number = len(history.decided.get(producer, []))
        transaction = Transaction(producer, number, 0, tuple(journals))
        history.decide(transaction)
        for name, messages in delivered.items():
            messages.extend(transaction.messages_of(name))
    history.check(delivered)
    check_uninterrupted(delivered)

    messages = delivered[data.draw(st.sampled_from([n for n in "abc" if delivered[n]]))]
    place = data.draw(st.integers(0, len(messages) - 1))
    change = data.draw(st.sampled_from(["lose", "repeat", "undecided", "swap"]))
    if change == "lose":
        del messages[place]
    elif change == "repeat":
        messages.insert(data.draw(st.integers(0, len(messages))), messages[place])
    elif change == "undecided":
        messages.insert(place, messages[place]._replace(attempt=1))
    else:
        same = [i for i, m in enumerate(messages) if m.producer == messages[place].producer]
        other = data.draw(st.sampled_from(same))
        if other == place:
            return
        messages[place], messages[other] = messages[other], messages[place]
    with pytest.raises(AssertionError):
        history.check(delivered)

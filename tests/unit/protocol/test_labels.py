from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import labels
from support.vectors import build, cases, label_set, refuses


@pytest.mark.parametrize("case", cases("broker", "label"))
def test_labels_follow_the_vectors(case):
    with refuses(case["expect"]):
        labels.validate_label(build(pb.Label, case["input"]))


@pytest.mark.parametrize("case", cases("broker", "single_value_labels"))
def test_names_with_a_single_value_follow_the_vectors(case):
    with refuses(case["expect"]):
        labels.validate_single_values(label_set(case["input"]))


@pytest.mark.parametrize("case", cases("broker", "label_set_validate"))
def test_label_sets_follow_the_vectors(case):
    with refuses(case["expect"]):
        labels.validate_label_set(label_set(case["input"]))


@pytest.mark.parametrize("case", cases("broker", "label_ops"))
def test_operations_follow_the_vectors(case):
    kind = case["kind"]
    if kind == "sequence":
        given_set = label_set(case["initial"])
        operations = {"add": labels.add, "set": labels.set_value, "remove": labels.remove}
        for step in case["steps"]:
            operations[step["op"]](given_set, *step["args"])
            if "expect" in step:
                assert given_set == label_set(step["expect"])
    elif kind == "values_of":
        given_set = label_set(case["set"])
        assert labels.values_of(given_set, case["name"]) == case["expect"]
        assert labels.value_of(given_set, case["name"]) == case["expect_first"]
    elif kind == "assign":
        given_set = label_set(case["initial"])
        given_set.CopyFrom(label_set(case["other"]))
        assert given_set == label_set(case["expect"])
    elif kind == "equal":
        assert (label_set(case["lhs"]) == label_set(case["rhs"])) == case["expect"]
    else:
        operation = {
            "union": labels.union,
            "intersect": labels.intersect,
            "subtract": labels.subtract,
        }[kind]
        assert operation(label_set(case["lhs"]), label_set(case["rhs"])) == label_set(
            case["expect"]
        )


def test_a_prefix_label_outside_of_a_selector_is_refused():
    given_set = labels.label_set([("aaa:prefix", "b/")])
    with pytest.raises(ValidationError) as caught:
        labels.validate_label_set(given_set, "Registers")
    assert (caught.value.kind, caught.value.path) == ("prefix_not_allowed", "Registers.Labels[0]")
    labels.validate_label_set(given_set, allow_prefix=True)


def test_a_label_with_and_without_its_prefix_flag_leaves_an_invalid_set():
    given_set = labels.label_set([("aa", "v"), ("aa:prefix", "v")])
    assert len(given_set.labels) == 2
    with pytest.raises(ValidationError, match="sorted and unique"):
        labels.validate_label_set(given_set, allow_prefix=True)


def test_keyword_arguments_are_labels():
    given_set = labels.label_set([("topic", "orders")], app="shop")
    assert list(labels.pairs_of(given_set)) == [("app", "shop"), ("topic", "orders")]


names = st.sampled_from(["aa", "aaa", "bb", "b-c", "zz", "éé"])
values = st.sampled_from(["", "1", "2", "x/y", "é"])
sets = st.dictionaries(
    names, st.one_of(st.just([""]), st.lists(values.filter(bool), min_size=1, unique=True))
).map(lambda groups: labels.label_set((n, v) for n, vs in groups.items() for v in vs))


@given(sets, names, values)
def test_changes_keep_the_order(given_set, name, value):
    labels.add(given_set, name, value)
    found = list(labels.pairs_of(given_set))
    assert found == sorted(set(found))
    assert [pair for pair in found if pair[0].encode() == name.encode()]
    labels.set_value(given_set, name, value)
    assert labels.values_of(given_set, name) == [value]
    labels.remove(given_set, name)
    assert not labels.values_of(given_set, name)
    labels.validate_label_set(given_set)


@given(sets, sets)
def test_set_operations_keep_the_order_and_undo_each_other(left, right):
    shared = labels.intersect(left, right)
    for made in (labels.union(left, right), shared, labels.subtract(left, right)):
        labels.validate_label_set(made)
    assert labels.intersect(right, left) == shared
    assert labels.union(labels.subtract(left, shared), shared) == left
    assert labels.subtract(left, left) == pb.LabelSet()
    assert labels.union(left, left) == left

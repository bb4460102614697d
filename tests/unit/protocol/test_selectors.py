from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import labels
from gazette_sdk.protocol import labels as selectors
from gazette_sdk.protocol.labels import format_selector, parse_selector
from support.vectors import cases, label_set, normal, refuses, selector


@pytest.mark.parametrize("case", cases("broker", "selector_validate"))
def test_selectors_follow_the_vectors(case):
    with refuses(case["expect"]):
        selectors.validate_selector(selector(case["input"]))


@pytest.mark.parametrize("case", cases("broker", "selector_match"))
def test_matching_follows_the_vectors(case):
    assert selectors.matches(selector(case["selector"]), label_set(case["set"])) == case["expect"]


@pytest.mark.parametrize("case", cases("broker", "selector_parse"))
def test_parsing_follows_the_vectors(case):
    parsed = parse_selector(case["input"])
    assert normal(parsed) == normal(selector(case["expect"]))
    assert format_selector(parsed) == case["canonical"]
    if case["round_trips"]:
        assert parse_selector(case["canonical"]) == parsed


@pytest.mark.parametrize("case", cases("broker", "selector_parse_errors"))
def test_what_cannot_be_parsed_is_quoted(case):
    with refuses(case["expect"]):
        parse_selector(case["input"])
    with pytest.raises(ValidationError) as caught:
        parse_selector(case["input"])
    assert case.get("unmatched", "") in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", True),
        ("name=a/journal", True),
        ("name=a/other", False),
        ("name:prefix=a/j", True),
        ("name:prefix=b/", False),
        ("prefix=a/", False),  # means something to List only
        ("topic=orders", True),
        ("topic=orders,name=a/journal", True),
        ("topic in (x,orders),!draft", True),
        ("topic!=orders", False),
        ("!topic", False),
        ("topic", True),
        ("!name", False),
        ("tag=one,tag=two", True),
        ("tag=three", False),
    ],
)
def test_journals_are_matched_by_labels_and_name(text, expected):
    spec = pb.JournalSpec(
        name="a/journal",
        labels=labels.label_set([("topic", "orders"), ("tag", "one"), ("tag", "two")]),
    )
    assert selectors.matches_journal(parse_selector(text), spec) == expected
    labels.add(spec.labels, labels.NAME, spec.name)
    assert selectors.matches(parse_selector(text), spec.labels) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name=a/journal", {"a/journal"}),
        ("name in (b,a),topic=orders,name!=c", {"a", "b"}),
        ("name", None),
        ("name:prefix=a/", None),
        ("name=a,name:prefix=b/", None),
        ("name!=a", None),
        ("topic=orders", None),
        ("", None),
    ],
)
def test_a_selector_tells_the_only_names_it_may_match(text, expected):
    assert selectors.Matcher(parse_selector(text)).names == expected


@pytest.mark.parametrize(
    ("text", "rewritten"),
    [
        ("prefix=a/b/", "name:prefix=a/b/"),
        ("prefix!=a/b/,topic=x", "topic=x,name:prefix!=a/b/"),
        ("prefix in (a/,b/),name=c", "name=c,name:prefix in (a/,b/)"),
        ("prefix:prefix=a/", "name:prefix=a/"),
        ("name:prefix=a", "name:prefix=a"),
    ],
)
def test_list_takes_prefix_for_a_prefix_of_the_name(text, rewritten):
    assert format_selector(selectors.rewrite_prefix(parse_selector(text))) == rewritten


def test_a_journals_own_selector_has_no_metadata():
    assert format_selector(selectors.journal_selector("a/journal;meta")) == "name=a/journal"


@pytest.mark.parametrize(
    ("text", "value"), [("aa===b", "=b"), ("aa==b", "b"), ("aa=b=c", "b=c"), ("aa = b", "b")]
)
def test_equality_operators_are_greedy(text, value):
    assert labels.values_of(parse_selector(text).include, "aa") == [value]


@pytest.mark.parametrize(
    "text", ["  foo", "foo  ,bar", "foo in ()", "foo in (a) bar", " ", "foo,,"]
)
def test_at_most_one_space_is_accepted_and_no_expression_is_empty(text):
    with pytest.raises(ValidationError) as caught:
        parse_selector(text)
    assert caught.value.kind == "unmatched_expression"


token = st.text(st.sampled_from("abz09-_+/.éⅧ"), min_size=2, max_size=6)
value = st.text(st.sampled_from("abz09-_+/.=%é"), max_size=5)


def _halves(value):
    group = st.one_of(
        st.just([("", False)]),
        st.lists(
            st.tuples(value.filter(bool), st.booleans()),
            min_size=1,
            max_size=4,
            unique_by=lambda pair: pair[0],
        ),
    )
    return st.dictionaries(token, group, max_size=4).map(
        lambda groups: labels.label_set(
            (name + ":prefix" * prefix, value)
            for name, pairs in groups.items()
            for value, prefix in pairs
        )
    )


@given(_halves(value.filter(lambda text: not text.startswith("="))), _halves(value))
def test_parsing_the_canonical_text_gives_the_same_selector(include, exclude):
    given_selector = pb.LabelSelector(include=include, exclude=exclude)
    selectors.validate_selector(given_selector)
    text = format_selector(given_selector)
    assert normal(parse_selector(text)) == normal(given_selector)
    assert format_selector(parse_selector(text)) == text


def test_the_documented_exception_loses_one_equals_sign():
    text = format_selector(pb.LabelSelector(include=labels.label_set([("aa", "=b")])))
    assert text == "aa==b"
    assert labels.values_of(parse_selector(text).include, "aa") == ["b"]


@given(_halves(value), _halves(value), _halves(value))
def test_matching_agrees_with_its_definition(include, exclude, labelled):
    for label in labelled.labels:
        label.prefix = False

    def pair_matches(wanted, have):
        if wanted.name != have.name:
            return False
        if wanted.value == "":
            return True
        return have.value.startswith(wanted.value) if wanted.prefix else wanted.value == have.value

    def name_matches(half, name):
        return any(
            pair_matches(wanted, have)
            for wanted in half.labels
            if wanted.name == name
            for have in labelled.labels
        )

    expected = all(name_matches(include, label.name) for label in include.labels) and not any(
        name_matches(exclude, label.name) for label in exclude.labels
    )
    given_selector = pb.LabelSelector(include=include, exclude=exclude)
    assert selectors.matches(given_selector, labelled) == expected

"""Lifecycle rules of S3, which remove fragments that recoveries need."""

from __future__ import annotations

import pytest


def rule(number, prefix, **changes):
    known = {"ID": str(number), "Status": "Enabled", "Expiration": {"Days": 1}}
    return {**known, "Filter": {"Prefix": prefix}, **changes}


def set_rules(store, *rules):
    store._call(
        lambda: store._request(
            "put_bucket_lifecycle_configuration",
            LifecycleConfiguration={"Rules": list(rules)},
        )
    )


def test_journals_whose_objects_a_rule_removes_are_named(make_store):
    store = make_store("s3", prefix="some/")
    names = ["logs/one", "logs/two", "other/three"]
    assert store.expiring(names) == []
    set_rules(
        store,
        rule(1, "some/logs/one/"),
        rule(2, "some/other/", Status="Disabled"),
        rule(3, "elsewhere/"),
    )
    assert store.expiring(names) == ["logs/one"]
    set_rules(store, rule(1, "some/lo"))
    assert store.expiring(names) == ["logs/one", "logs/two"]
    set_rules(store, rule(1, ""))
    assert store.expiring(names) == names


def test_rules_that_cannot_be_read_are_an_error(make_store):
    store = make_store("s3", create=False)
    with pytest.raises(OSError, match=r"."):
        store.expiring(["logs/one"])

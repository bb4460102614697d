from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol import shard_spec
from gazette_sdk.protocol.durations import from_ns
from gazette_sdk.protocol.labels import Matcher, label_set, pairs_of, parse_selector
from support.vectors import group

# Kinds of our errors, by a part of the reference's texts.
KINDS = {
    "not a valid token (bad/": "invalid_token",
    "Id: not a valid token": "invalid_token",
    "RecoveryLogPrefix: not a valid token": "invalid_token",
    "invalid non-empty HintPrefix": "unexpected_hint_prefix",
    "HintPrefix is not an absolute": "invalid_hint_prefix",
    "invalid HintBackups": "invalid_hint_backups",
    "invalid MinTxnDuration": "invalid_min_txn_duration",
    "invalid MaxTxnDuration": "invalid_max_txn_duration",
    "Name: not a valid token": "invalid_token",
    "single-value Label": "multiple_values",
    "cannot include label": "reserved_label_id",
    "Journal: not a valid token": "invalid_token",
    "invalid MinOffset": "invalid_min_offset",
    "not in unique, sorted order": "not_sorted_unique",
}


def spec_of(value):
    value = dict(value)
    spec = cpb.ShardSpec(
        id=value.pop("id", ""),
        recovery_log_prefix=value.pop("recovery_log_prefix", ""),
        hint_prefix=value.pop("hint_prefix", ""),
        hint_backups=value.pop("hint_backups", 0),
        hot_standbys=value.pop("hot_standbys", 0),
        max_txn_duration=from_ns(value.pop("max_txn_duration_ns", 0)),
        min_txn_duration=from_ns(value.pop("min_txn_duration_ns", 0)),
    )
    for name, label in value.pop("labels", []):
        spec.labels.labels.add(name=name, value=label)
    for source in value.pop("sources", []):
        spec.sources.add(**source)
    assert not value
    return spec


def test_specs_are_validated_in_the_order_of_the_vectors():
    vector = group("message", "shard_spec_validation")
    value = vector["start"]
    for step in vector["cumulative_steps"]:
        match step.get("set", {}):
            case "swap the two sources":
                value["sources"].reverse()
            case changes:
                for name, item in changes.items():
                    if name.startswith("sources["):
                        index, field = int(name[8]), name.partition(".")[2]
                        value["sources"][index][field] = item
                    else:
                        value[name] = item
        if step.get("ok"):
            shard_spec.validate_shard_spec(spec_of(value))
            continue
        with pytest.raises(ValidationError) as caught:
            shard_spec.validate_shard_spec(spec_of(value))
        (kind,) = {kind for text, kind in KINDS.items() if text in step["error"]}
        assert caught.value.kind == kind, step["error"]


@pytest.mark.parametrize("case", group("message", "shard_id_validation")["cases"])
def test_ids_follow_the_vectors(case):
    if case.get("ok"):
        shard_spec.validate_shard_id(case["id"])
    else:
        with pytest.raises(ValidationError, match=r"not a valid token|invalid length"):
            shard_spec.validate_shard_id(case["id"])


@pytest.mark.parametrize("case", group("message", "consumer_spec_validation")["cases"])
def test_consumers_follow_the_vectors(case):
    spec = cpb.ConsumerSpec(shard_limit=case["shard_limit"])
    spec.process_spec.id.zone, spec.process_spec.id.suffix = case["zone"], case["suffix"]
    spec.process_spec.endpoint = case["endpoint"]
    if case.get("ok"):
        shard_spec.validate_consumer_spec(spec)
    else:
        with pytest.raises(ValidationError, match="not a valid token"):
            shard_spec.validate_consumer_spec(spec)


@pytest.mark.parametrize("case", group("message", "replica_status")["validation"]["cases"])
def test_statuses_follow_the_vectors(case):
    status = cpb.ReplicaStatus(code=case["code"], errors=case.get("errors", []))
    if case.get("ok"):
        shard_spec.validate_replica_status(status)
    else:
        with pytest.raises(ValidationError) as caught:
            shard_spec.validate_replica_status(status)
        assert caught.value.kind in {"invalid_code", "expected_errors"}


def test_errors_stand_with_failed_only():
    with pytest.raises(ValidationError, match="expected no errors"):
        shard_spec.validate_replica_status(cpb.ReplicaStatus(code=300, errors=["late"]))


def test_statuses_reduce_as_in_the_vectors():
    vector = group("message", "replica_status")["reduce"]
    status = cpb.ReplicaStatus(code=vector["start"])
    for step in vector["steps"]:
        fold = step["fold"] if isinstance(step["fold"], list) else [step["fold"]]
        status = shard_spec.reduce_status([status, *(cpb.ReplicaStatus(**one) for one in fold)])
        assert status == cpb.ReplicaStatus(**step["expect"])


def test_the_meaning_of_specs_follows_the_vectors():
    vector = group("message", "shard_spec_routines")
    spec = spec_of(vector["spec"])
    for case in vector["cases"]:
        spec.hot_standbys = case.get("hot_standbys", spec.hot_standbys)
        cap = case.get("max_hot_standbys", 100)
        assert shard_spec.desired_replication(spec, cap) == case["desired_replication"]
    spec.disable = True
    assert shard_spec.desired_replication(spec) == 0
    labels = [list(pair) for pair in pairs_of(shard_spec.selector_labels(spec))]
    assert labels == vector["label_set_ext"]
    assert shard_spec.primary_hint_key(spec) == vector["hint_primary_key"]
    assert shard_spec.backup_hint_keys(spec) == vector["hint_backup_keys"]


def test_selectors_match_labels_and_the_id():
    spec = cpb.ShardSpec(id="shard-a", labels=label_set([("topic", "words")]))
    for text, expected in (
        ("", True),
        ("id=shard-a", True),
        ("id:prefix=shard,topic=words", True),
        ("id=shard-b", False),
        ("topic!=words", False),
    ):
        assert shard_spec.matches_shard(Matcher(parse_selector(text)), spec) is expected


def test_recovery_logs_that_climb_are_not_applied_but_served():
    spec = spec_of({"id": "a-shard", "recovery_log_prefix": "../logs", "hint_prefix": "/h"})
    spec.max_txn_duration.seconds = 1
    shard_spec.validate_shard_spec(spec, stored=True)
    with pytest.raises(ValidationError, match=r"`\.\.` component"):
        shard_spec.validate_shard_spec(spec)


names = st.sampled_from(["", "aaaa", "bbbb"])
numbers = st.integers(0, 2)
specs = st.builds(
    lambda name, sources, log, numbers, ns, flags, labels: cpb.ShardSpec(
        id=name,
        sources=[cpb.ShardSpec.Source(journal=journal) for journal in sources],
        recovery_log_prefix=log,
        hint_backups=numbers[0],
        hot_standbys=numbers[1],
        ring_buffer_size=numbers[2],
        max_txn_duration=from_ns(ns) if ns else None,
        disable=flags,
        labels=label_set(labels),
    ),
    names,
    st.lists(names, max_size=2),
    names,
    st.tuples(numbers, numbers, numbers),
    numbers,
    st.booleans(),
    st.sets(st.tuples(st.sampled_from(["la", "lb"]), names), max_size=3),
)


@given(specs, specs)
def test_set_operations_obey_their_laws(a, b):
    empty = shard_spec.intersect_specs(cpb.ShardSpec(), cpb.ShardSpec())
    assert shard_spec.union_specs(empty, a) == shard_spec.union_specs(a, empty)
    assert shard_spec.intersect_specs(a, a) == shard_spec.union_specs(a, a)
    assert shard_spec.subtract_specs(a, a) == empty
    assert shard_spec.subtract_specs(empty, a) == empty
    shared = shard_spec.intersect_specs(a, b)
    rest = shard_spec.subtract_specs(a, shared)
    assert shard_spec.union_specs(rest, shared) == shard_spec.union_specs(a, a)
    both = shard_spec.union_specs(a, b)
    assert both.disable == (a.disable or b.disable)
    assert both.hot_standbys == (a.hot_standbys or b.hot_standbys)

from __future__ import annotations

import pytest

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import journal_spec as specs
from gazette_sdk.protocol.labels import label_set
from support.vectors import cases, group, journal_spec, normal, refuses


def good_spec(**fields) -> pb.JournalSpec:
    spec = journal_spec(group("broker", "journal_spec_validate")["cases"][0]["input"])
    for name, value in fields.items():
        setattr(spec, name, value)
    return spec


def kind_and_path(spec, **arguments):
    with pytest.raises(ValidationError) as caught:
        specs.validate_journal_spec(spec, **arguments)
    return caught.value.kind, caught.value.path


@pytest.mark.parametrize("case", cases("broker", "journal_spec_validate"))
def test_specs_follow_the_vectors(case):
    with refuses(case["expect"]):
        specs.validate_journal_spec(journal_spec(case["input"]))


@pytest.mark.parametrize("case", cases("broker", "desired_replication"))
def test_desired_replication_follows_the_vectors(case):
    spec = journal_spec(
        {"replication": case["replication"], "suspend": {"level": case["suspend_level"]}}
    )
    most = case["max_replication"]
    wanted = (
        specs.desired_replication(spec) if most is None else specs.desired_replication(spec, most)
    )
    assert wanted == case["expect"]


def test_a_fully_suspended_journal_has_no_replica():
    spec = journal_spec({"replication": 3, "suspend": {"level": "FULL"}})
    assert specs.desired_replication(spec) == 0


@pytest.mark.parametrize("case", cases("broker", "journal_spec_set_ops"))
def test_set_operations_follow_the_vectors(case):
    operation = {
        "union": specs.union_specs,
        "intersect": specs.intersect_specs,
        "subtract": specs.subtract_specs,
    }[case["op"]]
    a, b = journal_spec(case["a"]), journal_spec(case["b"])
    before = a.SerializeToString(deterministic=True)
    assert normal(operation(a, b)) == normal(journal_spec(case["expect"]))
    assert a.SerializeToString(deterministic=True) == before


def test_set_operations_treat_suspend_and_name_as_the_first_specs_own():
    a = pb.JournalSpec(name="a/a", suspend=pb.JournalSpec.Suspend(level="FULL", offset=5))
    b = pb.JournalSpec(name="b/b", suspend=pb.JournalSpec.Suspend(level="FULL", offset=5))
    assert specs.union_specs(a, b).suspend == a.suspend
    assert specs.subtract_specs(a, b).suspend == a.suspend
    assert not specs.intersect_specs(a, b).HasField("suspend")
    assert not specs.union_specs(pb.JournalSpec(name="c/c"), b).HasField("suspend")
    for operation in (specs.union_specs, specs.intersect_specs, specs.subtract_specs):
        assert operation(a, b).name == "a/a"


@pytest.mark.parametrize(
    ("flags", "reads", "writes"),
    [(0, True, True), (1, True, False), (2, False, True), (4, True, True), (3, False, False)],
)
def test_flags_say_what_is_allowed(flags, reads, writes):
    spec = pb.JournalSpec(flags=flags)
    assert (specs.may_read(spec), specs.may_write(spec)) == (reads, writes)


@pytest.mark.parametrize("flags", [3, 5, 6, 7, 35])
def test_combined_flags_are_refused(flags):
    assert kind_and_path(good_spec(flags=flags)) == ("invalid_flags", "Flags")


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([("prefix", "")], ("reserved_label_prefix", "")),
        ([("name", "x"), ("prefix", "")], ("reserved_label_name", "")),
        ([("content-type", "text/csv")], None),
        ([("content-type", "a/")], ("invalid_content_type", "Labels")),
        ([("content-type", "")], ("invalid_content_type", "Labels")),
        ([("bad label", "x")], ("invalid_token", "Labels.Labels[0].Name")),
        ([("app.gazette.dev/message-type", "T")], ("content_type_required", "Labels")),
        (
            [("app.gazette.dev/message-subtype", "T"), ("content-type", "text/csv")],
            ("message_type_required", "Labels"),
        ),
        ([("app.gazette.dev/tag", "a"), ("app.gazette.dev/tag", "b")], None),
    ],
)
def test_labels_of_specs_are_checked(labels, expected):
    spec = good_spec()
    spec.labels.CopyFrom(label_set(labels))
    if expected is None:
        specs.validate_journal_spec(spec)
    else:
        assert kind_and_path(spec) == expected


def test_the_name_of_a_spec_has_no_metadata():
    assert kind_and_path(good_spec(name="a/journal;meta")) == ("metadata_not_allowed", "Name")


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"name": "../journal"}, "Name"),
        ({"stores": ["s3://bucket/a/../b/"]}, "Fragment.Stores[0]"),
        ({"stores": ["s3://bucket/", "file:///a/%2e%2E/b/"]}, "Fragment.Stores[1]"),
        ({"stores": ["file:///?find=a&replace=../../etc"]}, "Fragment.Stores[0]"),
        ({"stores": ["file:///?find=a/j&replace=./.%2E/."]}, "Fragment.Stores[0]"),
        ({"stores": ["file:///?find=journal&replace=.."]}, "Fragment.Stores[0]"),
        ({"name": "a/.x/b", "stores": ["s3://b/?find=x/&replace=./"]}, "Fragment.Stores[0]"),
        ({"template": "../x"}, "Fragment.PathPostfixTemplate"),
        ({"template": "x/{{ .Spool.BackingStore }}../y"}, "Fragment.PathPostfixTemplate"),
    ],
)
def test_nothing_that_is_applied_may_leave_its_store(change, path):
    spec = good_spec(name=change.get("name", "a/journal"))
    spec.fragment.stores[:] = change.get("stores", [])
    spec.fragment.path_postfix_template = change.get("template", "")
    assert kind_and_path(spec) == ("traverses_outside", path)
    specs.validate_journal_spec(spec, stored=True)  # a peer accepted it: the journal is served


@pytest.mark.parametrize(
    "template", ["{{ .Spool.FirstAppendTime }}", "{{ if true }}a{{ end }}", "a b", "/{{ .Foo }}"]
)
def test_a_template_that_no_fragment_could_use_is_refused_when_it_is_applied(template):
    spec = good_spec()
    spec.fragment.path_postfix_template = template
    assert kind_and_path(spec) == ("invalid_template", "Fragment.PathPostfixTemplate")
    specs.validate_journal_spec(spec, stored=True)


def test_errors_carry_the_path_they_are_given():
    assert kind_and_path(good_spec(flags=35), path="Upsert") == ("invalid_flags", "Upsert.Flags")
    spec = good_spec()
    spec.fragment.stores[:] = ["s3://bucket"]
    assert kind_and_path(spec, path="Spec") == ("no_trailing_slash", "Spec.Fragment.Stores[0]")

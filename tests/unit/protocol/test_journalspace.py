from __future__ import annotations

import time
from itertools import pairwise

import pytest
import yaml
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import journalspace
from gazette_sdk.protocol.durations import from_ns
from gazette_sdk.protocol.journalspace import Node
from support.vectors import cases, golden, group, journal_spec, label_set, normal, refuses

OWN_KEYS = {"comment", "delete", "revision", "children", "patched"}


def tree(value) -> Node:
    return Node(
        spec=journal_spec({key: item for key, item in value.items() if key not in OWN_KEYS}),
        comment=value.get("comment", ""),
        delete=value.get("delete"),
        revision=value.get("revision", 0),
        children=[tree(child) for child in value.get("children", [])],
        patched=value.get("patched", False),
    )


def plain(node: Node):
    """A node as values that can be compared."""
    return (
        normal(node.spec),
        node.comment,
        node.delete,
        node.revision,
        node.patched,
        [plain(child) for child in node.children],
    )


@pytest.mark.parametrize("case", cases("broker", "journalspace_validate"))
def test_trees_follow_the_vectors(case):
    with refuses(case["expect"]):
        tree(case["input"]).validate()


@pytest.mark.parametrize("case", cases("broker", "journalspace_push_down"))
def test_inheritance_follows_the_vectors(case):
    root = tree(case["tree"])
    root.validate()
    journalspace.push_down(root)
    assert [plain(node) for node in root.journals()] == [
        plain(tree(expected)) for expected in case["expect_journals"]
    ]
    assert normal(root.spec) == pb.JournalSpec(name=root.name)


@pytest.mark.parametrize("case", cases("broker", "journalspace_shared_prefix"))
def test_shared_prefixes_follow_the_vectors(case):
    assert journalspace.shared_prefix(case["a"], case["b"]) == case["expect"]
    assert journalspace.shared_prefix(case["b"], case["a"]) == case["expect"]


@pytest.mark.parametrize("case", cases("broker", "journalspace_extract"))
def test_extraction_follows_the_vectors(case):
    nodes = [Node(spec=pb.JournalSpec(name=name)) for name in case["names"]]
    assert plain(journalspace.extract(nodes)) == plain(tree(case["expect"]))


@pytest.mark.parametrize("case", cases("broker", "journalspace_hoist"))
def test_hoisting_follows_the_vectors(case):
    root = tree(case["tree"])
    journalspace.hoist(root)
    assert plain(root) == plain(tree(case["expect"]))


@pytest.mark.parametrize("case", cases("broker", "journalspace_patch"))
def test_patches_follow_the_vectors(case):
    root = journalspace.extract(
        [Node(spec=pb.JournalSpec(name=name)) for name in ("root/aaa/000", "root/aaa/222")]
    )
    for given_patch in case["patches"]:
        root = journalspace.patch(root, tree(given_patch))
    assert plain(root) == plain(tree(case["expect"]))
    journalspace.mark_unpatched_for_deletion(root)
    marked = {node.name: True for node in root.journals() if node.delete}
    assert marked == case["then_mark_unpatched_for_deletion"]


@pytest.mark.parametrize("case", cases("broker", "journalspace_yaml"))
def test_documents_follow_the_vectors_byte_for_byte(case):
    root = journalspace.parse(case["yaml"])
    root.validate()
    assert journalspace.dump(root) == case["yaml"]
    journalspace.push_down(root)
    assert [plain(node) for node in root.journals()] == [
        plain(tree(expected)) for expected in case["expect_journals"]
    ]
    journalspace.hoist(root)
    assert journalspace.dump(root) == case["yaml"]


@pytest.mark.parametrize("case", cases("broker", "flag_yaml"))
def test_flags_follow_the_vectors(case):
    if "yaml" in case:
        flag = journalspace.flag_text(case["value"])
        assert yaml.safe_dump({"flag": flag}) == case["yaml"]
        return
    document = f"name: a/b/c\nflags: {case['decode']}\n"
    if "expect" in case:
        with pytest.raises(ValidationError, match="line 2") as caught:
            journalspace.parse(document)
        assert (caught.value.kind, caught.value.path) == (case["expect"]["kind"], "flags")
    else:
        assert journalspace.parse(document).spec.flags == case["value"]


def test_trees_follow_the_allocators_vectors():
    prefixes, extraction, validation = group("allocator", "journalspace")
    for a, b, expected in prefixes["a_b_len"]:
        assert journalspace.shared_prefix(a, b) == expected
    root = journalspace.extract(
        [Node(spec=pb.JournalSpec(name=name)) for name in extraction["journals"]]
    )
    found = []

    def visit(node):
        if node.is_directory:
            found.append(node.name)
        for child in node.children:
            visit(child)

    visit(root)
    assert found == extraction["directories"]
    assert [node.name for node in root.journals()] == extraction["journals"]
    kinds = [
        ({"name": "dir/", "revision": 1}, "unexpected_revision"),
        ({"name": "dir/"}, "expected_children"),
        ({"name": "dir/", "children": [{"name": "foo"}, {"name": "bar"}]}, "child_outside_parent"),
        (
            {"name": "dir/", "children": [{"name": "dir/foo"}, {"name": "dir/bar"}]},
            "children_not_ordered",
        ),
        ({"name": "invalid name"}, "invalid_token"),
        ({"name": "item", "children": [{"name": "dir/bar"}]}, "unexpected_children"),
    ]
    assert len(kinds) == len(validation["errors"])
    for given_tree, kind in kinds:
        with pytest.raises(ValidationError) as caught:
            tree(given_tree).validate()
        assert caught.value.kind == kind
        assert caught.value.path == ("Name" if kind == "invalid_token" else "")


def test_errors_below_a_directory_say_where():
    root = tree({"name": "", "children": [{"name": "a/", "children": [{"name": "a/b c"}]}]})
    with pytest.raises(ValidationError) as caught:
        root.validate()
    assert caught.value.path == "Children[0].Children[0].Name"


@pytest.mark.parametrize(
    ("text", "kind", "path", "words"),
    [
        ("name: a/b\nnmae: x\n", "unknown_key", "", "line 2: unknown key 'nmae'"),
        ("fragment:\n  lenght: 5\n", "unknown_key", "fragment", "line 2: unknown key 'lenght'"),
        (
            "children:\n- name: a\n  suspend: {levle: 1}\n",
            "unknown_key",
            "children[0].suspend",
            "line 3",
        ),
        ("labels:\n- name: a\n  valeu: b\n", "unknown_key", "labels[0]", "line 3"),
        ("name: a\nname: b\n", "duplicate_key", "name", "line 2: key 'name' is given twice"),
        ("replication: three\n", "wrong_type", "replication", "expected an integer, not 'three'"),
        ("replication: true\n", "wrong_type", "replication", "expected an integer"),
        ("replication: 1.5\n", "wrong_type", "replication", "expected an integer"),
        ("replication: 99999999999\n", "wrong_type", "replication", "out of range"),
        ("flags: -1\n", "wrong_type", "flags", "out of range"),
        ("delete: maybe\n", "wrong_type", "delete", "expected true or false"),
        ("name: [a]\n", "wrong_type", "name", "expected a text, not a list"),
        ("children: {a: b}\n", "wrong_type", "children", "expected a list, not keys and values"),
        ("labels: x\n", "wrong_type", "labels", "expected a list, not 'x'"),
        ("- a\n", "wrong_type", "", "expected keys and values, not a list"),
        ("fragment: 5\n", "wrong_type", "fragment", "line 1"),
        ("fragment:\n  retention: 5 days\n", "invalid_duration", "fragment.retention", "line 2"),
        (
            "fragment:\n  compression_codec: GZIPPED\n",
            "unknown_enum_name",
            "fragment.compression_codec",
            "GZIP_OFFLOAD_DECOMPRESSION",
        ),
        (
            "fragment:\n  compression_codec: 2\n",
            "unknown_enum_name",
            "fragment.compression_codec",
            "line 2",
        ),
        ("suspend:\n  level: HALF\n", "unknown_enum_name", "suspend.level", "PARTIAL"),
        ("revision: 9223372036854775808\n", "wrong_type", "revision", "line 1: out of range"),
        (
            "fragment:\n  retention: -9223372036854775809\n",
            "wrong_type",
            "fragment.retention",
            "line 2",
        ),
        ("fragment:\n  retention: [1h]\n", "wrong_type", "fragment.retention", "not a list"),
        (
            "comment: '\\ud800'\nname: \"\\ud800\"\n",
            "wrong_type",
            "name",
            "line 2: not valid Unicode",
        ),
        ("replication: 0x\n", "wrong_type", "replication", "expected an integer"),
        ("delete: 2020-99-99\n", "wrong_type", "delete", "expected true or false"),
        ("a: [\n", "yaml_parse", "", "not YAML: line 2, column 1: "),
        ("a: b\n---\nc: d\n", "yaml_parse", "", "not YAML"),
        ("name: \x01\n", "yaml_parse", "", "not YAML: position 6: special characters"),
        ("children: &loop\n- children: *loop\n", "wrong_type", None, "nested deeper"),
    ],
)
def test_bad_documents_are_refused_with_line_and_key(text, kind, path, words):
    with pytest.raises(ValidationError) as caught:
        journalspace.parse(text)
    assert caught.value.kind == kind
    assert path is None or caught.value.path == path
    assert words in str(caught.value)


LAUGHS = "children:\n- name: a\n  labels: &a0 [{name: x, value: y}]\n" + "".join(
    f"- name: b{level}\n  children: &a{level} [{f'{{children: *a{level - 1}}}, ' * 10}]\n"
    for level in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LAUGHS, "line 13: aliases expand this to more than 100000 values"),
        (
            "children: &loop\n- children: *loop\n- children: *loop\n",
            "line 2: this contains itself by an alias",
        ),
        ("labels: &a\n- *a\n", "contains itself"),
    ],
)
def test_aliases_do_not_expand_without_bound(text, words):
    begun = time.monotonic()
    with pytest.raises(ValidationError) as caught:
        journalspace.parse(text)
    assert time.monotonic() - begun < 2
    assert words in str(caught.value)


def test_aliases_may_share_values():
    root = journalspace.parse(
        "children:\n"
        "- name: a\n  fragment: &f {length: 1024, stores: &s [file:///]}\n"
        "- name: b\n  fragment: *f\n"
        "- name: c\n  fragment: {stores: *s}\n"
    )
    assert [list(child.spec.fragment.stores) for child in root.children] == [["file:///"]] * 3
    assert root.children[1].spec.fragment.length == 1024


def test_a_very_long_number_is_refused_at_once():
    begun = time.monotonic()
    with pytest.raises(ValidationError, match="expected an integer"):
        journalspace.parse("replication: " + ":".join(["1"] * 100_000))
    assert time.monotonic() - begun < 2


def test_documents_may_be_written_freely():
    root = journalspace.parse(
        "name: a/b/c\n"
        "replication:\n"  # null is absent
        "labels:\n"
        "- {name: zz, value: 5}\n"
        "- name: aa\n"
        "fragment:\n"
        "  refresh_interval: 60000000000\n"
        "  flush_interval: 1h\n"
        "suspend: {level: 2, offset: 7}\n"
        "flags: 17\n"
    )
    assert root.spec.labels == label_set(
        [{"name": "aa", "value": ""}, {"name": "zz", "value": "5"}]
    )
    assert root.spec.fragment.refresh_interval.seconds == 60
    assert root.spec.fragment.flush_interval.seconds == 3600
    assert root.spec.suspend == pb.JournalSpec.Suspend(level="FULL", offset=7)
    assert journalspace.dump(root) == (
        "name: a/b/c\n"
        "labels:\n"
        "- name: aa\n"
        '  value: ""\n'
        "- name: zz\n"
        '  value: "5"\n'
        "fragment:\n"
        "  refresh_interval: 1m0s\n"
        "  flush_interval: 1h0m0s\n"
        "flags: 17\n"
        "suspend:\n"
        "  level: FULL\n"
        "  offset: 7\n"
    )


def test_an_empty_document_is_an_empty_root():
    assert plain(journalspace.parse("")) == plain(Node())
    assert plain(journalspace.parse("# nothing\n")) == plain(Node())
    assert journalspace.dump(Node()) == "{}\n"


def test_deep_nesting_is_refused():
    for text in ("[" * 10_000, "{a: " * 10_000):
        with pytest.raises(ValidationError):
            journalspace.parse(text)


@pytest.mark.parametrize(
    "comment",
    [
        "yes",
        "null",
        "1e5",
        "2020-01-01",
        "y",
        "two\nlines\n",
        "x: y",
        "{{ x }}",
        "- a",
        "é",
        " a",
        "a #b",
        "'quoted'",
        '"',
        "0x1f",
        "~",
        "=",
        "<<",
    ],
)
def test_texts_survive_yaml(comment):
    document = journalspace.dump(Node(spec=pb.JournalSpec(name="a/b/c"), comment=comment))
    assert journalspace.parse(document).comment == comment
    assert yaml.safe_load(document)["comment"] == comment


def test_a_listing_becomes_a_tree_and_changes_again():
    listed = [
        pb.ListResponse.Journal(
            spec=journal_spec(
                {
                    "name": name,
                    "replication": 3,
                    "suspend": {"level": "FULL", "offset": revision},
                }
            ),
            mod_revision=revision,
        )
        for name, revision in (("bb/2", 7), ("aa/1", 5), ("bb/1", 6))
    ]
    root = journalspace.from_list_response(listed)
    assert [node.name for node in root.journals()] == ["aa/1", "bb/1", "bb/2"]
    journalspace.hoist(root)
    assert root.spec.replication == 3
    again = journalspace.parse(journalspace.dump(root))
    again.validate()
    journalspace.push_down(again)
    next(again.journals()).delete = True
    request = journalspace.to_apply_request(again)
    assert [change.expect_mod_revision for change in request.changes] == [5, 6, 7]
    assert request.changes[0] == pb.ApplyRequest.Change(expect_mod_revision=5, delete="aa/1")
    assert normal(request.changes[2].upsert) == normal(listed[0].spec)
    assert journalspace.from_list_response([]).children == []


def test_suspend_stays_with_its_journal():
    suspend = pb.JournalSpec.Suspend(level="FULL", offset=9)
    root = Node(
        spec=pb.JournalSpec(name="a/", suspend=suspend, replication=2),
        children=[Node(spec=pb.JournalSpec(name="a/b"))],
    )
    journalspace.push_down(root)
    assert not root.children[0].spec.HasField("suspend")
    root.children[0].spec.suspend.CopyFrom(suspend)
    patched = journalspace.patch(root, Node(spec=pb.JournalSpec(name="a/b", replication=3)))
    assert patched.children[0].spec.suspend == suspend


# ---------------------------------------------------------------- laws


def naive_extraction(names: list[str]):
    """The algorithm as it is described, step by step: an oracle."""
    nodes = [(name, []) for name in names]
    while len(nodes) > 1:
        shared = [journalspace.shared_prefix(a[0], b[0]) for a, b in pairwise(nodes)]
        most = max(shared)
        best = (0, 0)
        begin = 0
        while begin < len(shared):
            end = begin
            while end < len(shared) and shared[end] == most:
                end += 1
            if end - begin > best[1] - best[0]:
                best = (begin, end)
            begin = end + 1 if end == begin else end
        begin, end = best[0], best[1] + 1
        nodes[begin:end] = [(nodes[begin][0][:most], nodes[begin:end])]
    return nodes[0]


def shape(node: Node):
    return (node.name, [shape(child) for child in node.children])


names = st.lists(
    st.lists(st.sampled_from(["a", "b", "a-b", "ab", "c"]), min_size=2, max_size=5).map("/".join),
    min_size=1,
    max_size=12,
    unique=True,
).map(sorted)


@given(names)
def test_extraction_is_the_described_algorithm(given_names):
    nodes = [Node(spec=pb.JournalSpec(name=name)) for name in given_names]
    root = journalspace.extract(nodes)
    expected = naive_extraction(given_names)
    assert shape(root) == (expected[0], list(map(_listed, expected[1])))
    assert [node.name for node in root.journals()] == given_names


def _listed(node):
    return (node[0], [_listed(child) for child in node[1]])


def spec_of(fields, labels, refresh_ns, suspend):
    spec = journal_spec(fields)
    for label, values in sorted(labels.items()):
        for value in sorted(set(values)):
            spec.labels.labels.add(name=label, value=value)
    spec.fragment.refresh_interval.CopyFrom(from_ns(refresh_ns))
    if suspend:
        spec.suspend.CopyFrom(pb.JournalSpec.Suspend(level="FULL", offset=suspend))
    return spec


specs = st.builds(
    spec_of,
    st.fixed_dictionaries(
        {
            "replication": st.integers(0, 2),
            "flags": st.sampled_from([0, 1, 4]),
            "max_append_rate": st.integers(0, 1),
            "fragment": st.fixed_dictionaries(
                {
                    "length": st.sampled_from([0, 1024]),
                    "compression_codec": st.integers(0, 2),
                    "stores": st.sampled_from([[], ["s3://a/"], ["s3://a/", "s3://b/"]]),
                    "path_postfix_template": st.sampled_from(["", "x={{ .Spool.Begin }}"]),
                }
            ),
        }
    ),
    st.dictionaries(
        st.sampled_from(["aa", "bb"]), st.lists(st.sampled_from(["1", "2"]), min_size=1), max_size=2
    ),
    st.sampled_from([0, 1, 60 * 10**9]),
    st.integers(0, 2),
)


@settings(max_examples=30)
@given(names, st.data())
def test_pushing_down_undoes_hoisting_also_through_yaml(given_names, data):
    nodes = []
    for name in given_names:
        spec = data.draw(specs)
        spec.name = name
        nodes.append(
            Node(
                spec=spec,
                revision=data.draw(st.integers(-1, 5)),
                delete=data.draw(st.sampled_from([None, None, True, False])),
            )
        )
    before = [plain(node) for node in nodes]
    root = journalspace.extract(nodes)
    journalspace.hoist(root)
    again = journalspace.parse(journalspace.dump(root))
    assert plain(again) == plain(root)
    for pushed in (root, again):
        journalspace.push_down(pushed)
        assert [plain(node) for node in pushed.journals()] == before


RECORDED_LISTINGS = [
    pytest.param(case["stdout"], id=case["name"])
    for case in golden("broker/gazctl.json")
    if case["args"][-2:] == ["-o", "yaml"] and "name: " in case["stdout"]
]


@pytest.mark.parametrize("document", RECORDED_LISTINGS)
def test_recorded_listings_are_made_byte_for_byte(document):
    root = journalspace.parse(document)
    root.validate()
    assert journalspace.dump(root) == document
    journalspace.push_down(root)
    again = journalspace.from_list_response(
        pb.ListResponse.Journal(spec=node.spec, mod_revision=node.revision)
        for node in root.journals()
    )
    journalspace.hoist(again)
    assert journalspace.dump(again) == document


def test_a_recorded_dry_run_makes_the_same_request():
    case = next(c for c in golden("broker/gazctl.json") if c["name"] == "apply dry run")
    root = journalspace.parse(case["stdin"])
    root.validate()
    journalspace.push_down(root)
    expected = text_format.Parse(case["stdout"], pb.ApplyRequest())
    request = journalspace.to_apply_request(root)
    assert normal(request) == normal(expected)


def test_recorded_documents_that_were_refused_are_refused():
    refused = [
        case
        for case in golden("broker/gazctl.json")
        if case["name"].startswith(("apply, tree validation", "apply, strict decoding"))
    ]
    assert len(refused) == 5
    for case in refused:
        with pytest.raises(ValidationError):
            journalspace.parse(case["stdin"]).validate()

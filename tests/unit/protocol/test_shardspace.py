from __future__ import annotations

import pytest

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol import shardspace
from gazette_sdk.protocol.labels import pairs_of
from gazette_sdk.protocol.shardspace import ShardNode
from support.vectors import golden, group

VECTOR = group("message", "shardspace")


def test_documents_survive_push_down_and_hoist_byte_for_byte():
    space = shardspace.parse(VECTOR["hoisted_yaml"])
    shardspace.push_down(space)
    assert space.common == cpb.ShardSpec()
    for node in space.shards:
        labels = [list(pair) for pair in pairs_of(node.spec.labels)]
        assert labels == VECTOR["pushed_down_labels"][node.id]
        assert node.spec.disable_wait_for_ack
        assert node.spec.hint_prefix == "/hints"
    shardspace.hoist(space)
    assert shardspace.dump(space) == VECTOR["hoisted_yaml"]


def test_patches_spare_shards_from_deletion():
    space = shardspace.parse(VECTOR["hoisted_yaml"])
    shardspace.patch(space, ShardNode(cpb.ShardSpec(id="shard-B", hot_standbys=3), revision=9))
    shardspace.patch(space, ShardNode(cpb.ShardSpec(id="shard-AA")))
    shardspace.mark_unpatched_for_deletion(space)
    assert [(node.id, node.delete) for node in space.shards] == [
        ("shard-A", True),
        ("shard-AA", None),
        ("shard-B", None),
    ]
    assert space.shards[2].spec.hot_standbys == 3
    assert space.shards[2].spec.disable
    assert space.shards[2].revision == 9


def test_deletes_and_upserts_become_changes():
    space = shardspace.parse(VECTOR["hoisted_yaml"])
    shardspace.push_down(space)
    request = shardspace.to_apply_request(space)
    assert [(c.delete, c.upsert.id, c.expect_mod_revision) for c in request.changes] == [
        ("shard-A", "", 123),
        ("", "shard-B", 456),
    ]
    assert request.changes[1].upsert.min_txn_duration.nanos == 1_000_000


@pytest.mark.parametrize(
    ("text", "kind", "path", "words"),
    [
        ("common:\n  hint_backupz: 2\n", "unknown_key", "common", "line 2: unknown key"),
        ("common:\n  delete: true\n", "unknown_key", "common", "line 2: unknown key 'delete'"),
        ("shards:\n- id: [a]\n", "wrong_type", "shards[0].id", "line 2: expected a text"),
        ("shards:\n- hot_standbys: -1\n", "wrong_type", "shards[0].hot_standbys", "out of range"),
        ("shards:\n- max_txn_duration: 5 s\n", "invalid_duration", None, "line 2"),
        ("shards:\n- sources: [{jornal: a}]\n", "unknown_key", "shards[0].sources[0]", "jornal"),
        ("children: []\n", "unknown_key", "", "expected one of common, shards"),
        ("a: [\n", "yaml_parse", "", "not YAML"),
    ],
)
def test_bad_documents_are_refused_with_line_and_key(text, kind, path, words):
    with pytest.raises(ValidationError) as caught:
        shardspace.parse(text)
    assert caught.value.kind == kind
    assert path is None or caught.value.path == path
    assert words in str(caught.value)


def test_an_empty_document_has_no_shards():
    for text in ("", "shards:\n", "common: {}\nshards: []\n"):
        space = shardspace.parse(text)
        assert shardspace.dump(space) == "common: {}\nshards: []\n"
        shardspace.hoist(space)
        assert not shardspace.to_apply_request(space).changes


def test_recorded_listings_reload_to_the_same_text():
    listed = [
        step["stdout"]
        for step in golden("consumer/gazctl/shards.json")
        if step["args"][:2] == ["shards", "list"] and "yaml" in step["args"] and step["exit"] == 0
    ]
    assert listed
    for text in listed:
        space = shardspace.parse(text)
        shardspace.push_down(space)
        shardspace.hoist(space)
        assert shardspace.dump(space) == text

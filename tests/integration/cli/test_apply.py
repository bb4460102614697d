"""``gazctl journals apply``: outcomes, and conflicts that name the journal and revisions."""

from __future__ import annotations

import json
import time
import uuid

import pytest

from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authority, Capability

KEY = "c2VjcmV0LWtleS1vZi10ZXN0cw=="


@pytest.fixture
def name():
    return f"apply-{uuid.uuid4().hex[:8]}"


def document(name, *parts, **values):
    fragment = (
        '{length: LENGTH, compression_codec: GZIP, stores: ["file:///"], refresh_interval: 1m}'
    )
    children = [
        f"- {{name: {name}/{part}{''.join(f', {k}: {v}' for k, v in values.items())}}}"
        for part in parts
    ]
    return "\n".join(
        [f"name: {name}/", "replication: 1", f"fragment: {fragment}", "children:", *children, ""]
    )


def specs(name, *parts, length=65536, **values):
    return document(name, *parts, **values).replace("LENGTH", str(length)).encode()


def outcomes(outcome):
    return {
        each["journal"].rpartition("/")[2]: each["outcome"]
        for each in map(json.loads, outcome.text.splitlines())
    }


def apply(tool, text, *arguments):
    return tool("journals", "apply", "-o", "json", *arguments, stdin=text)


def revisions(tool, name):
    text = tool.ok("journals", "list", "-l", f"prefix={name}/", "-o", "json").text
    return [int(each["mod_revision"]) for each in json.loads(text)["journals"]]


def test_a_file_that_is_applied_twice_is_no_error(tool, name):
    assert outcomes(apply(tool, specs(name, "a", "b"))) == {"a": "created", "b": "created"}
    before = revisions(tool, name)
    again = apply(tool, specs(name, "a", "b"))
    assert again.status == 0
    assert outcomes(again) == {"a": "unchanged", "b": "unchanged"}
    assert revisions(tool, name) == before


def test_a_file_that_grew_creates_only_what_is_new(tool, name):
    apply(tool, specs(name, "a"))
    assert outcomes(apply(tool, specs(name, "a", "b"))) == {"a": "unchanged", "b": "created"}


def test_changes_and_deletions_are_told_apart(tool, name):
    apply(tool, specs(name, "a", "b"))
    changed = apply(tool, specs(name, "a", length=131072, revision=-1))
    assert outcomes(changed) == {"a": "updated"}
    for outcome in ("deleted", "unchanged"):
        gone = apply(tool, specs(name, "b", revision=-1, delete="true"))
        assert outcomes(gone) == {"b": outcome}


def test_a_listing_that_was_edited_can_be_applied_twice(tool, name):
    apply(tool, specs(name, "a", "b"))
    listing = tool.ok("journals", "list", "-l", f"prefix={name}/", "-o", "yaml").stdout
    edited = listing.replace(b"length: 65536", b"length: 131072")
    assert set(outcomes(apply(tool, edited)).values()) == {"updated"}
    assert set(outcomes(apply(tool, edited)).values()) == {"unchanged"}


@pytest.mark.parametrize("revision", [None, 1])
def test_a_conflict_names_the_journal_both_revisions_and_the_difference(tool, name, revision):
    apply(tool, specs(name, "a", "b"))
    before = revisions(tool, name)
    values = {"length": 131072} | ({"revision": revision} if revision else {})
    refused = apply(tool, specs(name, "b", **values))
    assert refused.status == 1
    assert refused.stdout == b""
    assert (
        f"{name}/b: ETCD_TRANSACTION_FAILED (the change expects revision {revision or 0}"
        in refused.stderr
    )
    assert f"the journal has revision {before[1]}: length is 65536, not 131072" in refused.stderr
    assert revisions(tool, name) == before


def test_a_conflict_of_one_journal_changes_no_other(tool, name):
    apply(tool, specs(name, "b"))
    refused = apply(tool, specs(name, "a", "b", "c", length=131072))
    assert refused.status == 1
    assert len(revisions(tool, name)) == 1


def test_a_missing_journal_of_a_revision_is_a_conflict(tool, name):
    refused = apply(tool, specs(name, "a", revision=7))
    assert refused.status == 1
    assert "expects revision 7 but the journal does not exist" in refused.stderr


def test_a_table_has_a_row_for_each_journal(tool, name):
    table = tool.ok("journals", "apply", stdin=specs(name, "a", "b")).text
    assert [f"{name}/{part}" in table for part in "ab"] == [True, True]
    assert table.count("created") == 2


def test_too_many_changes_for_one_transaction_name_the_option(tool, name):
    parts = [f"part-{index:03}" for index in range(130)]
    refused = apply(tool, specs(name, *parts))
    assert refused.status == 1
    assert "--max-txn-size=100" in refused.stderr
    done = apply(tool, specs(name, *parts), "--max-txn-size", "100")
    assert done.status == 0
    assert set(outcomes(done).values()) == {"created"}
    tool.ok("journals", "delete", "-l", f"prefix={name}/")


def test_replication_that_leaves_no_broker_to_spare_is_warned_of(tool, name):
    made = apply(tool, specs(name, "a").replace(b"replication: 1", b"replication: 2"))
    assert made.status == 0
    warning = (
        f"replication of {name}/a leaves no broker to spare: it is 2, and the cluster has 1 broker"
    )
    assert warning in made.stderr
    assert warning in tool.ok("journals", "list", "-l", f"prefix={name}/").stderr
    tool.ok("journals", "delete", "-l", f"prefix={name}/")


def test_keys_create_the_first_journals_and_a_token_that_may_not_list_can_apply(
    gazctl, tmp_path, name
):
    with EmbeddedCluster(tmp_path / "data", sync_etcd=False, auth_keys=KEY) as cluster:
        gazctl.environ["BROKER_ADDRESS"] = cluster.address
        # No journal names the store yet.
        made = gazctl("journals", "create", f"{name}/first", f"--broker.auth-keys={KEY}")
        assert (made.status, made.stderr) == (0, "")
        token = Authority(KEY).sign(Capability.APPLY, pb.LabelSelector(), 600, time.time())
        option = f"--broker.auth-token={token}"
        assert outcomes(apply(gazctl, specs(name, "a"), option)) == {"a": "created"}
        changed = apply(gazctl, specs(name, "a", length=131072, revision=-1), option)
        assert outcomes(changed) == {"a": "applied"}

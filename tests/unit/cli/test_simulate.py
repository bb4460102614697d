"""``gazette allocator simulate`` over described clusters."""

from __future__ import annotations

import json

import pytest

from gazette_sdk.cluster.allocator import simulation

CLUSTER = b"""
members:
- {zone: a, id: broker-1, limit: 4}
- {zone: a, id: broker-2, limit: 4}
- {zone: b, id: broker-3, limit: 4}
- {zone: b, id: broker-4, limit: 4}
journals:
- {name: orders/part-000, replication: 3, assignments: [a/broker-1, a/broker-2, b/broker-3]}
- {name: orders/part-001, replication: 3, assignments: [b/broker-3, a/broker-1, b/broker-4]}
- {name: orders/part-002, replication: 3, assignments: [b/broker-4, a/broker-2, b/broker-3]}
"""

LOST = """\
BROKER      LIMIT  PRIMARIES  AFTER   REPLICAS  AFTER   LOAD   AFTER
a/broker-1  4      1          <none>  2         <none>  50.0%  <none>
a/broker-2  4      0          1       2         3       50.0%  75.0%
b/broker-3  4      1          1       3         3       75.0%  75.0%
b/broker-4  4      1          1       2         3       50.0%  75.0%

JOURNAL          BROKERS                             AFTER
orders/part-000  a/broker-1, a/broker-2, b/broker-3  a/broker-2, b/broker-3, b/broker-4
orders/part-001  b/broker-3, a/broker-1, b/broker-4  b/broker-3, b/broker-4, a/broker-2

2 replicas would move (at least 2 must), and 1 journal would get another primary.
"""


@pytest.fixture
def simulate(gazette):
    """The command, with a described cluster."""
    (gazette.directory / "cluster.yaml").write_bytes(CLUSTER)

    def call(*arguments, **options):
        return gazette("allocator", "simulate", "--cluster", "cluster.yaml", *arguments, **options)

    return call


def test_a_lost_broker_is_shown_with_each_journal_that_moves(simulate):
    outcome = simulate("--remove", "a/broker-1", "--verbose")
    assert (outcome.status, outcome.text, outcome.stderr) == (0, LOST, "")


def test_json_holds_everything(simulate):
    outcome = simulate("--remove=a/broker-1", "--format=json")
    found = json.loads(outcome.text)
    assert (found["moves"], found["moves_min"], found["primaries_changed"]) == (2, 2, 1)
    assert found["members"][0] == {
        "zone": "a",
        "id": "broker-1",
        "limit": 4,
        "before": {"primaries": 1, "replicas": 2, "ratio": 0.5},
        "after": None,
    }
    assert found["journals"][0] == {
        "name": "orders/part-000",
        "before": ["a/broker-1", "a/broker-2", "b/broker-3"],
        "after": ["a/broker-2", "b/broker-3", "b/broker-4"],
    }
    assert (found["unplaced"], found["single_zone"], found["staying"]) == ([], [], [])
    assert found["is_settled"]


def test_what_has_no_place_is_told_with_the_reason(simulate):
    text = simulate("--remove-zone", "b").text
    assert (
        "3 replicas of 3 journals would have no place (R = 3 needs as many members, and 2 can hold "
        "any): orders/part-000, orders/part-001, orders/part-002\n"
    ) in text
    assert "3 journals would have all replicas in one zone (there is no other): " in text
    assert "2 replicas would move" in text


def test_a_broker_that_cannot_leave_is_told(simulate):
    text = simulate("--replication=orders/=4", "--drain=a/broker-1").text
    assert "a/broker-1 would not leave: without it, 3 replicas would have no place.\n" in text


def test_changes_are_combined(simulate):
    text = simulate("--drain", "a/broker-1", "--add", "c/broker-5:9", "--add=c/broker-6").text
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if "/" in line[:3]}
    assert rows["a/broker-1"][-1] == "<none>"
    assert rows["c/broker-5"][0] == "9"
    assert rows["c/broker-6"][0] == "4"


def test_what_is_pending_is_told_apart(simulate, gazette):
    one_short = CLUSTER.replace(
        b"[a/broker-1, a/broker-2, b/broker-3]", b"[a/broker-1, a/broker-2]"
    )
    (gazette.directory / "cluster.yaml").write_bytes(one_short)
    assert "Without the change" not in simulate().text
    text = simulate("--add=b/broker-5").text
    assert (
        "Without the change: 1 journal would change, and 1 replica would move. This is taken as "
        "done before.\n"
    ) in text


def test_an_allocator_that_is_not_done_is_told(simulate, monkeypatch):
    monkeypatch.setattr(simulation, "ROUNDS_MAX", 1)
    assert "The allocator is not done after 1 rounds.\n" in simulate("--drain=a/broker-1").text


def test_specs_are_applied_as_a_client_would(simulate, gazette):
    specs = """
name: orders/
replication: 2
fragment: {length: 65536, compression_codec: NONE, refresh_interval: 1m}
children:
- name: orders/part-000
- name: orders/part-001
  delete: true
  revision: -1
- name: orders/part-003
  replication: 4
"""
    (gazette.directory / "specs.yaml").write_text(specs)
    found = json.loads(simulate("--specs", "specs.yaml", "--format", "json").text)
    after = {each["name"]: len(each["after"]) for each in found["journals"]}
    assert after["orders/part-000"] == 2
    assert after["orders/part-001"] == 0
    assert after["orders/part-003"] == 4
    capped = simulate("--specs=specs.yaml", "--format=json", "--max-replication=3").text
    after = {each["name"]: len(each["after"]) for each in json.loads(capped)["journals"]}
    assert after["orders/part-003"] == 3


def test_a_description_is_read_from_standard_input_and_written_again(gazette):
    outcome = gazette("allocator", "simulate", "--cluster=-", "--save=-", stdin=CLUSTER)
    assert outcome.status == 0
    (gazette.directory / "saved.yaml").write_text(outcome.text)
    again = gazette.ok("allocator", "simulate", "--cluster=saved.yaml", "--save=-")
    assert again.text == outcome.text
    assert "- {zone: a, id: broker-1, limit: 4}\n" in again.text


def test_a_description_is_saved_beside_the_report(simulate, gazette):
    outcome = simulate("--save=saved.yaml", "--remove=a/broker-1", "-v")
    assert outcome.text == LOST
    assert "broker-1" in (gazette.directory / "saved.yaml").read_text()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--remove=a/broker-9"], "there is no member a/broker-9; there are a/broker-1, a/brok"),
        (["--remove=broker-1"], "--remove: 'broker-1' names no member: write ZONE/ID"),
        (["--remove-zone=c"], "there is no zone c; there are a, b"),
        (["--drain=a/b"], "--drain: a/b.Suffix: invalid length"),
        (["--add=a/broker-1"], "member a/broker-1 is in the cluster already"),
        (["--add=a/broker-9:x"], "--add: 'a/broker-9:x' does not end with a number up to 131072"),
        (["--replication=orders/"], "--replication: 'orders/' is not written as JOURNAL=N"),
        (["--replication=orders/=x"], "does not end with a number"),
        (["--replication=other=1"], "there is no journal other; there are orders/part-000, "),
        (["--specs=absent.yaml"], "absent.yaml: No such file"),
        (["--cluster=absent.yaml"], "absent.yaml: No such file"),
        (["--cluster=/"], "Is a directory"),
        (["--save=-", "--remove=a/broker-1"], "--save - writes the description to standard output"),
        (["surplus"], "takes no argument 'surplus'"),
        (["--max-replication=0"], "--max-replication: 0 is less than 1"),
    ],
)
def test_a_wrong_call_is_one_line(simulate, arguments, problem):
    outcome = simulate(*arguments)
    assert (outcome.status, outcome.stdout) == (1, b"")
    assert problem in outcome.stderr
    assert outcome.stderr.startswith("gazette: ")
    assert outcome.stderr.count("\n") == 1


def test_an_etcd_that_does_not_answer_is_one_line(gazette):
    outcome = gazette("allocator", "simulate", "--etcd.address=http://127.0.0.1:1")
    assert (outcome.status, outcome.stderr.count("\n")) == (1, 1)
    assert "http://127.0.0.1:1" in outcome.stderr

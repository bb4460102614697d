from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.cluster.etcd_messages import KeyValue, WatchBatch, WatchEvent
from gazette_sdk.cluster.keyspace import Entry, KeySpace, restart_delay_s
from gazette_sdk.errors import ConfigurationError, EtcdError
from gazette_sdk.protocol import broker_pb2 as pb
from support.etcd import run
from support.vectors import group

VECTORS = group("allocator", "keyspace")


def decode(kv):
    return Entry.of(kv, int(kv.value))


def put(key, value, *, create, mod, version):
    return WatchEvent(
        is_delete=False, kv=KeyValue(key.encode(), value.encode(), create, mod, version, 0)
    )


def delete(key, *, mod):
    return WatchEvent(is_delete=True, kv=KeyValue(key.encode(), b"", 0, mod, 0, 0))


def event(case):
    if case["type"] == "delete":
        return delete(case["key"], mod=case["mod"])
    return put(
        case["key"],
        case["value"],
        create=case["create"],
        mod=case["mod"],
        version=case["version"],
    )


def batch(*events, revision=None, cluster_id=0):
    header = pb.Header.Etcd(revision=revision or events[-1].kv.mod_revision, cluster_id=cluster_id)
    return WatchBatch(header, tuple(events))


def values(keyspace):
    return {entry.key.decode(): entry.value for entry in keyspace.entries}


def keyspace_of(*keys):
    keyspace = KeySpace("/", decode)
    keyspace.apply(
        [batch(*(put(key, "1", create=n + 1, mod=n + 1, version=1) for n, key in enumerate(keys)))]
    )
    return keyspace


def test_search():
    vector = VECTORS["search"]
    keyspace = keyspace_of(*vector["keys"])
    for key, found, index in vector["key_found_index"]:
        assert keyspace.search(key.encode()) == (index, found)


def test_ranges():
    keyspace = keyspace_of(*VECTORS["search"]["keys"])
    for begin, end, first, last in VECTORS["range"]["from_to_begin_end"]:
        found = keyspace.bounds(begin.encode(), end.encode())
        assert found == (first, last) or (found[0] == found[1] and first == last)


def test_prefixes():
    keyspace = keyspace_of(*VECTORS["search"]["keys"])
    for prefix, first, last in VECTORS["prefixed"]["prefix_begin_end"]:
        assert list(keyspace.prefixed(prefix.encode())) == keyspace.entries[first:last]


def test_the_rules_of_events():
    vector = VECTORS["event_rules"]
    entries = {}
    keyspace = KeySpace("/", decode)
    for case in vector["events"]:
        one = event(case)
        after = keyspace._outcome(entries.get(case["key"]), one)
        entries[case["key"]] = after
    assert {k: e.value for k, e in entries.items() if e is not None} == vector["final"]


def test_each_deviation_of_an_event_is_logged(caplog):
    keyspace = KeySpace("/", decode)
    entries = {}
    caplog.set_level("INFO")
    for case in VECTORS["event_rules"]["events"]:
        caplog.clear()
        entries[case["key"]] = keyspace._outcome(entries.get(case["key"]), event(case))
        assert bool(caplog.records) == ("error" in case), case


def test_headers_are_checked():
    vector = VECTORS["header_check"]
    have = vector["have"]
    keyspace = KeySpace("/", decode)
    keyspace.header = pb.Header.Etcd(**have)
    for number, update in enumerate(vector["updates"]):
        fields = {k: v for k, v in update.items() if k not in ("ok", "error")}
        header = pb.Header.Etcd(**fields)
        mod = have["revision"] + 1 + number
        change = put("/k", "1", create=mod, mod=mod, version=1)
        response = WatchBatch(header, (change,))
        if update["ok"]:
            keyspace.apply([response])
            assert keyspace.header.member_id == update["member_id"]
            assert keyspace.revision == mod
        else:
            with pytest.raises(EtcdError, match=r"ClusterID mismatch \(expected 8675309"):
                keyspace.apply([response])


def test_a_response_from_before_is_fatal():
    keyspace = keyspace_of("/a", "/b")
    with pytest.raises(EtcdError, match="Revision mismatch"):
        keyspace.apply([batch(put("/c", "1", create=3, mod=3, version=1), revision=1)])


def test_apply():
    vector = VECTORS["apply"]
    keyspace = KeySpace("/", decode)
    keyspace.header = pb.Header.Etcd(**vector["initial_header"])
    updates = []
    keyspace.observers.append(lambda: updates.append(keyspace.revision))
    for step in vector["steps"]:
        before = values(keyspace), keyspace.revision
        responses = [
            WatchBatch(
                pb.Header.Etcd(cluster_id=r["cluster_id"], revision=r["revision"]),
                tuple(map(event, r["events"])),
            )
            for r in step["responses"]
        ]
        if "expect" in step:
            keyspace.apply(responses)
            assert values(keyspace) == step["expect"]
            assert updates[-1] == responses[-1].events[-1].kv.mod_revision == keyspace.revision
            continue
        with pytest.raises(AssertionError if step.get("panics") else EtcdError) as caught:
            keyspace.apply(responses)
        assert step.get("error", "") in str(caught.value)
        assert (values(keyspace), keyspace.revision) == before
    assert len(updates) == sum("expect" in step for step in vector["steps"])


def test_a_list_once_taken_does_not_change():
    keyspace = keyspace_of("/a", "/b")
    entries, copy = keyspace.entries, list(keyspace.entries)
    keyspace.apply([batch(delete("/a", mod=3), put("/c", "1", create=4, mod=4, version=1))])
    assert entries == copy
    assert list(values(keyspace)) == ["/b", "/c"]


def test_changes_tell_what_became_of_each_key():
    keyspace = keyspace_of("/a", "/b")
    keyspace.apply(
        [
            batch(
                delete("/a", mod=3),
                put("/b", "2", create=2, mod=4, version=2),
                put("/c", "3", create=5, mod=5, version=1),
                put("/d", "4", create=6, mod=6, version=1),
                delete("/d", mod=7),
            )
        ]
    )
    assert [
        (key.decode(), old and old.value, new and new.value) for key, old, new in keyspace.changes
    ] == [("/a", 1, None), ("/b", 1, 2), ("/c", None, 3)]


def test_waiting_for_a_revision():
    vector = VECTORS["wait_for_revision"]

    async def scenario():
        keyspace = KeySpace("/", decode)
        keyspace.header = pb.Header.Etcd(revision=1)
        waits = [asyncio.create_task(keyspace.wait_for_revision(r)) for r in (1, 10, 50, 100, 101)]
        for revision in vector["applied_header_revisions"]:
            await asyncio.sleep(0)
            keyspace.apply([batch(put("/k", "1", create=1, mod=revision, version=1))])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [wait.done() for wait in waits] == [True, True, True, True, False]
        await keyspace.wait_for_revision(100)
        assert keyspace.revision == 100

        for revision in (99, 101):

            async def cancelled_then_wait(revision=revision):
                task = asyncio.current_task()
                task.cancel()
                try:
                    await asyncio.sleep(0)
                except asyncio.CancelledError:
                    await keyspace.wait_for_revision(revision)

            with pytest.raises(asyncio.CancelledError):
                await asyncio.create_task(cancelled_then_wait())
        waits[-1].cancel()
        await asyncio.wait(waits)
        keyspace.apply([batch(put("/k", "1", create=1, mod=101, version=1))])

    run(scenario())


def test_waiting_for_the_next_update():
    async def scenario():
        keyspace = keyspace_of("/a")
        wait = asyncio.create_task(keyspace.wait_for_update())
        await asyncio.sleep(0)
        assert not wait.done()
        keyspace.apply([batch(delete("/a", mod=2))])
        await wait

    run(scenario())


@pytest.mark.parametrize("root", ["", "a", "/a/", "//a", "/a//b", "/a/../b", "/./a", "/a/."])
def test_unclean_roots_are_refused(root):
    with pytest.raises(ConfigurationError, match="absolute clean path"):
        KeySpace(root, decode)


def test_pauses_before_restarts():
    delays = [restart_delay_s(attempt) for attempt in range(8)]
    assert delays == [0, 0, 0.005, 2, 3, 4, 5, 5]


OPERATIONS = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.sampled_from(["put", "bad", "delete", "again"])),
    max_size=40,
)


@given(OPERATIONS, st.lists(st.integers(0, 40), max_size=6), st.integers(1, 3))
def test_any_events_in_any_batches_give_what_a_dictionary_gives(operations, cuts, per_revision):
    oracle, created, versions, events = {}, {}, {}, []
    revision = 1
    for number, (key, operation) in enumerate(operations):
        # Some keys change in one revision; a key changes once in it.
        if number % per_revision == 0 or any(
            e.kv.mod_revision == revision and e.kv.key == key.encode() for e in events
        ):
            revision += 1
        if operation == "delete":
            if key in created:
                del created[key], versions[key]
                oracle.pop(key, None)
                events.append(delete(key, mod=revision))
            continue
        created.setdefault(key, revision)
        versions[key] = versions.get(key, 0) + 1
        if operation != "bad":
            oracle[key] = number
        value = "bad" if operation == "bad" else str(number)
        events.append(put(key, value, create=created[key], mod=revision, version=versions[key]))

    keyspace = KeySpace("/", decode)
    mirrored = {}

    def follow():
        for key, old, new in keyspace.changes:
            assert mirrored.get(key) is old
            mirrored.pop(key, None)
            if new is not None:
                mirrored[key] = new

    keyspace.observers.append(follow)
    # A revision is never split over responses.
    groups = {}
    for e in events:
        groups.setdefault(e.kv.mod_revision, []).append(e)
    responses = [batch(*group) for group in groups.values()]
    bounds = sorted({0, len(responses), *(c for c in cuts if c < len(responses))})
    for begin, end in pairwise(bounds):
        keyspace.apply(responses[begin:end])
    assert values(keyspace) == oracle
    assert [e.key for e in keyspace.entries] == sorted(k.encode() for k in oracle)
    assert mirrored == {e.key: e for e in keyspace.entries}
    assert keyspace.revision == (events[-1].kv.mod_revision if events else 0)

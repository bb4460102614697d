"""Shards whose source journals are deleted, on real brokers."""

from __future__ import annotations

import logging
import re
import time

import pytest

from gazette_sdk import Journals, shard
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.protocol.labels import RECOVERY_LOG
from gazette_sdk.shard.application import generator
from gazette_sdk.transport.loop import run
from support import order_totals, ride_join
from support.order_totals import totals

NAME = totals.full_name
ONE, TWO = f"{NAME}/orders/part-000", f"{NAME}/orders/part-001"


@pytest.fixture
def logged():
    """The texts that the generator logs, also while a tool sets up its log in this process."""
    texts = []

    def note(record):
        texts.append(record.getMessage())
        return True

    log = logging.getLogger(generator.__name__)
    log.addFilter(note)
    yield texts
    log.removeFilter(note)


def wait_for(condition, timeout_s=60):
    ends_at = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < ends_at, "it has not happened in time"
        time.sleep(0.05)
    return found


def deletions(texts):
    return [text for text in texts if text.startswith("deleted the shard")]


def ids(consumer):
    return [each.spec.id for each in consumer.list_shards()]


def errors(consumer, name):
    shards = [each for each in consumer.list_shards() if each.spec.id == name]
    return " ".join(text for each in shards for status in each.status for text in status.errors)


def embedded(gazette, application):
    return shard.EmbeddedConsumer(
        application, transport=gazette.transport, etcd=gazette.etcd_endpoint
    )


def delete(gazette, gazctl, journal):
    """Delete a journal with its content, as a user does."""
    gazctl.environ["GAZETTE_ADDRESS"] = gazette.address
    root = str(gazette.fragments)
    gazctl.ok("journals", "delete", journal, "--with-fragments", "--yes", "--file-root", root)


def hints_in_etcd(endpoint):
    """The keys of hints in Etcd."""

    async def scenario():
        etcd = await Etcd.connect(endpoint)
        try:
            found = await etcd.range(b"/gazette/hints/", b"/gazette/hints0")
            return [each.key.decode() for each in found.entries]
        finally:
            await etcd.aclose()

    return run(scenario(), 30)


def test_a_shard_ends_once_its_source_is_deleted(gazette, gazctl, monkeypatch, logged):
    monkeypatch.setattr(generator, "DELETION_GRACE_S", 0.5)
    order_totals.create_journals(gazette.transport)
    order_totals.publish(gazette.transport, 20)
    with embedded(gazette, totals) as consumer:
        consumer.wait_caught_up(timeout_s=60)
        assert ids(consumer) == [ONE, TWO]
        wait_for(lambda: any(TWO in key for key in hints_in_etcd(gazette.etcd_endpoint)))
        delete(gazette, gazctl, "orders/part-001")
        wait_for(lambda: ids(consumer) == [ONE])
        [line] = wait_for(lambda: deletions(logged))
        log = f"recovery/{TWO}"
        assert line.startswith(f"deleted the shard {TWO}, as orders/part-001 was deleted")
        assert f"Its recovery log {log} is kept" in line
        assert not any(TWO in key for key in hints_in_etcd(gazette.etcd_endpoint))
        # The other shard reads on, and what is kept is deleted by the command that the line names.
        order_totals.publish(gazette.transport, 20)
        consumer.wait_caught_up(timeout_s=60)
        command = line.rpartition("`gazctl ")[2].rstrip("`").split()
        assert command == ["journals", "delete", log, "--with-fragments"]
        delete(gazette, gazctl, log)
        # A journal of that name has a shard that begins from nothing.
        order_totals.create_journals(gazette.transport)
        wait_for(lambda: ids(consumer) == [ONE, TWO])
        consumer.wait_caught_up(timeout_s=60)


def test_a_shard_whose_source_is_created_again_stays_and_is_reset(gazette, gazctl):
    order_totals.create_journals(gazette.transport)
    order_totals.publish(gazette.transport, 20)
    with embedded(gazette, totals) as consumer:
        gazctl.environ["CONSUMER_ADDRESS"] = consumer.address
        consumer.wait_caught_up(timeout_s=60)
        delete(gazette, gazctl, "orders/part-001")
        text = f"it is a source of {TWO}, and was deleted"
        wait_for(lambda: text in errors(consumer, TWO))
        order_totals.create_journals(gazette.transport)
        gazctl.ok("shards", "unassign", "-l", f"id={TWO}", "--failed")
        text = "orders/part-001, a source of"
        wait_for(lambda: text in errors(consumer, TWO))
        assert "was deleted and created again" in errors(consumer, TWO)
        gazctl.ok("shards", "reset", "-l", f"id={TWO}", "--to", "begin", "--keep-state")
        order_totals.publish(gazette.transport, 20)
        consumer.wait_caught_up(timeout_s=60)
        assert ids(consumer) == [ONE, TWO]


def test_a_shard_that_misses_one_of_its_sources_is_kept_and_shown(
    gazette, gazctl, monkeypatch, logged
):
    """It ends once the other one is deleted, too."""
    monkeypatch.setattr(generator, "DELETION_GRACE_S", 0.5)
    ride_join.create_journals(gazette.transport)
    journals = Journals(transport=gazette.transport)
    one, two = (f"joined-rides/rides/part-00{number}" for number in range(2))
    with embedded(gazette, ride_join.joined) as consumer:
        consumer.wait_caught_up(timeout_s=60)
        gazctl.environ["CONSUMER_ADDRESS"] = consumer.address
        journals.delete("drivers/part-001")
        text = f"the shard {two} reads drivers/part-001, which does not exist any more"
        wait_for(lambda: text in gazctl.ok("shards", "list").stderr)
        assert len(wait_for(lambda: [each for each in logged if each.startswith(text)])) == 1
        wait_for(lambda: "drivers/part-001" in errors(consumer, two))
        assert ids(consumer) == [one, two]
        journals.delete("rides/part-001")
        wait_for(lambda: ids(consumer) == [one])
        wait_for(lambda: "does not exist any more" not in gazctl.ok("shards", "list").stderr)


def test_a_shard_that_was_made_by_hand_fails_and_is_not_deleted(gazette, gazctl, monkeypatch):
    monkeypatch.setattr(generator, "DELETION_GRACE_S", 0.5)
    order_totals.create_journals(gazette.transport)
    journals = Journals(transport=gazette.transport)
    journals.create("by-hand", partitions=0, replication=1)
    with embedded(gazette, totals) as consumer:
        consumer.wait_caught_up(timeout_s=60)
        gazctl.environ["CONSUMER_ADDRESS"] = consumer.address
        gazctl.environ["GAZETTE_ADDRESS"] = gazette.address
        listed = gazctl.ok("shards", "list", "-l", f"id={TWO}", "-o", "yaml").stdout.decode()
        by_hand = listed.replace(f"id: {TWO}", "id: by-hand").replace("orders/part-001", "by-hand")
        by_hand = re.sub("revision: .*", "revision: 0", by_hand)
        by_hand = by_hand.replace("recovery_log_prefix: recovery", "recovery_log_prefix: hand")
        (gazctl.directory / "by-hand.yaml").write_text(by_hand)
        journals.create("hand/by-hand", partitions=0, replication=1, content_type=RECOVERY_LOG)
        gazctl.ok("shards", "apply", "--specs", "by-hand.yaml")
        wait_for(lambda: ids(consumer) == ["by-hand", ONE, TWO])
        journals.delete("by-hand")
        journals.delete("orders/part-001")
        wait_for(lambda: ids(consumer) == ["by-hand", ONE])
        found = wait_for(lambda: errors(consumer, "by-hand"))
        assert "by-hand: JOURNAL_NOT_FOUND (it is a source of by-hand, and was deleted" in found
        assert "`gazctl shards delete -l id=by-hand`" in found


def test_the_process_that_leads_deletes_a_shard_and_all_processes_see_it(
    gazette, monkeypatch, logged
):
    monkeypatch.setattr(generator, "DELETION_GRACE_S", 0.5)
    order_totals.create_journals(gazette.transport)
    with embedded(gazette, totals) as first, embedded(gazette, totals) as second:
        first.wait_caught_up(timeout_s=60)
        Journals(transport=gazette.transport).delete("orders/part-000")
        for consumer in (first, second):
            wait_for(lambda each=consumer: ids(each) == [TWO])
        order_totals.publish(gazette.transport, 20)
        second.wait_caught_up(timeout_s=60)
        assert len(wait_for(lambda: deletions(logged))) == 1

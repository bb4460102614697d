"""Entries with a time to live, on real brokers, when the process that set it is killed."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request

from gazette_sdk import Journals, Publisher
from gazette_sdk.testing.shards import run_shards
from support.expiring_visits import TO_VISITS, Visit, visits

USERS = [f"user-{number}" for number in range(8)]
LIVES_S = 5.0


def counts(address):
    """Ask for the visits of all users; None while no primary answers."""
    found = []
    for user in USERS:
        try:
            with urllib.request.urlopen(f"{address}/visits/{user}", timeout=30) as answer:
                found.append(json.load(answer))
        except urllib.error.HTTPError as error:
            if error.code not in {503, 504}:
                raise
            return None
        except urllib.error.URLError:
            return None  # the process does not listen yet
    return found


def wait_for_counts(address, wanted):
    ends_at = time.monotonic() + 60
    while (found := counts(address)) != wanted:
        assert time.monotonic() < ends_at, found
        time.sleep(0.05)


def test_entries_end_at_their_times_on_the_process_that_takes_over(gazette):
    Journals(transport=gazette.transport).create("visits", partitions=2, replication=1)
    short, long = USERS[:4], USERS[4:]
    with run_shards(visits, processes=1, cluster=gazette, lease_ttl_s=2) as shards:
        with Publisher(TO_VISITS, transport=gazette.transport) as publisher:
            publisher.publish_batch([Visit(user, 3600) for user in USERS])
            publisher.publish_batch([Visit(user, LIVES_S) for user in short]).result(timeout=30)
        shards.wait_caught_up(timeout_s=60)
        shards.crash(0)
        shards.start(0)
        (process,) = shards.processes
        wait_for_counts(process.address, [0] * len(short) + [1] * len(long))
        with Publisher(TO_VISITS, transport=gazette.transport) as publisher:
            publisher.publish_batch([Visit(user, 3600) for user in short]).result(timeout=30)
        shards.wait_caught_up(timeout_s=60)
        wait_for_counts(process.address, [1] * len(USERS))

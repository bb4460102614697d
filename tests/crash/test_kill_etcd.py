"""`kill -9` of etcd members under three brokers, with continuous appends.

An append needs no Etcd while its route stands. So it goes on over the death of every member, also
of the leader and of the one that a broker is connected to, and over the loss of the majority for
less than the lease.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from crash.appends import History, append_over_http, make_content, read_over_http
from crash.test_kill_stream_replicas import JOURNAL, NAME, Brokers
from gazette_sdk.local_cluster import EtcdMembers
from support.etcd import etcd_cluster, leader_of, run

__all__ = ["etcd_cluster"]

ROUNDS = int(os.environ.get("GAZETTE_KILLS", "4"))
PAUSE_S = 1.0
STALL_MAX_S = 10.0
"""Bound of a stall on a busy machine; an idle one shows some hundredths of a second."""


@pytest.fixture
def brokers(etcd_cluster, tmp_path) -> Iterator[Brokers]:
    started = Brokers(etcd_cluster, tmp_path)
    try:
        started.start(*started.addresses)
        yield started
    finally:
        started.stop()


class Appender(threading.Thread):
    """Appends one after the other, and notes the longest time between two acknowledgements."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.history = History()
        self.longest_s = 0.0
        self.url = url
        self.is_stopped = threading.Event()
        self._seed = random.Random(12)

    def run(self) -> None:
        last = time.monotonic()
        while not self.is_stopped.is_set():
            content = make_content(self._seed, 1000)
            try:
                begin = append_over_http(self.url, content)
            except OSError:
                self.history.unknown.append(content)
                self.is_stopped.wait(0.05)
                continue
            self.history.acknowledged[begin] = content
            now = time.monotonic()
            self.longest_s, last = max(self.longest_s, now - last), now

    def wait_for_more(self, count: int) -> None:
        wanted = len(self.history.acknowledged) + count
        ends_at = time.monotonic() + 60
        while len(self.history.acknowledged) < wanted:
            assert self.is_alive()
            assert time.monotonic() < ends_at
            time.sleep(0.01)


def applied(address: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "gazette_sdk.cli.gazctl", "journals", "apply", "--specs", "-"],
        input=JOURNAL.replace("replication: 2", "replication: 3").encode(),
        env={**os.environ, "GAZETTE_ADDRESS": address},
        check=True,
        timeout=60,
    )


def test_appends_go_on_while_etcd_members_are_killed(etcd_cluster: EtcdMembers, brokers: Brokers):
    address = next(iter(brokers.addresses.values()))
    applied(address)
    url = f"{address}/{NAME}"
    while True:  # until it is assigned and synchronized
        try:
            begun = append_over_http(url, make_content(random.Random(1), 100))
            break
        except OSError:
            time.sleep(0.05)
    assert begun == 0
    appender = Appender(url)
    appender.start()
    try:
        for number in range(ROUNDS):
            leader = run(leader_of(etcd_cluster))
            followers = [member for member in etcd_cluster.servers if member is not leader]
            victim = leader if number % 2 == 0 else followers[number // 2 % 2]
            appender.wait_for_more(20)
            victim.kill()
            time.sleep(PAUSE_S)
            victim.start_blocking()
        for member in etcd_cluster.servers[:2]:  # no majority for a while
            member.kill()
        appender.wait_for_more(20)
        starting = [
            threading.Thread(target=member.start_blocking) for member in etcd_cluster.servers[:2]
        ]
        for thread in starting:
            thread.start()
        for thread in starting:
            thread.join()
        appender.wait_for_more(20)
    finally:
        appender.is_stopped.set()
        appender.join()
    print(
        f"\n{len(appender.history.acknowledged)} appends, longest stall {appender.longest_s:.3f} s"
    )
    assert appender.longest_s < STALL_MAX_S
    appender.history.unknown.append(make_content(random.Random(1), 100))
    appender.history.check(read_over_http(url))

"""A primary that lost the fence of its recovery log, and one that stood still, as recorded.

Ours differ on purpose: a primary whose log was taken over fails, and says so. The recorded one kept
its state PRIMARY and stood still.
"""

from __future__ import annotations

import asyncio
import base64
import time

from gazette_sdk import Reader
from gazette_sdk.message.uuid import ACK_TXN
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol import recoverylog_pb2 as rpb
from gazette_sdk.protocol.labels import label_set, pairs_of
from gazette_sdk.shard.recovery.log import fence_of
from gazette_sdk.shard.recovery.player import Playback
from gazette_sdk.transport.loop import run
from support.chained_shard import content_of
from support.golden_consumers import WAIT_S, running
from support.recovery_logs import operations
from support.vectors import golden

[FENCED] = golden("consumer/behaviour/fenced_primary.json")
[ZOMBIE] = golden("consumer/behaviour/zombie.json")
OTHER_AUTHOR = 123456789

SPECS = """
name: gold/
replication: 1
fragment: {{length: 1048576, compression_codec: NONE, refresh_interval: 10s, stores: ["file:///"]}}
children:
- name: gold/in/{shard}
  labels: [{{name: content-type, value: application/x-ndjson}}]
- name: gold/logs/{shard}
  labels: [{{name: content-type, value: application/x-gazette-recoverylog}}]
- name: gold/out/part-000
  labels: [{{name: content-type, value: application/x-ndjson}}, {{name: topic, value: gold-out}}]
"""

SHARDS = """
common: {{recovery_log_prefix: gold/logs, hint_prefix: /gold/hints/json4, hint_backups: 2, \
max_txn_duration: 1s, hot_standbys: {standbys}}}
shards: [{{id: {shard}, sources: [{{journal: gold/in/{shard}}}]}}]
"""


class World:
    """Processes, and one shard of theirs."""

    def __init__(self, consumers, shard):
        self.consumers = consumers
        self.shard = shard
        self.log = f"gold/logs/{shard}"
        self.transport = consumers.cluster.transport

    def apply(self, standbys):
        self.consumers.wait_for_keys({"members/local#json-a": "member"})  # it serves now
        specs = SHARDS.format(shard=self.shard, standbys=standbys)
        outcome = self.consumers.command("shards", "apply", stdin=specs.encode())
        assert outcome.status == 0, outcome.stderr

    def wait_for(self, members, primaries, **states):
        """Wait until members have the shard in these states: slot and state by process.

        Each primary, of one or two there were, has rotated its hints.
        """
        wanted = {f"items/{self.shard}": "shard"}
        wanted |= {f"members/local#{name}": "member" for name in members}
        for name, (slot, code) in states.items():
            wanted[f"assign/{self.shard}#local#{name}#{slot}"] = code
        wanted |= {f"{self.shard}.backup.{slot}": "hints" for slot in range(primaries)}
        self.consumers.wait_for_keys(wanted)

    def publish(self, **message):
        self.consumers.publish(f"gold/in/{self.shard}", message)

    def append(self, author=None):
        """Append nothing to the log, if the author, where one is given, holds its fence."""
        return run(self._append(author), WAIT_S)

    async def _append(self, author):
        request = pb.AppendRequest(journal=self.log)
        if author is not None:
            request.check_registers.include.CopyFrom(label_set(author=author))

        async def requests():
            yield request
            yield pb.AppendRequest()

        return await self.transport.append(requests())

    def author(self):
        return dict(pairs_of(self.append().registers))["author"]

    def content(self):
        return run(content_of(self.transport, self.log), WAIT_S)

    def take_over(self, directory):
        """Play the log elsewhere, and hand it off to another author."""
        return run(self._take_over(directory), WAIT_S)

    async def _take_over(self, directory):
        playback = Playback(self.transport, rpb.FSMHints(log=self.log), directory)
        task = asyncio.create_task(playback.run())
        recovered = await playback.hand_off(OTHER_AUTHOR)
        await task
        return recovered

    def outputs(self, isolation):
        """Flags and totals of the messages of the output."""
        with Reader(
            dict, name="gold/out/part-000", isolation=isolation, transport=self.transport
        ) as reader:
            return [(each.flags, each.message.get("Total", 0)) for each in reader]


def told(log):
    """Return what the operations of a log do, and which of its authors, in order, does it.

    A file may be written in several pieces.
    """
    authors, found = {}, []
    for each in operations(log):
        author = authors.setdefault(each.operation.author, len(authors))
        changes = [
            (field.name, getattr(change, "path", ""), author)
            for field, change in each.operation.ListFields()
            if field.name in {"create", "link", "unlink", "write"}
        ]
        assert len(changes) <= 1
        change = changes[0] if changes else ("noop", "", author)
        if change[0] != "write" or found[-1] != change:
            found.append(change)
    return found


def recorded_outputs(recording):
    """Flags and totals of all messages of the recorded output."""
    return [
        (message["flags"], message.get("Total", 0))
        for event in recording["trace"]
        if event.get("seen_in", "").startswith("gold/out/")
        for message in event["messages"]
    ]


def recorded_step(recording, text):
    [found] = [each for each in recording["steps"] if text in each["step"]]
    return found


def test_a_primary_loses_the_fence_of_its_log_to_another_player(tmp_path):
    with running(tmp_path, SPECS.format(shard="fence")) as consumers:
        world = World(consumers, "fence")
        consumers.start("json-a")
        world.apply(standbys=0)
        world.wait_for(["json-a"], 1, **{"json-a": (0, "PRIMARY")})
        world.publish(Key="a", N=1)
        consumers.wait_until_read("fence", 64)
        first_author = world.author()

        recovered = world.take_over(tmp_path / "played")
        player = recorded_step(FENCED, "another player")["player"]
        assert sorted(path.name for path in (tmp_path / "played").iterdir()) == [
            path.removeprefix("/") for path in player["links"]
        ]
        assert recovered.fsm.next_seq_no == player["next_seq_no"]
        log = world.content()

        refused = world.append(first_author)
        recorded = recorded_step(FENCED, "checking the old author")["reply"]
        assert pb.Status.Name(refused.status) == recorded["status"]
        assert list(pairs_of(refused.registers)) == [("author", fence_of(OTHER_AUTHOR))]
        assert not refused.HasField("commit")
        accepted = world.append(fence_of(OTHER_AUTHOR))
        recorded = recorded_step(FENCED, "checking the new author")["reply"]
        assert pb.Status.Name(accepted.status) == recorded["status"]
        assert accepted.commit.begin == accepted.commit.end == len(log)

        world.publish(Key="a", N=10)
        world.wait_for(["json-a"], 1, **{"json-a": (0, "FAILED")})
        status = consumers.keys()["assign/fence#local#json-a#0"].value
        [error] = cpb.ReplicaStatus.FromString(status).errors
        assert world.log in error
        assert world.content() == log

        consumers.ask("json-a", "Unassign", cpb.UnassignRequest(shards=["fence"]))
        world.wait_for(["json-a"], 2, **{"json-a": (0, "PRIMARY")})
        consumers.wait_until_read("fence", 129)
        assert world.author() not in {first_author, fence_of(OTHER_AUTHOR)}
        assert told(world.content()) == told(base64.b64decode(FENCED["log_b64"]))
        assert world.outputs("uncommitted") == recorded_outputs(FENCED)


def test_a_stopped_primary_wakes_up_after_its_successor_took_over(tmp_path):
    with running(tmp_path, SPECS.format(shard="zombie")) as consumers:
        world = World(consumers, "zombie")
        both = ["json-a", "json-b"]
        consumers.start("json-a")
        world.apply(standbys=1)
        world.wait_for(["json-a"], 1, **{"json-a": (0, "PRIMARY")})
        consumers.start("json-b")
        world.wait_for(both, 1, **{"json-a": (0, "PRIMARY"), "json-b": (1, "STANDBY")})
        world.publish(Key="a", N=1)
        consumers.wait_until_read("zombie", 64)
        first_author = world.author()

        world.publish(Key="a", N=10, Do="sleep", Ms=1500)
        time.sleep(0.3)  # the message is being consumed
        consumers.processes["json-a"].pause()
        world.wait_for(["json-b"], 2, **{"json-b": (0, "PRIMARY")})
        consumers.wait_until_read("zombie", 152, "json-b")
        world.publish(Key="a", N=100)
        consumers.wait_until_read("zombie", 218, "json-b")
        author, log = world.author(), world.content()
        assert author != first_author

        consumers.processes["json-a"].resume()
        exited = recorded_step(ZOMBIE, "zombie-a ended")
        assert consumers.processes["json-a"].wait_until_ended() == exited["exit"]
        assert (world.author(), world.content()) == (author, log)
        assert told(log) == told(base64.b64decode(ZOMBIE["log_b64"]))
        totals = [total for flags, total in recorded_outputs(ZOMBIE) if flags != ACK_TXN]
        assert [total for _, total in world.outputs("committed")] == totals

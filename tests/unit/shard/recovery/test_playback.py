from __future__ import annotations

import asyncio
from types import SimpleNamespace

from gazette_sdk.protocol import recoverylog_pb2 as pb
from gazette_sdk.shard.recovery.player import Playback


def test_the_length_of_files_is_told_while_a_worker_plays(tmp_path):
    nodes = {}

    class Node:
        @property
        def size_bytes(self):
            nodes[len(nodes)] = self  # as the worker's thread may at any time
            return 7

    async def scenario():
        playback = Playback(None, pb.FSMHints(log="a/log"), tmp_path)
        assert playback.bytes_live == 0
        nodes[0] = Node()
        playback._player = SimpleNamespace(fsm=SimpleNamespace(live_nodes=nodes))
        assert playback.bytes_live == 7

    asyncio.run(scenario())

"""Consumer process over scripted shards, beside plain code that calls it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from contextlib import asynccontextmanager

from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.shard.recovery import hints as fsm_hints
from support.etcd import within
from support.shard_services import assign, put_shard, served_shards


class ConsumerThread:
    """A consumer process over scripted shards, on a thread of its own."""

    def __init__(self, etcd) -> None:
        self._etcd = etcd
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="consumer")
        self.process = None

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()

        @asynccontextmanager
        async def connect():
            client = await Etcd.connect(self._etcd.address)
            try:
                yield client
            finally:
                await client.aclose()

        async with served_shards(connect, "aaaa") as self.process:
            self._started.set()
            await asyncio.Event().wait()

    def __enter__(self):
        self._thread.start()
        assert self._started.wait(30)
        return self

    def __exit__(self, *_) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(30)
        assert not self._thread.is_alive()

    def do(self, work):
        """Runs a coroutine on the process' loop."""
        return asyncio.run_coroutine_threadsafe(within(work), self._loop).result(60)

    def put(self, spec):
        self.do(put_shard(self.process.etcd, spec))
        self.do(self.process.settle())

    def assign(self, shard, slot, **values):
        self.do(assign(self.process.etcd, shard, "aaaa", slot, **values))
        self.do(self.process.settle())

    def put_hints(self, shard, key, hints):
        key = f"/hints/{shard}.{key}".encode()
        self.do(self.process.etcd.put(key, fsm_hints.to_json(hints)))

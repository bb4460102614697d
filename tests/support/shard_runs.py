"""Primary runs of a shard over a real cluster: recovery, store, input, output and runner.

All is called on the SDK's event loop, with :func:`gazette_sdk.transport.loop.run`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.message import Envelope, Reader
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol import recoverylog_pb2 as rpb
from gazette_sdk.shard import Application, Shard
from gazette_sdk.shard.recovery.log import RecoveryLog
from gazette_sdk.shard.recovery.player import Playback
from gazette_sdk.shard.recovery.recorder import Recorder
from gazette_sdk.shard.transaction.consume import OnStep
from gazette_sdk.shard.transaction.input import Input
from gazette_sdk.shard.transaction.runner import Runner
from gazette_sdk.shard.transaction.transaction import Output
from gazette_sdk.transport.append.appender import AppendService

WAIT_S = 60.0
JSON = "application/x-ndjson"
LOG = "application/x-gazette-recoverylog"


@dataclass
class World:
    """Journals of one test: a source of some partitions, outputs, and a recovery log."""

    cluster: EmbeddedCluster
    directory: Path
    name: str
    sources: int = 1
    outputs: int = 2
    directories: Any = field(default_factory=itertools.count)

    def create(self) -> None:
        for topic, count, content_type in (
            ("in", self.sources, JSON),
            ("out", self.outputs, JSON),
            ("log", 1, LOG),
        ):
            children = "".join(f"  - name: {name}\n" for name in self.names(topic, count))
            self.cluster.apply(
                f"name: {self.name}/{topic}/\n"
                "replication: 1\n"
                f"labels: [{{name: topic, value: {self.name}-{topic}}},"
                f" {{name: content-type, value: {content_type}}}]\n"
                'fragment: {length: 1048576, compression_codec: NONE, stores: ["file:///"],'
                " refresh_interval: 10s}\n"
                f"children:\n{children}"
            )

    def names(self, topic: str, count: int) -> list[str]:
        return [f"{self.name}/{topic}/part-{part:03d}" for part in range(count)]

    @property
    def source_names(self) -> list[str]:
        return self.names("in", self.sources)

    @property
    def output_names(self) -> list[str]:
        return self.names("out", self.outputs)

    @property
    def log(self) -> str:
        return f"{self.name}/log/part-000"

    def read(self, message: type, journal: str, isolation: Any = "committed") -> list[Envelope]:
        reader = Reader(
            message,
            name=journal,
            isolation=isolation,
            block=False,
            transport=self.cluster.transport,
        )
        return list(reader)

    def new_directory(self) -> Path:
        """A directory of another machine."""
        return self.directory / f"shard-{next(self.directories)}"


class Primary:
    """One primary run of a shard of a world; with a recovery log unless it is turned off."""

    def __init__(
        self,
        world: World,
        application: Application[Any, Any],
        *,
        on_step: OnStep | None = None,
        with_log: bool = True,
        directory: Path | None = None,
        hints: rpb.FSMHints | None = None,
        wrap_log: Any = None,
    ) -> None:
        self.world = world
        self.application = application
        self.transport = world.cluster.transport
        self.directory = directory or world.new_directory()
        self.recorder: Recorder | None = None
        self.runner: Runner
        self.store: Any
        self.task: asyncio.Task[None]
        self._on_step = on_step
        self._with_log = with_log
        self._hints = hints or rpb.FSMHints(log=world.log)
        self._wrap_log = wrap_log or (lambda log: log)
        self._appends: AppendService | None = None

    async def start(self) -> Primary:
        async with asyncio.timeout(WAIT_S):
            log = await self._recover() if self._with_log else None
            self.directory.mkdir(parents=True, exist_ok=True)
            spec = cpb.ShardSpec(
                id="shard",
                sources=[cpb.ShardSpec.Source(journal=name) for name in self.world.source_names],
            )
            handle = Shard("shard", spec, self.directory, "test/shard", self.transport)
            self.store = self.application.new_store(handle)
            self.runner = Runner(
                self.application,
                handle,
                self.store,
                recorder=self.recorder,
                log=log,
                new_input=lambda checkpoint: Input(
                    self.transport,
                    dict.fromkeys(self.world.source_names, 0),
                    checkpoint,
                    self.application.new_message,
                ),
                output=Output(self.transport),
                on_step=self._on_step,
            )
            await self.runner.restore()
        self.task = asyncio.create_task(self.runner.run())
        return self

    async def _recover(self) -> Any:
        playback = Playback(self.transport, self._hints, self.directory)
        playing = asyncio.create_task(playback.run())
        author = random.randint(1, (1 << 32) - 1)
        recovered = await playback.hand_off(author)
        await playing
        self.recorder = Recorder(
            recovered.fsm, log=self.world.log, author=author, write_head=recovered.write_head
        )
        self._appends = AppendService(self.transport)
        log = RecoveryLog(self._appends.appender(self.world.log), self.world.log, author)
        if self.recorder.opening:
            self.recorder.appended(await log.take_over(self.recorder.opening))
        return self._wrap_log(log)

    async def caught_up(self) -> None:
        """Wait until all that is in the sources is consumed and acknowledged."""
        heads = {name: await self._head(name) for name in self.world.source_names}
        waiting = asyncio.create_task(self.runner.progress.wait(heads))
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait({waiting, self.task}, return_when=asyncio.FIRST_COMPLETED)
        if self.task.done():
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            self.task.result()
        await waiting

    async def _head(self, journal: str) -> int:
        async for item in self.transport.read(
            pb.ReadRequest(journal=journal, offset=-1, metadata_only=True)
        ):
            return int(item.write_head) if isinstance(item, pb.ReadResponse) else 0
        return 0

    async def failed(self) -> BaseException:
        """Wait until the run fails."""
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait({self.task})
        error = self.task.exception()
        assert error is not None
        await self._close()
        return error

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self._close()

    async def _close(self) -> None:
        if self._appends is not None:
            await self._appends.aclose()
        self.store.destroy()

    @property
    def read_through(self) -> Mapping[str, int]:
        return self.runner.progress.read_through

"""``gazette dev kill``, ``pause``, ``resume``, ``drain``, ``start`` and ``status``."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import orjson

from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.formats import NONE, write_table
from gazette_sdk.cli.settings import DEV_CONTROL
from gazette_sdk.local_cluster.control import BrokerStatus, Control, call

__all__ = ["drain", "kill", "pause", "resume", "start", "status"]


async def kill(invocation: Invocation) -> None:
    """End brokers with SIGKILL."""
    await _run(invocation, "kill")


async def pause(invocation: Invocation) -> None:
    """Stop brokers with SIGSTOP."""
    await _run(invocation, "pause")


async def resume(invocation: Invocation) -> None:
    """Continue paused brokers."""
    await _run(invocation, "resume")


async def drain(invocation: Invocation) -> None:
    """Let brokers hand over their journals and end."""
    await _run(invocation, "drain")


async def start(invocation: Invocation) -> None:
    """Start brokers again."""
    await _run(invocation, "start")


async def status(invocation: Invocation) -> None:
    """Write the status of brokers."""
    await _run(invocation, "status")


async def _run(invocation: Invocation, control: Control) -> None:
    """Control the named brokers, and write their status afterwards.

    Raises:
        GazetteError: no cluster with controls runs, or it refused.
    """
    settings = invocation.settings(DEV_CONTROL)
    brokers = await call(_directory(settings.data), control, invocation.arguments)
    if settings.format == "json":
        sys.stdout.write("".join(f"{orjson.dumps(asdict(each)).decode()}\n" for each in brokers))
    else:
        write_table(["Name", "Zone", "State", "Address", "PID", "Starts"], map(_row, brokers))


def _directory(text: str) -> Path:
    return Path(text).expanduser().absolute()


def _row(broker: BrokerStatus) -> list[str]:
    pid = NONE if broker.pid is None else str(broker.pid)
    return [broker.name, broker.zone, broker.state, broker.address, pid, str(broker.starts)]

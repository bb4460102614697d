from __future__ import annotations

import asyncio
import logging

import pytest

from gazette_sdk.cli.serve import Identity, serve_until_drained
from gazette_sdk.server.process import ServiceManager, StopSignal


class Member:
    """Member of a cluster with an old Etcd, which leaves as soon as it serves."""

    endpoint = "http://localhost:1"
    etcd_version = (3, 5, 1)
    held = 0

    def __init__(self):
        self.ended = asyncio.get_running_loop().create_future()

    async def start(self):
        self.ended.set_result(None)

    async def drain(self):
        pytest.fail("it has left")


@pytest.mark.parametrize(("is_of_dev", "level"), [(False, logging.WARNING), (True, logging.DEBUG)])
def test_an_etcd_that_can_lose_data_is_warned_of_outside_of_dev(caplog, is_of_dev, level):
    async def scenario():
        identity = Identity(
            "here", "one", "http://etcd:2379", "broker", "journals", is_of_dev=is_of_dev
        )
        with StopSignal() as stop:
            await serve_until_drained(Member(), stop, identity, ServiceManager({}))

    with caplog.at_level(logging.DEBUG, "gazette_sdk.cli.serve"):
        asyncio.run(scenario())
    [record] = [each for each in caplog.records if "Etcd is version 3.5.1" in each.message]
    assert record.levelno == level
    assert "upgrade it to 3.5.6 or later" in record.message

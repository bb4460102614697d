import asyncio
import contextlib
import os
import signal

import pytest

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.server.process import ReloadedFiles
from support.etcd import run, within


@contextlib.asynccontextmanager
async def running(files):
    task = asyncio.create_task(files.run())
    await asyncio.sleep(0)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def test_a_changed_file_is_read_again_without_a_signal(tmp_path):
    async def scenario():
        path, seen = tmp_path / "keys", asyncio.Queue()
        path.write_text("1")
        files = ReloadedFiles(period_s=0.01)
        files.add("keys", [str(path), ""], lambda: seen.put_nowait(path.read_text()))
        async with running(files):
            path.write_text("22")
            assert await within(seen.get()) == "22"
            replacement = tmp_path / "other"
            replacement.write_text("33")
            replacement.replace(path)  # as mounted secrets are replaced
            assert await within(seen.get()) == "33"
            assert seen.empty()

    run(scenario())


def test_a_signal_reads_all_files_at_once(tmp_path):
    async def scenario():
        path, seen = tmp_path / "keys", asyncio.Queue()
        path.write_text("1")
        files = ReloadedFiles(period_s=3600)
        files.add("keys", [str(path)], lambda: seen.put_nowait(None))
        async with running(files):
            os.kill(os.getpid(), signal.SIGHUP)
            await within(seen.get())

    run(scenario())


def test_a_failure_is_logged_and_the_next_change_is_another_attempt(tmp_path, caplog):
    async def scenario():
        path, seen = tmp_path / "keys", asyncio.Queue()
        path.write_text("1")

        def reload():
            seen.put_nowait(None)
            if path.read_text() == "bad":
                raise ConfigurationError("no keys")

        files = ReloadedFiles(period_s=0.01)
        files.add("authorization keys", [str(path)], reload)
        async with running(files):
            path.write_text("bad")
            await within(seen.get())
            path.write_text("good again")
            await within(seen.get())

    with caplog.at_level("WARNING"):
        run(scenario())
    first, last = caplog.messages
    assert first.startswith("authorization keys cannot be read again")
    assert last.startswith("authorization keys were read again from")


def test_files_that_are_not_named_are_not_checked():
    files = ReloadedFiles()
    files.add("keys", ["", ""], lambda: pytest.fail("called"))
    files._check(is_forced=True)

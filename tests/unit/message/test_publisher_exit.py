"""The end of a program whose publishers nobody closed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

PROGRAM = """
    import asyncio, logging, sys
    from gazette_sdk import Publisher, mapping
    from gazette_sdk.protocol import broker_pb2 as pb
    from gazette_sdk.transport.loop import run
    import gazette_sdk.message.publisher as module
    from support.memory_transport import MemoryTransport

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")

    class Telling(MemoryTransport):
        async def append(self, requests, target=None):
            response = await super().append(requests)
            print("appended", self.appends[-1][1].count(b"\\n"), flush=True)
            return response

    transport = Telling()
    transport.create("a/journal")
    publisher = Publisher(mapping.direct("a/journal"), transport=transport)

    async def gate():
        transport.append_gate = asyncio.Event()
        return transport.append_gate

"""


def run_program(body: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM) + textwrap.dedent(body)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_what_was_published_is_sent():
    said, logged = run_program("""
        gate = run(gate())
        publisher.publish_batch([{"n": n} for n in range(10)])
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.1), publisher._sender.connection().loop
            ).add_done_callback(lambda _: gate.set())
    """)
    assert (said, logged) == ("appended 10\n", "")


def test_it_is_sent_though_nobody_holds_the_publisher():
    said, logged = run_program("""
        publisher.publish({"n": 1})
        del publisher
    """)
    assert (said, logged) == ("appended 1\n", "")


def test_what_cannot_be_sent_in_time_is_counted():
    said, logged = run_program("""
        module.EXIT_TIMEOUT_S = 0.1
        run(gate())
        publisher.publish({"n": 1})
        publisher.publish_batch([{"n": n} for n in range(10)])
    """)
    assert said == ""
    assert logged.startswith("WARNING 11 messages could not be delivered before the end of the")


def test_a_failure_nobody_was_told_of_is_told():
    _, logged = run_program("""
        transport.append_faults = [pb.NOT_ALLOWED]
        publisher.publish({"n": 1})
    """)
    assert "WARNING a publisher was not closed, and had failed: a/journal: NOT_ALLOWED" in logged


def test_calls_that_wait_for_a_listing_are_counted():
    _, logged = run_program("""
        module.EXIT_TIMEOUT_S = 0.1

        async def publish():
            publisher.publish({"n": 1})
            publisher.publish({"n": 2})

        async def nothing(request):
            await asyncio.Event().wait()
            yield None

        transport.list = nothing
        run(publish())
    """)
    assert "WARNING 2 messages could not be delivered" in logged


def test_a_closed_publisher_says_nothing():
    said, logged = run_program("""
        publisher.publish({"n": 1})
        publisher.close()
    """)
    assert (said, logged) == ("appended 1\n", "")


INTERRUPT = """
    from gazette_sdk.message.kinds.json import DictKind

    def interrupted(self, message, stamp):
        raise KeyboardInterrupt

    publisher.publish({"n": 1}).result(10)
    DictKind.encode = interrupted
    try:
        publisher.publish({"n": 2})
    except KeyboardInterrupt:
        pass
"""


def test_an_interrupted_publisher_that_nobody_closed_is_reported():
    said, logged = run_program(INTERRUPT)
    assert said == "appended 1\n"
    assert (
        "WARNING a publisher was not closed, and had failed: the publisher was interrupted"
        in logged
    )


def test_an_interrupted_publisher_that_was_closed_says_nothing():
    assert run_program(INTERRUPT + "    publisher.close()\n") == ("appended 1\n", "")

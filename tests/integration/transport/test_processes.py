"""Transports across forks, and at the end of a process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent import futures

import grpc
import pytest

from gazette_sdk.protocol import broker_pb2 as pb
from support.scripted_broker import header


@pytest.fixture
def address():
    """A server without a loop, whose listings are empty."""
    server = grpc.server(futures.ThreadPoolExecutor(2))

    def on_list(request, context):
        yield pb.ListResponse(header=header())

    handler = grpc.unary_stream_rpc_method_handler(
        on_list, pb.ListRequest.FromString, pb.ListResponse.SerializeToString
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("protocol.Journal", {"List": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}"
    stopped: threading.Event = server.stop(None)
    assert stopped.wait(10)


def run(code, address):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | {"GAZETTE_ADDRESS": address, "GRPC_VERBOSITY": "NONE"},
        capture_output=True,
        timeout=60,
        check=False,
        text=True,
    )


LIST = """
import os, sys
from gazette_sdk.errors import ClosedError, ConfigurationError
from gazette_sdk.transport import connect, loop
from gazette_sdk.transport.listing import list_journals

def listed(transport):
    return len(loop.run(list_journals(transport), 20).journals)
"""


def test_a_process_that_leaves_its_transport_open_ends_without_a_word(address):
    done = run(LIST + "print(listed(connect()))", address)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_a_child_forked_before_grpc_was_used_connects_by_itself(address):
    done = run(
        LIST
        + """
loop.sdk_loop()
if os.fork() == 0:
    os._exit(listed(connect()))
_, status = os.wait()
sys.exit(os.waitstatus_to_exitcode(status) or listed(connect()))
""",
        address,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_child_forked_after_grpc_was_used_is_told_so_and_the_parent_goes_on(address):
    done = run(
        LIST
        + """
transport = connect()
listed(transport)
if os.fork() == 0:
    for given, error in ((transport, ClosedError), (connect(), ConfigurationError)):
        try:
            listed(given)
        except error as refused:
            print(refused, flush=True)
    os._exit(0)
_, status = os.wait()
sys.exit(os.waitstatus_to_exitcode(status) or listed(transport))
""",
        address,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "in a forked child" in done.stdout
    assert "spawn" in done.stdout

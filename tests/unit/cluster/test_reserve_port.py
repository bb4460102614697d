"""Ports of servers which are started again at the same port."""

import socket
import subprocess
import sys

import pytest

from gazette_sdk.cluster.child_process import PORTS, reserve_port

RESERVE_IN_ANOTHER = """
import sys
from gazette_sdk.cluster import child_process
child_process.PORTS = range(int(sys.argv[1]), int(sys.argv[1]) + 1)
child_process.reserve_port()
"""


def test_ports_differ_and_none_is_one_of_an_outgoing_connection():
    ports = [reserve_port() for _ in range(50)]
    assert len(set(ports)) == len(ports)
    assert all(port in PORTS for port in ports)


def test_a_server_listens_on_its_port_and_again_after_it_was_killed():
    port = reserve_port()
    for _ in range(2):
        with (
            socket.create_server(("127.0.0.1", port)) as server,
            socket.create_connection(("127.0.0.1", port)),
        ):
            server.accept()[0].close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_no_other_process_reserves_the_port_while_its_server_is_down():
    port = reserve_port()
    other = subprocess.run(
        [sys.executable, "-c", RESERVE_IN_ANOTHER, str(port)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "no free port was found" in other.stderr

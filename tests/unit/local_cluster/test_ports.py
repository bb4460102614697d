"""Ports of servers which are started again at the same port."""

import socket

from gazette_sdk.local_cluster.etcd_members import PORTS, reserve_port


def test_ports_differ_and_none_is_one_of_an_outgoing_connection():
    ports = [reserve_port() for _ in range(50)]
    assert len(set(ports)) == len(ports)
    assert all(port in PORTS for port in ports)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", ports[0]))

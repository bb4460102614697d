from __future__ import annotations

import pytest

from gazette_sdk.transport.stream.wire import REMEMBERED_S, RememberedWires
from gazette_sdk.transport.wire import Health


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


READY, IDLE, FAILED, CONNECTING = Health.READY, Health.IDLE, Health.FAILED, Health.CONNECTING


@pytest.mark.parametrize(
    ("told", "steps"),
    [
        ("nothing is known at first", [(0, IDLE, False)]),
        ("it is remembered", ["remember", (0, IDLE, True), (1, READY, True)]),
        (
            "for ten minutes",
            ["remember", (REMEMBERED_S - 1, READY, True), (1, READY, False), (1, READY, False)],
        ),
        (
            "anew from each time",
            [
                "remember",
                (REMEMBERED_S - 1, READY, True),
                "remember",
                (REMEMBERED_S - 1, READY, True),
            ],
        ),
        ("until a failed call", ["remember", (0, READY, True), "forget", (0, READY, False)]),
        ("until a connection is lost", ["remember", (0, READY, True), (1, IDLE, False)]),
        ("or fails again", ["remember", (0, READY, True), (1, FAILED, False), (0, READY, False)]),
        (
            "the first connection may take time",
            ["remember", (0, IDLE, True), (0, CONNECTING, True), (0, READY, True)],
        ),
        (
            "what was before doesn't count",
            ["remember", (0, READY, True), "forget", "remember", (0, IDLE, True)],
        ),
    ],
)
def test_which_endpoints_get_grpc(told, steps):
    clock = Clock()
    memory = RememberedWires(clock)
    for step in steps:
        if step == "remember":
            memory.remember("http://a:1")
        elif step == "forget":
            memory.forget("http://a:1")
        else:
            wait_s, health, expected = step
            clock.now += wait_s
            assert memory.only_grpc("http://a:1", health) is expected, told
            assert not memory.only_grpc("http://b:1", health)

"""Message number n."""

from __future__ import annotations

import orjson
import pytest

from gazette_sdk.cli.bench.site import Messages
from gazette_sdk.cli.settings import SIZE_BYTES_MAX, SIZE_BYTES_MIN


@pytest.mark.parametrize("size", [SIZE_BYTES_MIN, 200, 4096, SIZE_BYTES_MAX])
@pytest.mark.parametrize("number", [0, 9, 10, 123_456_789, (1 << 63) - 1])
def test_a_message_is_as_long_as_was_asked_for(size, number):
    message = Messages(size).message(number)
    assert message["n"] == number
    assert len(orjson.dumps(message)) == size


def test_a_text_follows_from_the_number_alone():
    one, other = Messages(100), Messages(100)
    assert [one.text(n) for n in range(1000)] == [other.text(n) for n in range(1000)]
    assert len({one.text(n) for n in range(1000)}) == 1000

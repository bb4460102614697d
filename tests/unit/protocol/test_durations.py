from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import durations


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("0s", 0),
        ("1m0s", 60 * 10**9),
        ("1h0m0s", 3600 * 10**9),
        ("720h0m0s", 720 * 3600 * 10**9),
        ("1.5s", 1_500_000_000),
        ("100ms", 100_000_000),
        ("2.5µs", 2_500),
        ("7ns", 7),
        ("-2m30s", -150 * 10**9),
        ("1h1m1.000000001s", 3661 * 10**9 + 1),
        ("2562047h47m16.854775807s", 2**63 - 1),
    ],
)
def test_durations_are_written_as_go_does(text, ns):
    assert durations.parse_duration(text) == ns
    assert durations.format_duration(ns) == text


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("0", 0),
        ("+5s", 5 * 10**9),
        ("1.s", 10**9),
        (".5s", 5 * 10**8),
        ("1us", 1000),
        ("1μs", 1000),
        ("90m", 5400 * 10**9),
        ("1s1h", 3601 * 10**9),
    ],
)
def test_other_spellings_are_read(text, ns):
    assert durations.parse_duration(text) == ns


@pytest.mark.parametrize(
    "text", ["", "5", "s", "1 s", "1d", "1h-1m", "--1s", ".s", "1_0s", "٣s", "2562048h"]
)
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ValidationError) as caught:
        durations.parse_duration(text)
    assert caught.value.kind == "invalid_duration"


@given(st.integers(-(2**63) + 1, 2**63 - 1))
def test_durations_survive_text_and_protobuf(ns):
    assert durations.parse_duration(durations.format_duration(ns)) == ns
    message = durations.from_ns(ns)
    assert durations.to_ns(message) == ns
    assert message.seconds * message.nanos >= 0


def test_seconds_are_floats():
    assert durations.to_seconds(Duration(seconds=1, nanos=500_000_000)) == 1.5
    assert durations.from_seconds(0.25) == Duration(nanos=250_000_000)

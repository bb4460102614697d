"""The contract of framings with the transport that users get: a broker."""

from __future__ import annotations

from hypothesis import strategies as st

from gazette_sdk.testing.framings import FramingContract
from support.netstrings import Netstrings


class TestNetstrings(FramingContract):
    framing = Netstrings()
    payloads = st.just(b"")

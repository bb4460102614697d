"""Appends whose outcome is known, to be held against a journal by the public checker.

Every append carries its own name and length in front of random content, so that a journal can be
taken apart into whole appends again. Of each, one of three things is known: acknowledged (it is
there, exactly once, at the offset that was promised), given up before its commit (it is nowhere),
or unknown, because the answer was lost (it is there whole, or not at all).
"""

from __future__ import annotations

import random
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field

from gazette_sdk.testing import Copy, JournalChecker, raise_violations

HEADER = b"append %016x %08x\n"
HEADER_BYTES = len(HEADER % (0, 0))


def make_content(seed: random.Random, length: int) -> bytes:
    """Content of at least ``length`` bytes, with a name that no other content has."""
    body = seed.randbytes(max(length - HEADER_BYTES, 0))
    return HEADER % (seed.getrandbits(64), len(body)) + body


@dataclass
class History:
    """What became of the appends to one journal."""

    acknowledged: dict[int, bytes] = field(default_factory=dict)
    unknown: list[bytes] = field(default_factory=list)
    given_up: list[bytes] = field(default_factory=list)

    def check(self, content: bytes) -> None:
        """Hold the journal's whole content, from offset 0, against what is known."""
        checker = JournalChecker()
        for begin, appended in self.acknowledged.items():
            checker.acknowledged("journal", begin, begin + len(appended), appended)
        for appended in self.unknown:
            checker.uncertain("journal", appended)
        for appended in self.given_up:
            checker.rejected("journal", appended)
        raise_violations(checker.check("journal", [Copy("broker", 0, content)]))


def take_apart(content: bytes) -> dict[int, bytes]:
    """The whole appends of a journal, by their offset.

    Raises:
        AssertionError: something stands between appends, or one is torn.
    """
    found: dict[int, bytes] = {}
    offset = 0
    while offset < len(content):
        header = content[offset : offset + HEADER_BYTES]
        assert header.startswith(b"append "), f"no append begins at offset {offset}: {header!r}"
        end = offset + HEADER_BYTES + int(header.split()[2], 16)
        assert end <= len(content), f"the append at offset {offset} is torn"
        found[offset] = content[offset:end]
        offset = end
    return found


def append_over_http(url: str, content: bytes, timeout_s: float = 30.0) -> int:
    """Append; the offset at which it begins.

    Raises:
        OSError: no answer, or a bad one: the outcome is unknown.
    """
    request = urllib.request.Request(url, data=content, method="PUT")
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        begin, end = int(response.headers["X-Commit-Begin"]), int(response.headers["X-Commit-End"])
    assert end - begin == len(content)
    return begin


def read_over_http(url: str, timeout_s: float = 30.0) -> bytes:
    """The journal's content, from offset 0 to its write head.

    What one broker alone held when it was cut off reaches the others after the next appends: until
    then, their content ends there.

    Raises:
        TimeoutError: the content still ends before the write head.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(f"{url}?offset=0", timeout=timeout_s) as response:
                content: bytes = response.read()
                head = int(response.headers["X-Write-Head"])
        except urllib.error.HTTPError as error:
            if error.code == 416:  # nothing has been appended
                return b""
            raise
        if len(content) >= head:
            return content
        if time.monotonic() > deadline:
            raise TimeoutError(f"{url} ends at offset {len(content)}, and its head is {head}")
        time.sleep(0.1)

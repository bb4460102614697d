"""A framing as users write their own."""

from __future__ import annotations

import re

from gazette_sdk.errors import DecodeError, FramingError, TornFrameError
from gazette_sdk.framing import Frames, Framing


class Netstrings(Framing):
    """A user's own: ``<length>:<text>,``. What is no frame is an error up to the next comma."""

    content_type = "text/x-netstrings"
    form = "json"

    def encode(self, payload, out):
        if len(payload) > 999:
            raise FramingError("too long")
        out += b"%d:%b," % (len(payload), payload)

    def payloads(self, buffer, frames):
        whole = bytes(buffer)
        return [
            whole[whole.index(b":", begin) + 1 : end - 1]
            for begin, end in zip(frames.begins, frames.ends, strict=True)
        ]

    def cut(self, buffer, *, searched=0, final=False):
        begins, ends, at = [], [], 0
        while at < len(buffer):
            head = re.compile(rb"(0|[1-9][0-9]{0,2}):").match(buffer, at)
            if head is None and not re.compile(rb"[0-9]{0,3}\Z").match(buffer, at):
                return self._bad(buffer, Frames(begins, ends, at), final)
            if head is None:
                break
            end = head.end() + int(head[1]) + 1
            if end > len(buffer):
                break
            if buffer[end - 1 : end] != b",":
                return self._bad(buffer, Frames(begins, ends, at), final)
            begins.append(at)
            ends.append(end)
            at = end
        frames = Frames(begins, ends, at)
        if final and at < len(buffer):
            frames.error = TornFrameError("unexpected EOF", offset=at)
        return frames

    def _bad(self, buffer, frames, final):
        begin = frames.consumed
        comma = buffer.find(b",", begin)
        if comma >= 0 or final:
            frames.error = DecodeError("no netstring", offset=begin)
            frames.consumed = comma + 1 if comma >= 0 else len(buffer)
        return frames

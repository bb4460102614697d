"""Frames of the stream transport out of ``bytes`` objects."""

from __future__ import annotations

from gazette_sdk.protocol.stream_frames import Frame, FrameBuffer


class FrameFeed(FrameBuffer):
    """A frame buffer that copies what it is given into its memory."""

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that are whole now; stop at the first that breaks the rules."""
        if self.error is not None:
            raise self.error
        frames: list[Frame] = []
        rest = memoryview(data)
        while rest and self.error is None:
            room = self.get_buffer(65536)
            assert len(room) > 0
            length = min(len(room), len(rest))
            room[:length] = rest[:length]
            rest = rest[length:]
            frames += self.updated(length)
        return frames

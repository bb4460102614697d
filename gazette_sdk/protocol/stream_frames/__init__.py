"""Frames of the stream transport: encoding and decoding.

A connection begins with :data:`PREFACE`, which the client sends. What follows, in both
directions, is a sequence of frames::

    kind: u8 | length: u32, big-endian | payload: `length` bytes

Nothing here reads or writes. Encoders return bytes. :class:`FrameBuffer` owns the memory that a
socket receives into (``asyncio.BufferedProtocol``, ``socket.recv_into``), and returns frames. It
returns the same frames however the bytes are cut, checks a frame's kind and length as soon as its
five header bytes are there, and holds no more than one incomplete frame.

Payloads with an inner form:

- CALL: ``u8`` method, ``u16`` length of the head, the head (a ``CallHead``), the request.
- STATUS: ``u8`` gRPC status code, then UTF-8 text. Where the peer should know the *class* of the
  error, not only its text, a NUL and the class's name follow the text.
- HELLO: a ``Hello``. GOAWAY: UTF-8 text. PING and PONG: up to 64 bytes of any kind.

Modules: ``encoding`` (kinds and frames) and ``decoding`` (frames and the inner forms).
"""

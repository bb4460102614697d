"""The files of a whole recovery log of one history, by a small interpreter of its operations."""

from __future__ import annotations

from gazette_sdk.protocol import recoverylog_pb2
from support.vectors import GOLDEN

HEADER_BYTES = 8


def played_files(name: str) -> dict[str, bytes]:
    """Return content by path of what a golden log, such as ``….log.bin``, leaves behind."""
    log = (GOLDEN / name).read_bytes()
    contents: dict[int, bytearray] = {}
    links: dict[str, int] = {}
    properties: dict[str, bytes] = {}
    at = 0
    while at < len(log):
        length = int.from_bytes(log[at + 4 : at + HEADER_BYTES], "little")
        at += HEADER_BYTES
        op = recoverylog_pb2.RecordedOp.FromString(log[at : at + length])
        at += length
        match _kind(op):
            case "create":
                contents[op.seq_no] = bytearray()
                links[op.create.path] = op.seq_no
            case "link":
                links[op.link.path] = op.link.fnode
            case "unlink":
                del links[op.unlink.path]
            case "property":
                properties[op.property.path] = op.property.content.encode()
            case "write":
                file, end = contents[op.write.fnode], op.write.offset + op.write.length
                file.extend(bytes(max(0, end - len(file))))
                file[op.write.offset : end] = log[at : at + op.write.length]
                at += op.write.length
    return {path: bytes(contents[fnode]) for path, fnode in links.items()} | properties


def _kind(op: recoverylog_pb2.RecordedOp) -> str:
    kinds = ("create", "link", "unlink", "write", "property")
    return next((kind for kind in kinds if op.HasField(kind)), "")

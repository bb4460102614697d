"""Fragments as a store would hold them, and a web server that hands them out."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import content_path, sum_of

__all__ = ["fragment_of", "served_files", "store_fragment", "stored"]


def fragment_of(
    journal: str, begin: int, content: bytes, codec: int = pb.NONE, postfix: str = ""
) -> pb.Fragment:
    """The fragment that content is, when it begins at an offset."""
    return pb.Fragment(
        journal=journal,
        begin=begin,
        end=begin + len(content),
        sum=sum_of(hashlib.sha1(content).digest()),
        compression_codec=codec,
        path_postfix=postfix,
    )


def stored(content: bytes, codec: int) -> bytes:
    """Content as it is stored."""
    return gzip.compress(content) if codec == pb.GZIP else content


def store_fragment(root: Path, fragment: pb.Fragment, content: bytes) -> Path:
    """Write a fragment below a directory, under its name."""
    path = root / content_path(fragment)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(stored(content, fragment.compression_codec))
    return path


@contextlib.asynccontextmanager
async def served_files(files: dict[str, bytes]) -> AsyncIterator[str]:
    """A web server of files by name; yields its base URL."""

    async def get(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in files:
            return web.Response(status=404)
        return web.Response(body=files[name])

    app = web.Application()
    app.router.add_get("/{name:.*}", get)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()

"""Static files of the console, for a mount of an HTTP host.

==============================  ==============================================================
``/console``                    redirects to ``/console/``
``/console/``                   the page; never cached without asking
``/console/<sha256>/<file>``    a file of the page; the digest is over all files, so that it may be
                                cached for ever
``/console/<sha256>/read``      content of a journal, and names of the fields of its messages: see
``/console/<sha256>/types``     :mod:`~gazette_sdk.console.content`; where the console has any
==============================  ==============================================================

Only GET and HEAD of exactly these paths are answered. Any other request falls through to the next
mount: a journal named ``console/x`` keeps its URL. The files hold no data, and need no token. The
calls take any digest: a page may be older than its server.

The page may load nothing from elsewhere, runs no inline script, and has no sink of HTML text: see
:data:`PAGE_HEADERS`. Messages, which anyone may have written, enter it as text nodes.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from aiohttp import hdrs, web

from gazette_sdk.console.content import ConsoleContent, JournalSource
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.server.http import HttpHandler, Target, accepts_gzip, text_error

PREFIX = "/console"
"""Prefix of the mount."""

STATIC = Path(__file__).parent / "static"
"""Directory of the files."""

PAGE_HEADERS = MappingProxyType(
    {
        "Content-Security-Policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
            "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
            "require-trusted-types-for 'script'; trusted-types 'none'"
        ),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "X-Frame-Options": "DENY",
    }
)
"""Headers of all answers of the mount."""

_INDEX = "index.html"
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_CALL = re.compile(rf"{PREFIX}/[0-9a-f]{{64}}/(read|types)")
_COMMENT = re.compile(rb"^[ \t]*(?://.*|/\*(?:[^*]|\*(?!/))*\*/)$", re.MULTILINE)
_FOREVER = "public, max-age=31536000, immutable"

Component = Literal["broker", "consumer", "cluster"]
"""Server of the calls beside the mount: ``cluster`` if it has those of both."""


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file, in memory.

    Attributes:
        content: its bytes.
        compressed: the same as gzip.
        media_type: value of its ``Content-Type``.
    """

    content: bytes
    compressed: bytes
    media_type: str


@dataclass(frozen=True, slots=True)
class StaticFiles:
    """All files of the console.

    Attributes:
        digest: SHA-256 over their names and content.
        files: by the name within the digest's directory; the page itself is not among them.
        page: the page, without the values of a server.
    """

    digest: str
    files: Mapping[str, StaticFile]
    page: str

    def page_of(
        self, component: Component, *, needs_token: bool = False, features: str = ""
    ) -> StaticFile:
        """Return the page of a server.

        Args:
            component: what the server is.
            needs_token: True if it refuses changes of callers without a token.
            features: calls of the console that the page should make.
        """
        values = {
            "digest": self.digest,
            "component": component,
            "changes": "token" if needs_token else "any",
            "features": features,
        }
        page = self.page
        for name, value in values.items():
            page = page.replace(f"{{{name}}}", value)
        return _file(page.encode(), ".html")


def load_files(directory: Path = STATIC) -> StaticFiles:
    """Read the files, and the libraries among them.

    Raises:
        ConfigurationError: libraries are missing. Remedy: run ``scripts/console-libraries``.
    """
    sums = (directory / "libraries.sha256").read_text(encoding="ascii")
    wanted = {line.split()[1] for line in sums.splitlines()}
    names = sorted(
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if path.suffix in _MEDIA_TYPES and path.name != _INDEX
    )
    if missing := wanted - set(names):
        raise ConfigurationError(
            f"the console lacks its libraries {', '.join(sorted(missing))}: run "
            "scripts/console-libraries, which downloads them"
        )
    page = (directory / _INDEX).read_text(encoding="utf-8")
    digest = hashlib.sha256(page.encode())
    files = {}
    for name in names:
        content = (directory / name).read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
        suffix = Path(name).suffix
        files[name] = _file(without_comments(content) if suffix == ".js" else content, suffix)
    return StaticFiles(digest.hexdigest(), MappingProxyType(files), page)


def without_comments(content: bytes) -> bytes:
    """Return a script with empty lines in place of those that only have comments.

    Comments and types would be a tenth of what a browser loads. Numbers of lines stay.
    """
    return _COMMENT.sub(lambda found: b"\n" * found[0].count(b"\n"), content)


def _file(content: bytes, suffix: str) -> StaticFile:
    return StaticFile(content, gzip.compress(content, mtime=0), _MEDIA_TYPES[suffix])


def console(
    component: Component,
    *,
    needs_token: bool = False,
    content: ConsoleContent | None = None,
    journals: JournalSource | None = None,
) -> HttpHandler:
    """Return the handler to mount at :data:`PREFIX`.

    The files are read with the first request, on a thread: a console that no one opens costs
    nothing.

    Args:
        component: what the server is.
        needs_token: True if it refuses changes of callers without a token.
        content: masks and message types; None for none.
        journals: what they are used on.
    """
    features = content.features if content is not None else ""
    loading: asyncio.Future[tuple[StaticFiles, StaticFile]] | None = None

    def load() -> tuple[StaticFiles, StaticFile]:
        files = load_files()
        return files, files.page_of(component, needs_token=needs_token, features=features)

    async def answer(request: web.BaseRequest, target: Target) -> web.StreamResponse | None:
        nonlocal loading
        path = target.path
        if request.method not in {"GET", "HEAD"} or not f"{path}/".startswith(f"{PREFIX}/"):
            return None
        if path == PREFIX:
            # Relative, because a proxy may have removed a prefix of the path.
            location: dict[str, str] = {"Location": "console/", "Cache-Control": "no-cache"}
            return web.Response(status=307, headers={**PAGE_HEADERS, **location})
        if content is not None and journals is not None and (call := _CALL.fullmatch(path)):
            return await content.answer(request, call[1], target.query, journals)
        if loading is None:
            loading = asyncio.ensure_future(asyncio.to_thread(load))
        try:
            files, page = await asyncio.shield(loading)
        except ConfigurationError as error:
            loading = None
            return text_error(503, str(error)) if path == f"{PREFIX}/" else None
        if path == f"{PREFIX}/":
            return _answer(request, page, "no-cache")
        digest, _, name = path.removeprefix(f"{PREFIX}/").partition("/")
        found = files.files.get(name) if digest == files.digest else None
        return None if found is None else _answer(request, found, _FOREVER)

    return answer


def _answer(request: web.BaseRequest, file: StaticFile, cached: str) -> web.Response:
    headers = {
        **PAGE_HEADERS,
        hdrs.CONTENT_TYPE: file.media_type,
        hdrs.CACHE_CONTROL: cached,
        hdrs.VARY: hdrs.ACCEPT_ENCODING,
    }
    body = file.content
    if accepts_gzip(request):
        body = file.compressed
        headers[hdrs.CONTENT_ENCODING] = "gzip"
    return web.Response(body=body, headers=headers)

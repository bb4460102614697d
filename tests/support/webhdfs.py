"""Server of WebHDFS over real HTTP: a NameNode that redirects content to a DataNode.

It keeps files in memory, and answers as Hadoop's documentation of WebHDFS says.
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field
from typing import Self

from aiohttp import web

DENIED_USER = "nobody"
"""User who may do nothing."""


@dataclass
class Node:
    content: bytes | None  # None for a directory
    modified_ms: int = field(default_factory=lambda: int(time.time() * 1000))

    def status(self, name: str) -> dict:
        return {
            "pathSuffix": name,
            "type": "DIRECTORY" if self.content is None else "FILE",
            "length": len(self.content or b""),
            "modificationTime": self.modified_ms,
            "owner": "hadoop",
            "permission": "755",
        }


class WebHdfsServer:
    """NameNode and DataNode in a thread. ``with`` starts and stops them.

    Attributes:
        port: the NameNode's port.
        nodes: files and directories by path.
        requests: operation and path of every request that the NameNode got.
        is_gateway: True to know no options of renaming, as HttpFS.
        queries: arguments of the same requests, and of those of the DataNode.
        failures: status, Java exception and its text to answer with, by operation; of a redirect
            the exception is its place.
    """

    def __init__(self) -> None:
        self.port = 0
        self.nodes: dict[str, Node] = {"/": Node(None)}
        self.requests: list[tuple[str, str]] = []
        self.is_gateway = False
        self.queries: list[dict[str, str]] = []
        self.failures: dict[str, tuple[int, str] | tuple[int, str, str]] = {}
        self._data_port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="WebHDFS", daemon=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)

    async def _start(self) -> None:
        self._runners = []
        for handler in (self._name_node, self._data_node):
            app = web.Application(client_max_size=1 << 30)
            app.router.add_route("*", "/webhdfs/v1{path:.*}", handler)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self._runners.append(runner)
        ports = [runner.addresses[0][1] for runner in self._runners]
        self.port, self._data_port = ports

    async def _stop(self) -> None:
        for runner in self._runners:
            await runner.cleanup()

    # ------------------------------------------------------------ files

    def make_directories(self, path: str) -> bool:
        parts = path.strip("/").split("/") if path.strip("/") else []
        for end in range(1, len(parts) + 1):
            node = self.nodes.setdefault("/" + "/".join(parts[:end]), Node(None))
            if node.content is not None:
                return False
        return True

    def files(self) -> dict[str, bytes]:
        return {path: node.content for path, node in self.nodes.items() if node.content is not None}

    def _children(self, path: str) -> dict[str, Node]:
        below = path.rstrip("/") + "/"
        return {
            other.removeprefix(below): node
            for other, node in self.nodes.items()
            if other.startswith(below) and other != below and "/" not in other.removeprefix(below)
        }

    # --------------------------------------------------------- NameNode

    async def _name_node(self, request: web.Request) -> web.Response:  # noqa: PLR0911
        operation, path = request.query["op"].upper(), request.match_info["path"] or "/"
        path = path.rstrip("/") or "/"
        self.requests.append((operation, path))
        self.queries.append(dict(request.query))
        if operation in self.failures:
            return _failure(*self.failures[operation])
        if request.query.get("user.name") == DENIED_USER:
            return _failure(403, "AccessControlException", "Permission denied: user=nobody")
        node = self.nodes.get(path)
        if operation in {"CREATE", "OPEN"}:
            if operation == "OPEN" and (node is None or node.content is None):
                return _missing(path)
            assert not request.can_read_body, "content goes to the DataNode"
            url = request.url.with_port(self._data_port)
            return web.Response(status=307, headers={"Location": str(url)})
        if operation == "GETFILESTATUS":
            if node is None:
                return _missing(path)
            return web.json_response({"FileStatus": node.status("")})
        if operation == "LISTSTATUS":
            if node is None:
                return _missing(path)
            found = {"": node} if node.content is not None else self._children(path)
            statuses = [each.status(name) for name, each in found.items()]
            return web.json_response({"FileStatuses": {"FileStatus": statuses}})
        if operation == "MKDIRS":
            assert request.method == "PUT"
            return web.json_response({"boolean": self.make_directories(path)})
        if operation == "DELETE":
            assert request.method == "DELETE"
            if self._children(path) and request.query.get("recursive") != "true":
                return _failure(403, "PathIsNotEmptyDirectoryException", path)
            return web.json_response({"boolean": self.nodes.pop(path, None) is not None})
        if operation == "RENAME":
            assert request.method == "PUT"
            return self._rename(path, request)
        return _failure(400, "UnsupportedOperationException", operation)

    def _rename(self, path: str, request: web.Request) -> web.Response:
        target = request.query["destination"]
        parent = self.nodes.get(target.rpartition("/")[0] or "/")
        replaces = "OVERWRITE" in request.query.get("renameoptions", "") and not self.is_gateway
        possible = (
            path in self.nodes
            and parent is not None
            and parent.content is None
            and (replaces or target not in self.nodes)
        )
        if possible:
            self.nodes[target] = self.nodes.pop(path)
        if replaces:
            return web.Response() if possible else _missing(path)
        return web.json_response({"boolean": possible})

    # --------------------------------------------------------- DataNode

    async def _data_node(self, request: web.Request) -> web.Response:
        operation, path = request.query["op"].upper(), request.match_info["path"]
        self.queries.append(dict(request.query))
        if f"DATA {operation}" in self.failures:
            return _failure(*self.failures[f"DATA {operation}"])
        if operation == "OPEN":
            node = self.nodes.get(path)
            if node is None or node.content is None:
                return _missing(path)
            begin = int(request.query.get("offset", 0))
            end = begin + int(request.query.get("length", len(node.content)))
            return web.Response(body=node.content[begin:end])
        assert (operation, request.method) == ("CREATE", "PUT")
        if path in self.nodes and request.query.get("overwrite") != "true":
            return _failure(403, "FileAlreadyExistsException", path)
        self.make_directories(path.rpartition("/")[0])
        # What arrives is there at once, also of an upload that breaks off.
        node = self.nodes[path] = Node(b"")
        async for chunk in request.content.iter_any():
            node.content += chunk
        return web.Response(status=201)


def _failure(status: int, exception: str, message: str = "as the test wants it") -> web.Response:
    if status == 307:
        return web.Response(status=status, headers={"Location": exception})
    remote = {"exception": exception, "javaClassName": f"java.{exception}", "message": message}
    return web.json_response({"RemoteException": remote}, status=status)


def _missing(path: str) -> web.Response:
    return _failure(404, "FileNotFoundException", f"File does not exist: {path}")

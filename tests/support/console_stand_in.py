"""Stand-in for a cluster: answers of all calls that the console makes, from a described world.

Its port is a real one of this project, with the real mount of the console. So a test can show what
a real cluster hardly gives in a moment: 10,000 journals, failed shards, refused tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import parse_qs

from aiohttp import web

from gazette_sdk.console.mount import PREFIX, console
from gazette_sdk.message.uuid import ACK_TXN, CONTINUE_TXN, build_uuid
from gazette_sdk.server.http import Target
from gazette_sdk.server.process import Server

STATES = ("JOURNAL_OK", "JOURNAL_SHORT", "JOURNAL_NO_PRIMARY")
PRODUCER, OTHER_PRODUCER = b"\x01\x0a\x11\xb2\x33\x44", b"\x01\xfd\x5e\x23\x77\x90"
CLOCK = 0x1F0_8C2D_9A10_0000 << 4
LINES = [
    (PRODUCER, 1, 0, {"customer": "ada", "cents": 1250, "items": ["tea", "cup"]}),
    (OTHER_PRODUCER, 1, CONTINUE_TXN, {"customer": "bob", "cents": 300}),
    (OTHER_PRODUCER, 2, CONTINUE_TXN, {"customer": "bob", "cents": 420}),
    (PRODUCER, 2, 0, {"customer": "cyd", "cents": 99}),
    (OTHER_PRODUCER, 3, ACK_TXN, {}),
    (OTHER_PRODUCER, 4, CONTINUE_TXN, {"customer": "eve", "cents": 13}),
    (OTHER_PRODUCER, 3, ACK_TXN, {}),
    (PRODUCER, 2, 0, {"customer": "cyd", "cents": 99}),
    (OTHER_PRODUCER, 5, CONTINUE_TXN, {"customer": "fay", "cents": 7}),
]


def line(producer: bytes, tick: int, flags: int, value: dict[str, Any]) -> bytes:
    """Return a line of a journal, whose clock is the tick's."""
    uuid = str(build_uuid(producer, CLOCK + (tick << 4) * 10_000_000, flags))
    return json.dumps({"UUID": uuid, **value}, separators=(",", ":")).encode() + b"\n"


def sample_content() -> bytes:
    """Return content of a journal: transactions, one of them rolled back, and a duplicate."""
    return b"".join(line(*each) for each in LINES)


def sample_name(number: int) -> str:
    topics = ("orders", "payments", "shipments/eu", "shipments/us", "clicks", "totals")
    return f"acme/{topics[number % len(topics)]}/part-{number // len(topics):03d}"


@dataclass
class World:
    """Answers of the stand-in.

    Attributes:
        journals: number of journals.
        is_troubled: journals, shards, brokers and stores have problems.
        token: the token that calls need; empty for none.
        readable: False if the token has no READ.
        refused: calls by path, each with the status and message that it is refused with.
        content: content of journals by name.
        labels: content type of the journals.
        events: events so far.
        seen: paths of all requests.
        changes: path and body of each change.
        streams: number of open streams by path.
        most_streams: greatest number of them at a time.
    """

    journals: int = 10
    is_troubled: bool = False
    token: str = ""
    readable: bool = True
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    content: dict[str, bytes] = field(default_factory=dict)
    content_type: str = "application/x-ndjson"
    names: list[str] = field(default_factory=list)
    problems: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    changes: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    streams: Counter[str] = field(default_factory=Counter)
    most_streams: Counter[str] = field(default_factory=Counter)
    grown: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def count(self) -> int:
        return len(self.names) or self.journals

    def append(self, name: str, content: bytes) -> None:
        """Append to a journal. Call it on the server's loop."""
        self.content[name] = self.content.get(name, b"") + content
        self.wake()

    @contextmanager
    def stream(self, path: str) -> Iterator[None]:
        """Count a stream while it is open."""
        self.streams[path] += 1
        self.most_streams[path] = max(self.most_streams[path], self.streams[path])
        try:
            yield
        finally:
            self.streams[path] -= 1

    def wake(self) -> None:
        grown, self.grown = self.grown, asyncio.Event()
        grown.set()


MEMBERS = [{"zone": zone, "suffix": f"broker-{number}"} for number, zone in enumerate("abc", 1)]


class StandIn:
    """Port with the console and the answers of a :class:`World`."""

    def __init__(self, world: World, component: Any = "cluster") -> None:
        self.world = world
        self._rows: list[dict[str, Any]] = []
        self._made_of: object = None
        self.server = Server(host="127.0.0.1")
        self.server.http.mount(PREFIX, console(component))
        self.server.http.mount("/", self._answer)

    async def __aenter__(self) -> Self:
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(0.2)

    async def _answer(  # noqa: PLR0911 - one for each call
        self, request: web.Request, target: Target
    ) -> web.StreamResponse:
        world = self.world
        world.seen.append(target.path)
        if world.token and request.headers.get("Authorization") != f"Bearer {world.token}":
            return refusal(401, "missing or invalid Authorization token")
        if target.path in world.refused:
            return refusal(*world.refused[target.path])
        body = await request.json() if request.method == "POST" and request.can_read_body else {}
        path = target.path
        if path.startswith("/v1/at/"):
            path = "/v1/" + path.split("/", 5)[5]
        match path:
            case "/v1/journals/apply" | "/v1/shards/unassign":
                world.changes.append((target.path, body))
                return web.json_response(self.changed(body))
            case "/v1/journals/page":
                return web.json_response(self.page(body))
            case "/v1/journals/heads":
                if not world.readable:
                    return refusal(403, "the token lacks the capability READ")
                return web.json_response({"heads": [self.head(each) for each in body["journals"]]})
            case "/v1/journals/list":
                return lines([{"status": "OK", "journals": self.list(body)}])
            case "/v1/journals/read":
                return lines([self.offsets(body["journal"])])
            case "/v1/journals/fragments":
                return web.json_response(self.fragments(body["journal"]))
            case "/v1/cluster/report":
                return web.json_response(self.report())
            case "/v1/cluster/members":
                return web.json_response({"members": self.members()})
            case "/v1/cluster/events":
                with world.stream("events"):
                    return await self.stream_events(request, target)
            case "/v1/shards/page":
                return web.json_response(self.shards(body))
            case "/v1/shards/list":
                return web.json_response(self.shard_list(body))
            case "/v1/shards/state":
                return web.json_response({"entries": STATE_ENTRIES, "more": True})
            case _ if "block=true" in target.query:
                with world.stream("tails"):
                    return await self.read(request, target)
            case _:
                return await self.read(request, target)

    def changed(self, body: dict[str, Any]) -> dict[str, Any]:
        world = self.world
        if "shards" in body:
            world.is_troubled = False
            return {"status": "OK", "shards": body["shards"]}
        world.names = [self.row(number)["name"] for number in range(world.count)]
        names = [change["upsert"]["name"] for change in body["changes"]]
        if set(names) & set(world.names):
            return {"status": "ETCD_TRANSACTION_FAILED"}
        world.names += names
        return {"status": "OK"}

    # ------------------------------------------------------------ journals

    def row(self, number: int) -> dict[str, Any]:
        world = self.world
        name = world.names[number] if world.names else sample_name(number)
        state = "JOURNAL_OK"
        if world.is_troubled and number % 7 == 3:
            state = STATES[1 + number % 2]
        members = [number % 3, (number + 1) % 3, (number + 2) % 3]
        if state == "JOURNAL_SHORT":
            members = members[:1]
        row = {
            "name": name,
            "replication": 3,
            "members": members,
            "state": state,
            "labels": {
                "labels": [
                    {"name": "content-type", "value": world.content_type},
                    {"name": "topic", "value": name.rpartition("/")[0]},
                ]
            },
            "stores": ["s3://acme-gazette/prod/"],
        }
        if state != "JOURNAL_NO_PRIMARY":
            row["primary"] = members[0]
        if world.readable:
            row |= {
                "head": str(91_200_000_000 - number * 7_654_321),
                "begin": "0",
                "size": str(88_000_000_000 - number * 7_654_321),
                "unstored": str((number * 7919) % 90_000_000),
                "rate": float((number * 104_729) % 5_000_000),
            }
        if world.readable and name in world.content:
            end = str(len(world.content[name]))
            row |= {"head": end, "size": end}
        return row

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of all journals, which are made again after a change of the world."""
        world = self.world
        sizes = tuple(map(len, world.content.values()))
        made_of = world.count, world.is_troubled, world.readable, sizes
        if self._made_of != made_of:
            self._rows = [self.row(number) for number in range(world.count)]
            self._made_of = made_of
        return self._rows

    def page(self, body: dict[str, Any]) -> dict[str, Any]:
        rows = self.rows()
        for label in body.get("selector", {}).get("include", {}).get("labels", []):
            rows = [row for row in rows if row["name"] == label["value"]]
        search = body.get("search", "").lower()
        rows = [row for row in rows if search in row["name"].lower()]
        states = {name: str(sum(row["state"] == name for row in rows)) for name in STATES}
        if wanted := body.get("states"):
            rows = [row for row in rows if row["state"] in wanted]
        key = body.get("sort", "BY_NAME").removeprefix("BY_").lower()
        rows.sort(
            key=lambda row: (
                float(row.get(key, 0)) if key in {"head", "rate", "size"} else row["name"]
            ),
            reverse=body.get("descending", False),
        )
        skip, limit = body.get("skip", 0), body.get("limit", 100)
        return {
            "members": MEMBERS,
            "rows": rows[skip : skip + limit],
            "total": str(len(rows)),
            "states": states,
            "revision": "812",
        }

    def head(self, name: str) -> dict[str, Any]:
        end = len(self.world.content.get(name, b""))
        replicas = [
            {"member": member, "head": str(end), "unstored": "62", "synced": True}
            for member in MEMBERS
        ]
        return {
            "journal": name,
            "head": str(end),
            "begin": "0",
            "size": str(end),
            "unstored": "62000",
            "rate": 1234.5,
            "oldestUnstoredS": 240.0,
            "replicas": replicas,
            "error": "",
        }

    def list(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        label = body["selector"]["include"]["labels"][0]
        if label["name"] == "name":
            return [self.listed(label["value"])]
        names = (self.row(number)["name"] for number in range(self.world.count))
        return [self.listed(name) for name in names if name.startswith(label["value"])]

    def listed(self, name: str) -> dict[str, Any]:
        spec = {
            "name": name,
            "replication": 3,
            "labels": {
                "labels": [
                    {"name": "content-type", "value": self.world.content_type},
                    {"name": "topic", "value": name.rpartition("/")[0]},
                ]
            },
            "fragment": {
                "length": "536870912",
                "compressionCodec": "ZSTANDARD",
                "stores": ["s3://acme-gazette/prod/"],
                "refreshInterval": "300s",
                "flushInterval": "600s",
            },
            "flags": 4,
            "maxAppendRate": "0",
            "suspend": None,
        }
        route = {
            "members": MEMBERS,
            "primary": 0,
            "endpoints": [f"https://{member['suffix']}.example:8080" for member in MEMBERS],
        }
        return {"spec": spec, "modRevision": "812", "createRevision": "12", "route": route}

    def offsets(self, name: str) -> dict[str, Any]:
        end = len(self.world.content.get(name, b""))
        status = "OK" if end else "OFFSET_NOT_YET_AVAILABLE"
        return {"status": status, "offset": "0", "writeHead": str(end)}

    def fragments(self, name: str) -> dict[str, Any]:
        cuts = [0, 400_000_000, 930_000_000, 1_400_000_000, 1_480_000_000, 1_720_000_000]
        found = []
        for begin, end in itertools.pairwise(cuts):
            spec = {
                "journal": name,
                "begin": str(
                    begin + (60_000_000 if begin == cuts[3] and self.world.is_troubled else 0)
                ),
                "end": str(end),
                "sum": {"part1": "1234567890123456789", "part2": "9876543210987654321", "part3": 7},
                "compressionCodec": "ZSTANDARD",
                "backingStore": "" if end == cuts[-1] else "s3://acme-gazette/prod/",
                "modTime": "0"
                if end == cuts[-1]
                else str(int(time.time()) - 86_400 + end // 40_000),
            }
            found.append({"spec": spec, "signedUrl": ""})
        return {"status": "OK", "fragments": found, "nextPageToken": "0"}

    async def read(self, request: web.Request, target: Target) -> web.StreamResponse:
        world, name = self.world, target.path[1:]
        if not world.readable:
            return refusal(403, "the token lacks the capability READ")
        query = parse_qs(target.query)
        offset, block = int(query["offset"][0]), query.get("block") == ["true"]
        while block and len(world.content.get(name, b"")) <= offset:
            await world.grown.wait()
        headers = {"Content-Range": f"bytes {offset}-9223372036854775807/9223372036854775807"}
        response = web.StreamResponse(status=206, headers=headers)
        await response.prepare(request)
        while True:
            grown, content = world.grown, world.content.get(name, b"")
            await response.write(content[offset:])
            offset = len(content)
            if not block:
                break
            await grown.wait()
        await response.write_eof()
        return response

    # ------------------------------------------------------------- cluster

    def members(self) -> list[dict[str, Any]]:
        now = time.time_ns() // 1000
        members = []
        for number, member in enumerate(MEMBERS):
            one: dict[str, Any] = {
                "id": member,
                "component": "broker",
                "endpoint": f"https://{member['suffix']}.example:8080",
                "version": "0.1.0",
                "python": "3.11.2",
                "startedUs": str(now - (3 + number) * 86_400_000_000),
                "clockUs": str(now),
                "limit": 1024,
                "replicas": 780 + 90 * number,
                "primaries": 270 + 3 * number,
                "exiting": False,
                "leaseLeftS": 17.2,
                "loopLagS": 0.004,
                "keyIds": ["2026-10", "2026-11"],
                "diskFree": "182000000000",
                "error": "",
            }
            if self.world.is_troubled and number == 1:
                one |= {"error": "connection refused: it does not answer within 1 s"}
            if self.world.is_troubled and number == 2:
                one |= {"loopLagS": 0.61}
            members.append(one)
        members += [
            {
                "id": {"zone": "ab"[number], "suffix": f"totals-{number}"},
                "component": "totals",
                "endpoint": f"https://totals-{number}.example:8090",
                "version": "0.1.0",
                "limit": 64,
                "replicas": 12,
                "primaries": 6,
                "loopLagS": 0.012,
                "error": "",
            }
            for number in range(2)
        ]
        return members

    def report(self) -> dict[str, Any]:
        world = self.world
        count = world.count
        now = time.time_ns() // 1000
        wobble = (time.time() * 7) % 10
        report: dict[str, Any] = {
            "cluster": "/gazette/prod-eu",
            "clockUs": str(now),
            "brokers": 3,
            "zones": ["a", "b", "c"],
            "journals": str(count),
            "replicas": str(count * 3),
            "states": {"JOURNAL_OK": str(count)},
            "unstored": str(int(1.2e9 + wobble * 2e7)),
            "oldestUnstoredS": 240.0,
            "appendRate": 41e6 + wobble * 1.5e6,
            "readRate": 180e6 - wobble * 6e6,
            "stores": [
                {
                    "url": "s3://acme-gazette/prod/",
                    "journals": str(count),
                    "healthy": True,
                    "sinceUs": str(now - 3 * 86_400_000_000),
                    "error": "",
                    "unstored": "1200000000",
                },
                {"url": "file:///", "journals": "0", "sinceUs": "0", "error": "", "unstored": "0"},
            ],
            "applications": [
                {
                    "name": "totals",
                    "processes": 2,
                    "shards": "12",
                    "failed": "0",
                    "withoutPrimary": "0",
                    "recovering": "0",
                    "lagBytes": "48000",
                    "lagS": 0.4 + wobble / 20,
                    "error": "",
                }
            ]
            if count
            else [],
            "versions": ["0.1.0"],
            "problems": list(world.problems),
        }
        if not count:
            report |= {
                "stores": [],
                "unstored": "0",
                "appendRate": 0.0,
                "readRate": 0.0,
                "oldestUnstoredS": None,
            }
        if world.is_troubled:
            report["states"] = {
                "JOURNAL_OK": str(count - 2),
                "JOURNAL_SHORT": "1",
                "JOURNAL_NO_PRIMARY": "1",
            }
            report["applications"][0] |= {"failed": "1", "lagS": 244.0}
            report["stores"][0] |= {
                "healthy": False,
                "sinceUs": str(now - 240_000_000),
                "error": "PUT s3://acme-gazette/prod/acme/orders/part-003/…: 403 Forbidden",
            }
            report["problems"] += [
                problem("ERROR", "shards-failed", "shard", "totals/part-003",
                        "failed: KeyError 'cents' at acme/orders/part-003:918233",
                        "gazctl shards list --errors", now - 240_000_000),
                problem("ERROR", "stores-unhealthy", "store", "s3://acme-gazette/prod/",
                        "does not accept fragments: 403 Forbidden",
                        "gazctl journals store-health s3://acme-gazette/prod/", now - 240_000_000),
                problem("WARNING", "journals-short", "journal", "acme/orders/part-017",
                        "has 1 of 3 replicas: no broker of zone b has room",
                        "gazette allocator simulate", now - 1_800_000_000, others=1),
            ]  # fmt: skip
        return report

    async def stream_events(self, request: web.Request, target: Target) -> web.StreamResponse:
        after = parse_qs(target.query).get("after", [""])[0]
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        ids = [event["id"] for event in self.world.events]
        sent = ids.index(after) + 1 if after in ids else 0
        while True:
            grown = self.world.grown
            for event in self.world.events[sent:]:
                await response.write(json.dumps({"result": event}).encode() + b"\n")
            sent = len(self.world.events)
            await grown.wait()

    # -------------------------------------------------------------- shards

    def shard_row(self, number: int) -> dict[str, Any]:
        state = "PRIMARY"
        if self.world.is_troubled:
            state = {3: "FAILED", 5: "BACKFILL"}.get(number, "PRIMARY")
        row: dict[str, Any] = {
            "id": f"totals/part-{number:03d}",
            "state": state,
            "members": [number % 2, 1 - number % 2],
            "primary": number % 2,
            "labels": {"labels": [{"name": "topic", "value": "acme/orders"}]},
            "readThrough": {f"acme/orders/part-{number:03d}": str(918_000 + number)},
            "lagBytes": str(number * 4_000),
            "lagS": number * 0.1,
            "watermarkUs": str(time.time_ns() // 1000 - 2_000_000),
            "error": "",
            "recoveryLog": f"recovery/totals/part-{number:03d}",
        }
        if not self.world.readable:
            for name in ("readThrough", "lagBytes", "lagS", "watermarkUs"):
                del row[name]
        elif state == "FAILED":
            row |= {"lagS": 244.0, "lagBytes": "81000000"}
        if state == "FAILED":
            row["error"] = STACK
        if state == "BACKFILL":
            row |= {"recoveredBytes": "710000000", "recoveryBytes": "1000000000"}
            del row["primary"]
        return row

    def shards(self, body: dict[str, Any]) -> dict[str, Any]:
        rows = [self.shard_row(number) for number in range(12)]
        labels = body.get("selector", {}).get("include", {}).get("labels", [])
        rows = [row for row in rows if all(row["id"] == label["value"] for label in labels)]
        rows = [row for row in rows if body.get("search", "") in row["id"]]
        if source := body.get("source"):
            rows = [row for row in rows if source == f"acme/orders/{row['id'].split('/')[1]}"]
        states: dict[str, str] = {}
        for row in rows:
            states[row["state"]] = str(int(states.get(row["state"], "0")) + 1)
        if wanted := body.get("states"):
            rows = [row for row in rows if row["state"] in wanted]
        if body.get("sort") == "BY_SHARD_STATE":
            codes = {"BACKFILL": 100, "PRIMARY": 300, "FAILED": 400}
            rows.sort(key=lambda row: codes[row["state"]], reverse=body.get("descending", False))
        skip = body.get("skip", 0)
        members = [{"zone": "a", "suffix": "totals-0"}, {"zone": "b", "suffix": "totals-1"}]
        return {
            "application": "totals",
            "members": members,
            "rows": rows[skip : skip + body.get("limit", 100)],
            "total": str(len(rows)),
            "states": states,
        }

    def shard_list(self, body: dict[str, Any]) -> dict[str, Any]:
        name = body["selector"]["include"]["labels"][0]["value"]
        row = next(self.shard_row(n) for n in range(12) if self.shard_row(n)["id"] == name)
        members = [{"zone": "a", "suffix": "totals-0"}, {"zone": "b", "suffix": "totals-1"}]
        status = [
            {"code": row["state"], "errors": [row["error"]] if row["error"] else []},
            {"code": "STANDBY", "errors": []},
        ]
        spec = {
            "id": name,
            "sources": [{"journal": "acme/orders/part-003", "minOffset": "0"}],
            "recoveryLogPrefix": "recovery",
            "hintPrefix": "/gazette/hints",
            "minTxnDuration": "0s",
            "maxTxnDuration": "1s",
            "hotStandbys": 1,
            "disable": False,
            "labels": row["labels"],
        }
        shard = {
            "spec": spec,
            "modRevision": "33",
            "createRevision": "12",
            "route": {"members": [members[index] for index in row["members"]], "primary": 0},
            "status": status,
        }
        return {"status": "OK", "shards": [shard]}


STATE_ENTRIES = [
    {"place": "totals", "key": json.dumps(name), "value": json.dumps({"cents": cents, "orders": 3})}
    for name, cents in (("ada", 1250), ("bob", 720), ("cyd", 99))
]

STACK = """\
KeyError: 'cents'
handler of totals, acme/orders/part-003:918233
Traceback (most recent call last):
  File "/app/totals.py", line 31, in add
    state[order["customer"]] += order["cents"]
                                ~~~~~^^^^^^^^^
KeyError: 'cents'"""


def problem(  # noqa: PLR0917 - a row of a table
    severity: str,
    check: str,
    kind: str,
    subject: str,
    text: str,
    command: str,
    since: int,
    others: int = 0,
) -> dict[str, Any]:
    return {
        "severity": severity,
        "check": check,
        "kind": kind,
        "subject": subject,
        "others": str(others),
        "text": text,
        "command": command,
        "sinceUs": str(since),
    }


def event(
    number: int, kind: str, subject: str, text: str, severity: str = "INFO"
) -> dict[str, Any]:
    return {
        "id": f"p1:{number}",
        "timeUs": str(time.time_ns() // 1000 - (40 - number) * 3_000_000),
        "kind": kind,
        "subject": subject,
        "text": text,
        "severity": severity,
        "member": "a/broker-1",
    }


def sample_events() -> list[dict[str, Any]]:
    """Return events of each kind."""
    return [
        event(1, "member", "c/broker-3", "joined, with room for 1,024 replicas"),
        event(
            2, "route", "acme/orders/part-017", "is served by a/broker-1, b/broker-2 and c/broker-3"
        ),
        event(3, "journal", "acme/orders/part-018", "was created"),
        event(
            4, "log", "gazette_sdk.broker.replication", "a pipeline to b/broker-2 broke", "WARNING"
        ),
        event(5, "store", "s3://acme-gazette/prod/", "fails: 403 Forbidden", "ERROR"),
        event(6, "shard", "totals/part-003", "failed: KeyError 'cents'", "ERROR"),
        event(7, "store", "s3://acme-gazette/prod/", "is healthy again"),
    ]


def lines(messages: list[dict[str, Any]]) -> web.Response:
    body = "".join(json.dumps({"result": each}) + "\n" for each in messages)
    return web.Response(text=body, content_type="application/json")


def refusal(status: int, text: str) -> web.Response:
    return web.json_response({"code": 16, "message": text, "details": []}, status=status)

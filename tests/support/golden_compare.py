"""Compares what our broker answers with what was recorded, field by field.

What varies from run to run (``tests/golden/broker/README.md``, "How to compare") is put from our
answer into the recorded one, under the rule that holds for it; then both must be equal, and so
must be their bytes.
"""

from __future__ import annotations

import bisect
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.rules import RPCS_BY_NAME
from support.golden import GoldenBroker, Outcome, parsed, wire_of

RECORDED_ENDPOINT = "http://127.0.0.1:28081"
RECORDED_CLUSTER = 4401266730860683370
MOD_TIMES_SET = range(1_700_000_000, 1_700_001_000)
"""Modification times which the state of a case sets; all others are any."""

CHUNK_BYTES_MAX = 32736
FREE_TEXT = {"store_health_error"}

_PATH = re.compile(r"([A-Z][A-Za-z]+(?:\[[^\]]*\])?(?:\.[A-Za-z]+(?:\[[^\]]*\])?)*): ")


@dataclass
class Revisions:
    """Which of our revisions stands for which recorded one: their order must be the same."""

    known: dict[int, int] = field(default_factory=dict)
    _strict: list[tuple[int, int]] = field(default_factory=list)
    _newest: tuple[int, int] = (0, 0)

    def note_key(self, there: int, here: int) -> str | None:
        """A revision of a key: the same ones must be the same, and ordered alike."""
        self.known[there] = here
        at = bisect.bisect(self._strict, (there, here))
        for other_there, other_here in self._strict[max(at - 1, 0) : at + 1]:
            if (there < other_there, there == other_there) != (
                here < other_here,
                here == other_here,
            ):
                return (
                    f"revisions {there}, {other_there} were recorded, {here}, {other_here} are ours"
                )
        if (there, here) not in self._strict[max(at - 1, 0) : at + 1]:
            self._strict.insert(at, (there, here))
        return None

    def settle_key(self, into: Any, have: Any) -> Iterable[str]:
        """Note the revisions of a listed item, and put ours into the recorded one."""
        for name in ("create_revision", "mod_revision"):
            if note := self.note_key(getattr(into, name), getattr(have, name)):
                yield note
            setattr(into, name, getattr(have, name))

    def note_header(self, there: int, here: int) -> str | None:
        """The revision of a header: it must not go back where the recorded one does not."""
        self.known.setdefault(there, here)
        before, self._newest = self._newest, (there, here)
        if here <= 0 or (there >= before[0] and here < before[1]):
            return f"headers were recorded at {before[0]}, {there}; ours are at {before[1]}, {here}"
        return None


@dataclass
class Verdict:
    """How a case came out."""

    outcome: Outcome
    problems: list[str]


class Replay:
    """One run of recorded cases against one broker.

    Args:
        broker: ours.
    """

    def __init__(self, broker: GoldenBroker) -> None:
        self.broker = broker
        self.revisions = Revisions()
        self.verdicts: dict[str, Verdict] = {}

    # ------------------------------------------------------------ requests

    def requests(self, rpc: str, case: dict[str, Any]) -> list[bytes]:
        """A case's requests: as recorded, but for what names the recorded cluster."""
        return [self._request(rpc, request) for request in case["requests"]]

    def _request(self, rpc: str, recorded: dict[str, Any]) -> bytes:
        kind = RPCS_BY_NAME[rpc].request_type
        wire = wire_of(kind, recorded)
        if recorded["json"] is None:
            return wire
        length = recorded["json"].get("content_len")
        request: Any = parsed(kind, recorded)
        if length is not None:
            request.content = bytes(length)
            assert hashlib.sha1(request.content).hexdigest() == recorded["json"]["content_sha1"]
            return bytes(request.SerializeToString())
        before = request.SerializeToString()
        for name in ("header", "watch_resume"):
            if name in kind.DESCRIPTOR.fields_by_name and request.HasField(name):
                self._ours(getattr(request, name).etcd)
        for change in getattr(request, "changes", ()):
            known = self.revisions.known
            change.expect_mod_revision = known.get(
                change.expect_mod_revision, change.expect_mod_revision
            )
        after = request.SerializeToString()
        return wire if after == before else after

    def _ours(self, etcd: pb.Header.Etcd) -> None:
        ours = self.broker.keyspace.header
        if etcd.cluster_id != RECORDED_CLUSTER:
            return  # empty, or meant to be of another cluster
        etcd.cluster_id, etcd.member_id = ours.cluster_id, ours.member_id
        etcd.revision = self.revisions.known.get(etcd.revision, etcd.revision)

    # ------------------------------------------------------------ verdicts

    def run(self, rpc: str, case: dict[str, Any], **how: Any) -> Outcome:
        """Send what was sent, and judge what came back. Arguments as for ``Stream``."""
        outcome = self.broker.client.call(rpc, self.requests(rpc, case), **how)
        self.judge(rpc, case, outcome)
        return outcome

    def judge(self, rpc: str, case: dict[str, Any], outcome: Outcome) -> None:
        """Compare an outcome with the recorded one."""
        problems = list(self._problems(rpc, case, outcome))
        self.verdicts[case["name"]] = Verdict(outcome, problems)

    def check(self, name: str) -> Verdict:
        """Fail if a case came out otherwise than recorded."""
        verdict = self.verdicts[name]
        assert not verdict.problems, "\n".join(verdict.problems)
        return verdict

    def _problems(self, rpc: str, case: dict[str, Any], outcome: Outcome) -> Iterable[str]:
        if outcome.code != case["code"]:
            yield f"code {outcome.code} ({outcome.message}) where {case['code']} was recorded"
        yield from path_problems(case, outcome)
        kind = RPCS_BY_NAME[rpc].response_type
        if rpc == "Read":
            yield from self._read_problems(case["responses"], outcome.responses)
            return
        if len(outcome.responses) != len(case["responses"]):
            yield f"{len(outcome.responses)} responses where {len(case['responses'])} were recorded"
        for there, here in zip(case["responses"], outcome.responses, strict=False):
            yield from self._response_problems(kind, there, here)

    def _response_problems(
        self, kind: type[Message], there: dict[str, Any], here: bytes
    ) -> Iterable[str]:
        expected, actual = parsed(kind, there), kind.FromString(here)
        for into, have in message_pairs(expected, actual):
            yield from self._fill(into, have)
        if expected != actual:
            yield f"ours:\n{_text(actual)}\nrecorded:\n{_text(expected)}"
        elif expected.SerializeToString() != here:
            yield f"bytes {here.hex()} where {expected.SerializeToString().hex()} were recorded"

    def _fill(self, into: Any, have: Any) -> Iterable[str]:
        """Put into a recorded message what varies, from ours."""
        if isinstance(into, pb.Header.Etcd) and into.ByteSize():
            ours = self.broker.keyspace.header
            if note := self.revisions.note_header(into.revision, have.revision):
                yield note
            into.cluster_id, into.member_id = ours.cluster_id, ours.member_id
            into.revision = have.revision
            into.raft_term = have.raft_term
            if not have.raft_term:
                yield "raft_term is 0"
        if isinstance(into, pb.ListResponse.Journal):
            yield from self.revisions.settle_key(into, have)
        if isinstance(into, pb.Route):
            ours_at = self.broker.endpoint
            into.endpoints[:] = [
                ours_at if endpoint == RECORDED_ENDPOINT else endpoint
                for endpoint in into.endpoints
            ]
        if isinstance(into, pb.Fragment) and into.mod_time and have.mod_time:
            is_set = into.mod_time in MOD_TIMES_SET
            into.mod_time = into.mod_time if is_set else have.mod_time
        for descriptor, _ in list(into.ListFields()):
            if descriptor.name in FREE_TEXT and getattr(have, descriptor.name):
                setattr(into, descriptor.name, getattr(have, descriptor.name))

    # ------------------------------------------------------------ reads

    def _read_problems(self, there: Sequence[dict[str, Any]], here: list[bytes]) -> Iterable[str]:
        expected = list(_runs(there, lambda message: _is_chunk(message["json"])))
        actual = list(_runs(here, _is_chunk_wire))
        shape = [(is_chunk, 0 if is_chunk else len(run)) for is_chunk, run in expected]
        if shape != [(is_chunk, 0 if is_chunk else len(run)) for is_chunk, run in actual]:
            yield (
                "messages (content, or so many of metadata) come as "
                f"{[(c, len(r)) for c, r in actual]} where {[(c, len(r)) for c, r in expected]} "
                "were recorded"
            )
        for (is_chunk, recorded), (_, ours) in zip(expected, actual, strict=False):
            if is_chunk:
                yield from _content_problems(recorded, ours)
            else:
                for message, wire in zip(recorded, ours, strict=False):
                    yield from self._response_problems(pb.ReadResponse, message, wire)


def message_pairs(expected: Message, actual: Message) -> Iterator[tuple[Any, Any]]:
    """Yield a recorded message and ours, and what they hold, each before its parts."""
    yield expected, actual
    for descriptor, value in list(expected.ListFields()):
        if descriptor.type != FieldDescriptor.TYPE_MESSAGE:
            continue
        if descriptor.message_type.GetOptions().map_entry:
            continue
        if descriptor.is_repeated:
            for item, other in zip(value, getattr(actual, descriptor.name), strict=False):
                yield from message_pairs(item, other)
        elif actual.HasField(descriptor.name):
            yield from message_pairs(value, getattr(actual, descriptor.name))


def path_problems(case: dict[str, Any], outcome: Outcome) -> Iterable[str]:
    """Text is any, but the field an error names tells which check comes first."""
    if not case.get("message") or case["code"] != "UNKNOWN":
        return
    if not outcome.message:
        yield "an error without a text"
    found = _PATH.match(case["message"])
    if found is not None and not outcome.message.startswith(found.group(0)):
        yield f"{outcome.message!r} is about another field than {case['message']!r}"


def _runs(items: Sequence[Any], is_chunk: Any) -> Iterable[tuple[bool, list[Any]]]:
    run: list[Any] = []
    for item in items:
        if run and is_chunk(run[-1]) != is_chunk(item):
            yield is_chunk(run[-1]), run
            run = []
        run.append(item)
    if run:
        yield is_chunk(run[-1]), run


def _is_chunk(message: dict[str, Any]) -> bool:
    return "content" in message or "content_len" in message


def _is_chunk_wire(wire: bytes) -> bool:
    return bool(pb.ReadResponse.FromString(wire).content)


def _content_problems(there: list[dict[str, Any]], here: list[bytes]) -> Iterable[str]:
    """Chunks follow one another, hold nothing else, and together have the recorded content."""
    content = bytearray()
    begin = pb.ReadResponse.FromString(here[0]).offset
    for wire in here:
        chunk = pb.ReadResponse.FromString(wire)
        if chunk.offset != begin + len(content):
            yield f"a chunk at {chunk.offset} where {begin + len(content)} comes next"
        bare = pb.ReadResponse(offset=chunk.offset, content=chunk.content)
        if bare.SerializeToString() != wire:
            yield f"a chunk is written as {wire[:40].hex()}…"
        if len(chunk.content) > CHUNK_BYTES_MAX:
            yield f"a chunk has {len(chunk.content)} bytes"
        content += chunk.content
    length = 0
    for recorded in there:
        offset = int(recorded["json"].get("offset", 0))
        size = recorded["json"].get("content_len")
        if size is None:
            expected = parsed(pb.ReadResponse, recorded).content  # type: ignore[attr-defined]
            size, sha1 = len(expected), hashlib.sha1(expected).hexdigest()
        else:
            sha1 = recorded["json"]["content_sha1"]
        part = content[offset - begin : offset - begin + size]
        if hashlib.sha1(part).hexdigest() != sha1:
            yield f"content at {offset} is {bytes(part[:80])!r}…, not what was recorded"
        length += size
    if length != len(content):
        yield f"{len(content)} bytes of content where {length} were recorded"


def _text(message: Message) -> str:
    return json_format.MessageToJson(message, preserving_proto_field_name=True, indent=1)

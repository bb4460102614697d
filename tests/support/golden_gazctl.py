"""Outputs of ``gazctl``, ours and recorded ones, in a form that compares.

Ours prints plain columns where the recorded tool drew boxes, and adds sums of fragments. Revisions,
ids and endpoints vary between runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import yaml
from google.protobuf import text_format

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb

__all__ = ["our_output", "plain_cells", "recorded_output"]

VARYING = {"mod_revision", "create_revision", "revision", "raft_term", "cluster_id", "member_id"}


def our_output(arguments: Sequence[str], text: str) -> Any:
    """Return the content of an output of ours, without its layout."""
    form = _form_of(arguments) if text else "text"
    if form == "table":
        return plain_cells(text)
    if form == "json":
        assert text.endswith("\n")
        return [_settled(json.loads(line)) for line in text.splitlines()]
    return _value(arguments, form, text)


def recorded_output(arguments: Sequence[str], text: str) -> Any:
    """Return the content of a recorded output, without its layout."""
    form = _form_of(arguments) if text else "text"
    if form == "table":
        return _boxed_cells(text)
    if form == "json":
        return [_with_sha1(_settled(json.loads(line))) for line in text.splitlines()]
    return _value(arguments, form, text)


def plain_cells(text: str) -> list[list[str]]:
    """The cells of plain columns: each is where its header begins, two blanks behind others."""
    lines = text.splitlines()
    begins = [match.start() for match in re.finditer(r"(?:^|(?<=  ))\S", lines[0])]
    rows = [
        [
            line[begin:end].rstrip().replace("broker-0", "broker-1")
            for begin, end in zip(begins, [*begins[1:], None], strict=True)
        ]
        for line in lines
    ]
    assert not set(text) & set("│┌─└\x1b")
    return rows


# ------------------------------------------------------------------ forms


def _form_of(arguments: Sequence[str]) -> str:
    if "--dry-run" in arguments and "apply" in arguments:
        return "proto"
    if not {"list", "fragments"} & set(arguments):
        return "text"
    return next(
        (
            arguments[index + 1]
            for index, argument in enumerate(arguments)
            if argument in {"-o", "--format"}
        ),
        "table",
    )


def _value(arguments: Sequence[str], form: str, text: str) -> Any:
    if form == "yaml":
        return _without_revisions(yaml.safe_load(text))
    if form == "proto":
        return _settled_proto(arguments, text)
    return text


def _boxed_cells(text: str) -> list[list[str]]:
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in text.splitlines()
        if line.startswith("│")
    ]
    rows[0] = [header.replace(" ", "") for header in rows[0]]
    return rows


def _without_revisions(node: dict[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in node.items() if key != "revision"}
    for items in ("children", "shards"):
        if items in found:
            found[items] = [_without_revisions(item) for item in found[items]]
    return found


def _settled(value: Any) -> Any:
    if isinstance(value, list):
        return [_settled(item) for item in value]
    if not isinstance(value, dict):
        return value
    found: dict[str, Any] = {}
    for key, item in value.items():
        if key in VARYING:
            assert int(item) > 0
            found[key] = "any"
        elif key == "endpoints":
            found[key] = len(item)
        elif key in {"process_id", "members"}:
            found[key] = bool(item)
        else:
            found[key] = _settled(item)
    return found


def _with_sha1(line: dict[str, Any]) -> dict[str, Any]:
    """Ours adds the sum of a fragment in hexadecimal to what was recorded."""
    parts = line.get("spec", {}).get("sum")
    if not parts:
        return line
    return {**line, "sha1": "{part1:016x}{part2:016x}{part3:08x}".format(**parts)}


def _settled_proto(arguments: Sequence[str], text: str) -> Any:
    protocol: Any = cpb if "shards" in arguments else pb
    if "apply" in arguments:
        return text_format.Parse(text, protocol.ApplyRequest())
    if "list" in arguments:
        listing = text_format.Parse(text, protocol.ListResponse())
        listing.ClearField("header")
        for item in listing.shards if protocol is cpb else listing.journals:
            item.mod_revision = item.create_revision = 1
            item.route.endpoints[:] = [""] * len(item.route.endpoints)
            for member in item.route.members:
                member.zone = member.suffix = ""
            durations = ("refresh_interval", "retention", "flush_interval")
            spec = item.spec if protocol is cpb else item.spec.fragment
            for name in ("max_txn_duration", "min_txn_duration") if protocol is cpb else durations:
                getattr(spec, name).SetInParent()
        return listing
    # One message per journal, nothing between them: their fragments merge.
    merged = pb.FragmentsResponse()
    for part in text.split("header")[1:]:
        response = text_format.Parse("header" + part, pb.FragmentsResponse())
        merged.fragments.extend(response.fragments)
    return merged

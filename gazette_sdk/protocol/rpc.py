"""Rules of requests and responses (protocol section 10).

A server validates each request before it acts, a client each response. The rule that fails first
is part of the contract; texts are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.durations import to_ns
from gazette_sdk.protocol.fragments import validate_fragment
from gazette_sdk.protocol.journal_spec import validate_journal_spec
from gazette_sdk.protocol.labels import PREFIX, validate_label_set
from gazette_sdk.protocol.names import validate_journal, validate_path_component
from gazette_sdk.protocol.routes import validate_header, validate_route
from gazette_sdk.protocol.selectors import validate_selector
from gazette_sdk.protocol.urls import validate_store_url, validate_url

__all__ = ["PAGE_LIMIT_MOST", "WRITE_HEAD", "validate", "validate_change"]

WRITE_HEAD = -1
"""Offset of a read which begins at the journal's current write head."""
ANY_REVISION = -1
"""``expect_mod_revision`` of a change without condition."""
PAGE_LIMIT_MOST = 10_000
"""Greatest number of fragments in a page."""

_CHECK_DELETE_PREFIX_LENGTH_BYTES = (1, 512)
_STATUSES = frozenset(pb.Status.values())
_SUSPENDS = frozenset(pb.AppendRequest.Suspend.values())


def validate(message: Message) -> None:
    """Check a request or response of the journal service.

    Do not validate every message that is received: replicas attach their header to the first
    acknowledged response of any status, and continuations of a List snapshot have none.

    Args:
        message: any request or response of protocol section 3.

    Raises:
        ValidationError: of the first rule that is broken.
        TypeError: the message is neither.
    """
    validator = _VALIDATORS.get(type(message))
    if validator is None:
        raise TypeError(f"{type(message).__name__} is no message of the journal service")
    validator(message)


# ---------------------------------------------------------------- Read


def _validate_read_request(request: pb.ReadRequest) -> None:
    if request.HasField("header"):
        validate_header(request.header, "Header")
    validate_journal(request.journal, "Journal")
    offset, end_offset = request.offset, request.end_offset
    if offset < WRITE_HEAD:
        raise _broken("invalid_offset", f"invalid offset ({offset}; expected -1 or more)")
    if end_offset != 0 and end_offset < max(offset, 0):
        raise _broken(
            "invalid_end_offset", f"invalid end_offset ({end_offset}; expected 0 or >= {offset})"
        )


def _validate_read_response(response: pb.ReadResponse) -> None:
    if response.content:
        _refuse_set(
            ("status", response.status),
            ("header", response.HasField("header")),
            ("write_head", response.write_head),
            ("fragment", response.HasField("fragment")),
            ("fragment_url", response.fragment_url),
            beside="content",
        )
        return
    _validate_status(response.status)
    if response.HasField("header"):
        validate_header(response.header, "Header")
    offset, write_head = response.offset, response.write_head
    if write_head < 0:
        raise _broken("invalid_write_head", f"invalid write_head ({write_head}; expected >= 0)")
    if response.HasField("fragment"):
        fragment = response.fragment
        validate_fragment(fragment, "Fragment")
        if not fragment.begin <= offset < fragment.end:
            raise _broken(
                "invalid_offset",
                f"invalid offset ({offset}; expected {fragment.begin} <= offset < {fragment.end})",
            )
        if write_head < fragment.end:
            raise _broken(
                "invalid_write_head",
                f"invalid write_head ({write_head}; expected >= {fragment.end})",
            )
        validate_url(response.fragment_url, "FragmentUrl")
    elif response.status == pb.Status.OK:
        _refuse_set(
            ("offset", offset), ("fragment_url", response.fragment_url), beside="no fragment"
        )


# ---------------------------------------------------------------- Append


def _validate_append_request(request: pb.AppendRequest) -> None:
    if not request.journal:
        _refuse_set(
            ("header", request.HasField("header")),
            ("do_not_proxy", request.do_not_proxy),
            ("offset", request.offset),
            ("check_registers", request.HasField("check_registers")),
            ("union_registers", request.HasField("union_registers")),
            ("subtract_registers", request.HasField("subtract_registers")),
            ("suspend", request.suspend),
            beside="a chunk",
        )
        return
    if request.HasField("header"):
        validate_header(request.header, "Header")
    validate_journal(request.journal, "Journal")
    if request.offset < 0:
        raise _broken("invalid_offset", f"invalid offset ({request.offset}; expected >= 0)")
    _refuse_set(("content", request.content), beside="a journal")
    if request.HasField("check_registers"):
        validate_selector(request.check_registers, "CheckRegisters")
    if request.HasField("union_registers"):
        validate_label_set(request.union_registers, "UnionRegisters")
    if request.HasField("subtract_registers"):
        validate_label_set(request.subtract_registers, "SubtractRegisters")
    if request.suspend not in _SUSPENDS:
        raise _broken("invalid_suspend", f"unknown suspend ({request.suspend})", "Suspend")


def _validate_append_response(response: pb.AppendResponse) -> None:
    _validate_status(response.status)
    validate_header(response.header, "Header")
    has_commit, has_registers = response.HasField("commit"), response.HasField("registers")
    if response.status == pb.OK and not has_commit:
        raise _broken("expected_commit", "expected commit with status OK")
    if response.status in {pb.OK, pb.REGISTER_MISMATCH} and not has_registers:
        raise _broken(
            "expected_registers", "expected registers with status OK or REGISTER_MISMATCH"
        )
    if has_commit:
        validate_fragment(response.commit, "Commit")
    if has_registers:
        validate_label_set(response.registers, "Registers")


# ---------------------------------------------------------------- Replicate


def _validate_replicate_request(request: pb.ReplicateRequest) -> None:
    if not request.HasField("proposal"):
        _validate_replicate_content(request)
        return
    if request.HasField("header"):
        validate_header(request.header, "Header")
        if not request.acknowledge:
            raise _broken("expected_acknowledge", "expected acknowledge with a header")
    validate_fragment(request.proposal, "Proposal")
    validate_label_set(request.registers, "Registers")
    _refuse_set(
        ("content", request.content),
        ("content_delta", request.content_delta),
        beside="a proposal",
    )
    if request.deprecated_journal not in {"", request.proposal.journal}:
        raise _broken(
            "journal_mismatch",
            f"expected the proposal's journal ({request.deprecated_journal!r}, proposal "
            f"{request.proposal.journal!r})",
        )


def _validate_replicate_content(request: pb.ReplicateRequest) -> None:
    if not request.content:
        raise _broken("expected_content_or_proposal", "expected content or a proposal")
    if request.content_delta < 0:
        raise _broken(
            "invalid_content_delta",
            f"invalid content_delta ({request.content_delta}; expected >= 0)",
        )
    _refuse_set(
        ("header", request.HasField("header")),
        ("registers", request.HasField("registers")),
        ("acknowledge", request.acknowledge),
        ("deprecated_journal", request.deprecated_journal),
        beside="content",
    )


def _validate_replicate_response(response: pb.ReplicateResponse) -> None:
    """Check a response that is being sent; received ones may differ, see :func:`validate`."""
    _validate_status(response.status)
    if response.status == pb.Status.WRONG_ROUTE:
        if not response.HasField("header"):
            raise _broken("expected_header", "expected header with status WRONG_ROUTE")
        validate_header(response.header, "Header")
    else:
        _refuse_set(("header", response.HasField("header")), beside="this status")
    if response.status == pb.Status.PROPOSAL_MISMATCH:
        if not response.HasField("fragment"):
            raise _broken("expected_fragment", "expected fragment with status PROPOSAL_MISMATCH")
        validate_fragment(response.fragment, "Fragment")
        if not response.HasField("registers"):
            raise _broken("expected_registers", "expected registers with status PROPOSAL_MISMATCH")
        validate_label_set(response.registers, "Registers")
    else:
        _refuse_set(
            ("fragment", response.HasField("fragment")),
            ("registers", response.HasField("registers")),
            beside="this status",
        )


# ---------------------------------------------------------------- List, Apply


def _validate_list_request(request: pb.ListRequest) -> None:
    validate_selector(request.selector, "Selector")
    for half, labels in (
        ("Include", request.selector.include),
        ("Exclude", request.selector.exclude),
    ):
        for label in labels.labels:
            if label.name == PREFIX and not label.value.endswith("/"):
                raise _broken(
                    "prefix_missing_slash",
                    f"value of label 'prefix' must end in '/' ({label.value!r})",
                    f"Selector.{half}",
                )


def _validate_list_response(response: pb.ListResponse) -> None:
    _validate_status(response.status)
    validate_header(response.header, "Header")
    for index, journal in enumerate(response.journals):
        path = f"Journals[{index}]"
        validate_journal_spec(journal.spec, f"{path}.Spec", stored=True)
        if journal.mod_revision <= 0:
            raise _broken(
                "invalid_mod_revision",
                f"invalid mod_revision ({journal.mod_revision}; expected > 0)",
                path,
            )
        validate_route(journal.route, f"{path}.Route")


def _validate_apply_request(request: pb.ApplyRequest) -> None:
    for index, change in enumerate(request.changes):
        _validate_change(change, f"Changes[{index}]")


def _validate_change(change: pb.ApplyRequest.Change, path: str) -> None:
    validate_change(change, path, upsert=validate_journal_spec, delete=validate_journal)


def validate_change(
    change: Any,
    path: str,
    *,
    upsert: Callable[[Any, str], None],
    delete: Callable[[str, str], None],
) -> None:
    """Check a change of a journal or shard: one of upsert and delete, and the expected revision.

    Args:
        change: of an Apply request.
        path: where it stands, for errors.
        upsert: checks the spec.
        delete: checks the name.

    Raises:
        ValidationError: it breaks a rule.
    """
    if change.HasField("upsert"):
        if change.delete:
            raise _broken("both_set", "expected one of upsert or delete, have both", path)
        upsert(change.upsert, f"{path}.Upsert")
        least = 0
    elif change.delete:
        delete(change.delete, f"{path}.Delete")
        least = 1
    else:
        raise _broken("neither_set", "expected one of upsert or delete, have neither", path)
    expected = change.expect_mod_revision
    if expected < least and expected != ANY_REVISION:
        raise _broken(
            "invalid_expect_mod_revision",
            f"invalid expect_mod_revision ({expected}; expected -1, or {least} or more)",
            path,
        )


def _validate_status_and_header(
    response: pb.ApplyResponse | pb.FragmentStoreHealthResponse | pb.FragmentsResponse,
) -> None:
    _validate_status(response.status)
    validate_header(response.header, "Header")


# ---------------------------------------------------------------- fragments


def _validate_fragments_request(request: pb.FragmentsRequest) -> None:
    if request.HasField("header"):
        validate_header(request.header, "Header")
    validate_journal(request.journal, "Journal")
    if request.end_mod_time != 0 and request.end_mod_time < request.begin_mod_time:
        raise _broken(
            "invalid_end_mod_time",
            f"invalid end_mod_time ({request.end_mod_time}; expected 0 or >= "
            f"{request.begin_mod_time})",
        )
    if request.next_page_token < 0:
        raise _broken(
            "invalid_next_page_token",
            f"invalid next_page_token ({request.next_page_token}; expected >= 0)",
        )
    if not 0 <= request.page_limit <= PAGE_LIMIT_MOST:
        raise _broken(
            "invalid_page_limit",
            f"invalid page_limit ({request.page_limit}; expected 0 to {PAGE_LIMIT_MOST})",
        )
    if request.HasField("signatureTTL") and to_ns(request.signatureTTL) <= 0:
        raise _broken("invalid_signature_ttl", "invalid signatureTTL (expected > 0s)")


def _validate_fragments_response(response: pb.FragmentsResponse) -> None:
    _validate_status_and_header(response)
    for index, fragment in enumerate(response.fragments):
        validate_fragment(fragment.spec, f"Fragments[{index}].Spec")
        validate_url(fragment.signed_url, f"Fragments[{index}].SignedUrl")


def _validate_store_health_request(request: pb.FragmentStoreHealthRequest) -> None:
    validate_store_url(request.fragment_store, "FragmentStore")
    prefix, path = request.check_delete_prefix, "CheckDeletePrefix"
    if not prefix:
        return
    if not request.check_delete:
        raise _broken("requires_check_delete", "requires check_delete", path)
    if not prefix.endswith("/"):
        raise _broken("no_trailing_slash", f"must end in '/' ({prefix!r})", path)
    if prefix.startswith("../"):
        raise _broken("traverses_outside", f"must not leave the store ({prefix!r})", path)
    validate_path_component(prefix[:-1], path, *_CHECK_DELETE_PREFIX_LENGTH_BYTES)


# ---------------------------------------------------------------- parts


def _validate_status(status: int) -> None:
    if status not in _STATUSES:
        raise _broken("invalid_status", f"unknown status ({status})", "Status")


def _refuse_set(*fields: tuple[str, object], beside: str) -> None:
    """Refuse the first field that is set, in the order given."""
    for name, value in fields:
        if value:
            raise _broken(f"unexpected_{name}", f"unexpected {name} with {beside}")


def _broken(kind: str, reason: str, path: str = "") -> ValidationError:
    return ValidationError(reason, kind=kind, path=path)


_VALIDATORS: dict[type[Message], Callable[[Any], None]] = {
    pb.ReadRequest: _validate_read_request,
    pb.ReadResponse: _validate_read_response,
    pb.AppendRequest: _validate_append_request,
    pb.AppendResponse: _validate_append_response,
    pb.ReplicateRequest: _validate_replicate_request,
    pb.ReplicateResponse: _validate_replicate_response,
    pb.ListRequest: _validate_list_request,
    pb.ListResponse: _validate_list_response,
    pb.ApplyRequest: _validate_apply_request,
    pb.ApplyResponse: _validate_status_and_header,
    pb.FragmentsRequest: _validate_fragments_request,
    pb.FragmentsResponse: _validate_fragments_response,
    pb.FragmentStoreHealthRequest: _validate_store_health_request,
    pb.FragmentStoreHealthResponse: _validate_status_and_header,
}

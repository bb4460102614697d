"""Specs that a program applies to a cluster of its own, at any revision."""

from __future__ import annotations

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import journalspace

__all__ = ["ETCD_TXN_CHANGES", "request_of"]

ETCD_TXN_CHANGES = 100
"""Changes per Etcd transaction, whose default limit is 128 operations."""


def request_of(specs: str) -> pb.ApplyRequest:
    """Return the changes that a YAML document describes. Those without ``revision`` match any.

    Raises:
        ValidationError: the document is malformed.
    """
    root = journalspace.parse(specs)
    journalspace.push_down(root)
    request = journalspace.to_apply_request(root)
    for change in request.changes:
        if not change.expect_mod_revision:
            change.expect_mod_revision = -1
    return request

"""Journal space: specs of many journals as a tree, and as YAML (protocol section 14).

A node whose name is empty or ends in ``/`` is a directory: what its partial spec says, all
journals below it inherit. Any other node is a journal.

From YAML to brokers::

    root = parse(text)
    root.validate()
    push_down(root)
    request = to_apply_request(root)

And back::

    root = from_list_response(response.journals)
    hoist(root)
    text = dump(root)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import reduce

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.journal_spec import intersect_specs, subtract_specs, union_specs
from gazette_sdk.protocol.journalspace_yaml import dump_tree, parse_tree
from gazette_sdk.protocol.names import at, validate_journal

__all__ = [
    "Node",
    "dump",
    "extract",
    "from_list_response",
    "hoist",
    "mark_unpatched_for_deletion",
    "parse",
    "patch",
    "push_down",
    "shared_prefix",
    "to_apply_request",
]

"""``gazctl shards edit``."""

from __future__ import annotations

import sys

from gazette_sdk.cli.client import open_consumer
from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.edit_loop import edit
from gazette_sdk.cli.shards.apply import apply_and_show, request_of
from gazette_sdk.cli.shards.list import yaml_of
from gazette_sdk.cli.shards.selection import list_some
from gazette_sdk.cli.shards.settings import EDIT

__all__ = ["run"]


async def run(invocation: Invocation) -> None:
    """Edit specs. No connection is open while the editor runs."""
    settings = invocation.settings(EDIT)
    async with open_consumer(invocation) as client:
        text = yaml_of(await list_some(client, settings.selector))

    async def apply(edited: str) -> None:
        request = request_of(edited)
        if request.changes:
            size = settings.max_txn_size
            await apply_and_show(invocation, request, size, "table", sys.stderr)

    await edit(text, prefix="gazctl-shards-edit-", environ=invocation.environ, apply=apply)

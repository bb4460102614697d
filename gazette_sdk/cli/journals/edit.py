"""``gazctl journals edit``."""

from __future__ import annotations

import sys

from gazette_sdk.cli.client import open_broker
from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.edit_loop import edit
from gazette_sdk.cli.journals.apply import apply_and_show, request_of
from gazette_sdk.cli.journals.list import yaml_of
from gazette_sdk.cli.journals.selection import list_some
from gazette_sdk.cli.journals.settings import EDIT

__all__ = ["run"]


async def run(invocation: Invocation) -> None:
    """Edit specs. No connection to a broker is open while the editor runs."""
    settings = invocation.settings(EDIT)
    async with open_broker(invocation) as transport:
        text = yaml_of(await list_some(transport, settings.selector))

    async def apply(edited: str) -> None:
        request = request_of(edited)
        async with open_broker(invocation) as transport:
            await apply_and_show(
                transport, request.changes, settings.max_txn_size, "table", sys.stderr
            )

    await edit(text, prefix="gazctl-journals-edit-", environ=invocation.environ, apply=apply)

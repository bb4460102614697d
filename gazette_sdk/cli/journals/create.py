"""``gazctl journals create``."""

from __future__ import annotations

from gazette_sdk.cli.client import open_broker
from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.journals.outcomes import show_outcomes
from gazette_sdk.cli.journals.settings import CREATE, CreateSettings
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.journals.changes import create_journals
from gazette_sdk.journals.journal import JournalOptions

__all__ = ["run"]


async def run(invocation: Invocation) -> None:
    """Create the partitions of a topic, and show the outcome of each."""
    settings = invocation.settings(CREATE)
    options = options_of(settings)
    (name,) = invocation.arguments
    async with open_broker(invocation) as transport:
        made = await create_journals(transport, name, settings.partitions, options)
    show_outcomes(made, settings.format)


def options_of(settings: CreateSettings) -> JournalOptions:
    """Return the values of the journals that the command line gives.

    Raises:
        ConfigurationError: a label is not ``NAME=VALUE``.
    """
    options: JournalOptions = {}
    if settings.replication:
        options["replication"] = settings.replication
    if settings.stores:
        options["stores"] = settings.stores
    if settings.codec:
        options["codec"] = settings.codec
    if settings.length:
        options["length"] = settings.length
    if settings.content_type is not None:
        options["content_type"] = settings.content_type
    labels: dict[str, list[str]] = {}
    for text in settings.labels:
        name, separator, value = text.partition("=")
        if not separator:
            raise ConfigurationError(f"--label: {text!r} is not NAME=VALUE, such as region=eu")
        labels.setdefault(name, []).append(value)
    return {**options, "labels": labels}

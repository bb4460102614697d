"""What a reader of messages gives, and how it ends."""

from typing import Any

from gazette_sdk import GazetteError, Reader


def messages(reader: Reader[Any]) -> tuple[list[Any], GazetteError | None]:
    """The messages up to the end or the first error, and that error."""
    found = []
    try:
        for envelope in reader:
            found.append(envelope.message)  # noqa: PERF401 - those before an error count
    except GazetteError as error:
        return found, error
    return found, None

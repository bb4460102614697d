"""Errors of every room: the base of all, and values that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar


class GazetteError(Exception):
    """Base of all errors that this package raises.

    Remedy: the text of each error names it. Catch a subclass to handle one failure, and this class
    to handle all.

    Args:
        message: the failure, and its remedy.
        journal: name of the affected journal, if any.
        offset: affected byte offset, if any.
    """

    status: ClassVar[int | None] = None

    def __init__(
        self, message: str, *, journal: str | None = None, offset: int | None = None
    ) -> None:
        super().__init__(message)
        self.journal = journal
        self.offset = offset


class ValidationError(GazetteError):
    """A value breaks a rule.

    Remedy: change the value that the text and ``path`` name. Nothing was sent or changed.

    Args:
        reason: the rule, as text.
        kind: short stable name of the rule (``not_clean``, ``invalid_offset``, …).
        path: dotted path of the field (``spec.fragment.length``), empty for the value itself.
    """

    def __init__(
        self, reason: str, *, kind: str = "invalid", path: str = "", journal: str | None = None
    ) -> None:
        super().__init__(f"{path}: {reason}" if path else reason, journal=journal)
        self.reason = reason
        self.kind = kind
        self.path = path

    def within(self, prefix: str) -> ValidationError:
        """Return the same error for a message that holds the value under ``prefix``."""
        path = (
            f"{prefix}.{self.path}"
            if self.path and not self.path.startswith("[")
            else (prefix + self.path)
        )
        return ValidationError(self.reason, kind=self.kind, path=path, journal=self.journal)


class ConfigurationError(GazetteError):
    """A flag, file, address or environment value cannot be used.

    Remedy: change the flag, argument, file or environment variable that the text names.
    """


def check_number(name: str, value: object, least: float = 0, *, is_whole: bool = False) -> None:
    """Check the value of an argument.

    Args:
        name: name of the argument.
        value: its value.
        least: its least value.
        is_whole: True if it must be an ``int``.

    Raises:
        ConfigurationError: it is no number, or less.
    """
    is_number = isinstance(value, int if is_whole else int | float) and value is not True
    if not is_number or value is False or not value >= least:  # type: ignore[operator]
        word = "a whole number" if is_whole else "a number"
        raise ConfigurationError(f"{name}={value!r}: use {word}, at least {least}")


class MissingPackageError(ConfigurationError, ImportError):
    """A Python package that only some users need is not installed. It is an ImportError, too.

    Remedy: run the ``pip install`` line of the text, which names the extra that has the package.
    """


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Raise a MissingPackageError if an import in the block does not find a package.

    Args:
        extra: the extra of ``gazette-sdk`` that has it.
        what: what needs it, in the plural.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingPackageError(install_text(error, extra, what)) from error


def install_text(error: ModuleNotFoundError, extra: str, what: str) -> str:
    """Return the text for a package that was not found; see :func:`needs_extra`."""
    package = (error.name or "").partition(".")[0]
    return (
        f"{what} need the Python package {package!r}, which is not installed; "
        f'run `pip install "gazette-sdk[{extra}]"`'
    )


class ClosedError(GazetteError):
    """A closed object was used.

    Remedy: create another one. Publishers, readers and transports cannot be opened again.
    """


class ReentrantCallError(GazetteError):
    """A call was made within another one of the same thread, for which it would wait for ever.

    Remedy: in a signal handler set a flag, and make the call in the main code; in a finalizer or a
    log handler hand the work to another thread, as with a ``queue.SimpleQueue``.
    """


class UserCodeError(GazetteError):
    """User code raised what ends an iteration, a task or the process, such as StopIteration.

    Remedy: catch the exception in the function that the text names, and raise another one there.

    Args:
        message: the failure.
        error: the exception.
        index: index of the item that the function was called with, of several.

    Attributes:
        error: the exception.
        index: index of the item; None if it was called with one only.
    """

    def __init__(self, message: str, *, error: BaseException, index: int | None = None) -> None:
        super().__init__(message)
        self.error = error
        self.index = index

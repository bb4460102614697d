"""Log records as text, JSON or in colour, without secrets.

A record has fields: the ``extra`` of the log call, and those of its context (``contexts``). Every
format writes one record per line (text and colour: a traceback follows on lines of its own), time,
level and message first (operations section 4). Text and JSON name the process and its component
next.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, TextIO

import orjson

from gazette_sdk.contexts import LOG_FIELDS
from gazette_sdk.meters import PlainMetric
from gazette_sdk.user_code import encodable, text_of

LEVELS = {
    "trace": 5,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
"""Levels by their names in options."""

_LEVEL_NAMES = {number: "warning" if name == "warn" else name for name, number in LEVELS.items()}

RECENT_RECORDS = 200
"""Number of records of level warning and above that the diagnostics keep."""

FOLD_S = 10.0
"""Repeated warnings and errors of this time are one record with their number."""

TEXTS_OF_A_KIND = 3
"""Number of records of one kind with different texts that are written before they are folded."""

KINDS_MAX = 1000
"""Number of kinds of records that are noted at a time. Further ones are written as they come."""

LOG_RECORDS = PlainMetric(
    "gazette_log_records_total",
    "Log records by level, also those that were folded.",
    ("level",),
    kind="counter",
)
for _name in _LEVEL_NAMES.values():
    LOG_RECORDS.cell(_name)

AUDIT = logging.getLogger("gazette.audit")
"""Logger of the audit log, whose records are never folded: it limits them by itself."""

_STANDARD_FIELDS = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"})

_COLOURS = {"trace": 90, "debug": 90, "info": 36, "warning": 33, "error": 31, "fatal": 31}

_ENDS_OF_NAMES = r"""(?:
    auth[-_.]?keys? | (?:access | account | api | secret)[-_.]?key | token | password | passwd
    | passphrase | secret | authorization | credentials?
)"""
"""Ends of the names of secrets: of options, variables, parameters and fields of log records. An
option is secret if its name ends so: no other list of them exists."""

_SECRET_NAME = re.compile(rf"(?ix) {_ENDS_OF_NAMES} $")

_ASSIGNED = re.compile(rf"(?ix) ( (?: ^ | [^\w.-] ) [\w.-]* {_ENDS_OF_NAMES} = ) .+ ")

_SECRETS = re.compile(
    rf"""(?ix)
    ( \bbearer \s+ ) [\w.~+/=-]+            # a token in a header
    | () \b eyJ [\w-]+ \. [\w-]+ \. [\w-]*  # a JWT anywhere
    | ( [?&] (?: X-Amz-Signature | X-Amz-Credential | X-Amz-Security-Token | X-Goog-Signature
        | X-Goog-Credential | Signature | sig | AWSAccessKeyId | GoogleAccessId | token
        | delegation | access_token | password | secret ) = )
      [^&\s"']+                             # what makes a URL a signed one, or authorizes
    | ( :// [^/\s:@]* : ) [^/\s@]+ (?=@)    # a password in a URL
    | ( (?<![\w.-]) (?=[\w.-]+=) [\w.-]* {_ENDS_OF_NAMES} = ["']? ) [^&\s"']+  # a variable
    """
)


def is_secret_name(name: str) -> bool:
    """Return True if a name is that of a secret, such as ``etcd.password``."""
    return _SECRET_NAME.search(name) is not None


def hide_secrets(arguments: Iterable[str]) -> list[str]:
    """Return a command line without secrets.

    Hidden are the values of secret options, as ``--x=y`` and as ``--x y``, what follows the
    name of a secret and an equals sign anywhere in an argument, and what :func:`redact` hides.
    """
    shown: list[str] = []
    hides_next = False
    for argument in arguments:
        shown.append("…" if hides_next else redact(_ASSIGNED.sub(r"\1…", argument)))
        hides_next = not hides_next and argument.startswith("-") and is_secret_name(argument)
    return shown


def redact(text: str) -> str:
    """Return ``text`` without tokens, passwords and signatures of URLs."""
    return _SECRETS.sub(
        lambda match: "".join(group or "" for group in match.groups()) + "…", encodable(text)
    )


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the ``extra`` fields of a record, without secrets."""
    return {
        name: "…" if is_secret_name(name) and value else _without_secrets(value)
        for name, value in vars(record).items()
        if name not in _STANDARD_FIELDS
    }


def _without_secrets(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, dict):
        return {
            str(name): "…" if is_secret_name(str(name)) and item else _without_secrets(item)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_without_secrets(item) for item in value]
    return redact(text_of(value))


@dataclass(slots=True)
class LogIdentity:
    """Identity of this process in its log.

    Attributes:
        process: zone and id; before they are known, the number of the process.
        component: ``broker``, the name of an application, or else ``gazette``.
    """

    process: str = ""
    component: str = "gazette"

    def fields(self) -> dict[str, str]:
        """Return the fields of a record."""
        return {"process": self.process or str(os.getpid()), "component": self.component}


IDENTITY = LogIdentity()
"""Identity of this process, which a server sets when it starts."""


class _Formatter(logging.Formatter):
    """Common base of the formats."""

    def head(self, record: logging.LogRecord) -> tuple[str, str, str]:
        """Return time, level and message."""
        moment = datetime.fromtimestamp(record.created, UTC)
        level = _LEVEL_NAMES.get(record.levelno, record.levelname.lower())
        return (
            moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            level,
            redact(_message_of(record)),
        )

    def traceback(self, record: logging.LogRecord) -> str:
        """Return the traceback of the record's error, or an empty string."""
        return redact(self.formatException(record.exc_info)) if record.exc_info else ""


def _message_of(record: logging.LogRecord) -> str:
    """Return the message, also if the text of an argument cannot be made."""
    try:
        return record.getMessage()
    except BaseException as error:  # noqa: BLE001 - of an argument's `__str__`
        return f"{record.msg} (an argument's __str__ raised {type(error).__name__})"


class JsonFormatter(_Formatter):
    """Format of one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON."""
        time, level, message = self.head(record)
        head = {"time": time, "level": level, "msg": message, **IDENTITY.fields()}
        values = {**head, **fields_of(record), **head}
        if traceback := self.traceback(record):
            values["traceback"] = traceback
        return orjson.dumps(values, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


class TextFormatter(_Formatter):
    """Format of ``key=value`` pairs, quoted where needed.

    Args:
        identified: True to name the process in each record.
    """

    def __init__(self, *, identified: bool = True) -> None:
        super().__init__()
        self._identified = identified

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as pairs."""
        time, level, message = self.head(record)
        identity = IDENTITY.fields() if self._identified else {}
        pairs = {"time": time, "level": level, "msg": message, **identity, **fields_of(record)}
        line = " ".join(f"{name}={_quoted(value)}" for name, value in pairs.items())
        traceback = self.traceback(record)
        return f"{line}\n{traceback}" if traceback else line


class ColorFormatter(_Formatter):
    """Format for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record in colour."""
        time, level, message = self.head(record)
        colour = _COLOURS.get(level, 0)
        pairs = "".join(
            f" \x1b[{colour}m{name}\x1b[0m={_quoted(value)}"
            for name, value in fields_of(record).items()
        )
        line = f"\x1b[{colour}m{level.upper():7}\x1b[0m[{time[11:19]}] {message}{pairs}"
        traceback = self.traceback(record)
        return f"{line}\n{traceback}" if traceback else line


def _quoted(value: Any) -> str:
    text = value if isinstance(value, str) else orjson.dumps(value, default=str).decode()
    plain = text and text.isprintable() and not set(text) & set(' "=\\')
    return text if plain else orjson.dumps(text).decode()


class RecentRecord(NamedTuple):
    """Warning or error of the log.

    Attributes:
        level: its level, a number of :mod:`logging`.
        logger: name of its logger.
        text: message and fields, in one line without secrets.
    """

    level: int
    logger: str
    text: str


class RecentRecords(logging.Handler):
    """Handler that keeps the latest warnings and errors for the diagnostics.

    Attributes:
        lines: the records as text.
        observers: the first one is called with each record, in any thread. There are several where
            a process has several servers: one of them suffices.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: deque[str] = deque(maxlen=RECENT_RECORDS)
        self.observers: list[Callable[[RecentRecord], None]] = []
        self.setFormatter(TextFormatter(identified=False))

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self.lines.append(self.format(record))
        for observer in self.observers[:1]:
            observer(RecentRecord(record.levelno, record.name, _line_of(record)))


def _line_of(record: logging.LogRecord) -> str:
    """Return the message of a record and its fields, without secrets."""
    fields = fields_of(record)
    pairs = (f"{name}={_quoted(value)}" for name, value in fields.items())
    return " ".join([redact(_message_of(record)).partition("\n")[0], *pairs])


@dataclass(slots=True)
class _Kind:
    texts: set[str] = field(default_factory=set)
    count: int = 0
    last: logging.LogRecord | None = None


class FoldingHandler(logging.Handler):
    """Handler that writes repeated warnings and errors once, with their number.

    Records of one level, logger and message (before its arguments are inserted) are of one kind.
    With a lost broker, for example, calls of each of its journals fail. The first records with
    different texts are written at once. What follows is counted: while it continues, each ten
    seconds the last one is written, with the number in its field ``repeated``.

    Args:
        targets: the handlers that write.
    """

    def __init__(self, *targets: logging.Handler) -> None:
        super().__init__()
        self._targets = targets
        self._kinds: dict[tuple[str, int, str], _Kind] = {}
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or count it."""
        LOG_RECORDS.inc(_LEVEL_NAMES.get(record.levelno, record.levelname.lower()))
        for name, value in LOG_FIELDS.get().items():
            vars(record).setdefault(name, value)
        if record.levelno < logging.WARNING or record.name == AUDIT.name:
            self._write(record)
            return
        key = record.name, record.levelno, str(record.msg)
        kind = self._kinds.get(key)
        if kind is None:
            kind = _Kind()
            if len(self._kinds) < KINDS_MAX:
                self._kinds[key] = kind
                if self._timer is None:
                    self._start_timer()
        text = _message_of(record)
        if len(kind.texts) < TEXTS_OF_A_KIND and text not in kind.texts:
            kind.texts.add(text)
            self._write(record)
        else:
            kind.count += 1
            kind.last = record

    def flush(self) -> None:
        """Write what was counted."""
        self.acquire()
        try:
            for key, kind in list(self._kinds.items()):
                last, count = kind.last, kind.count
                if last is None:
                    del self._kinds[key]
                    continue
                kind.last, kind.count = None, 0
                self._write(logging.makeLogRecord({**vars(last), "repeated": count}))
        finally:
            self.release()

    def close(self) -> None:
        """Write what was counted, and end."""
        if self._timer is not None:
            self._timer.cancel()
        self.flush()
        super().close()

    def _write(self, record: logging.LogRecord) -> None:
        for target in self._targets:
            if record.levelno >= target.level:
                target.handle(record)

    def _start_timer(self) -> None:
        timer = threading.Timer(FOLD_S, self._end_period)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:
            return  # no thread can be started now: the next new kind tries again, or the end writes
        self._timer = timer

    def _end_period(self) -> None:
        self.flush()
        self.acquire()
        try:
            self._timer = None
            if self._kinds:
                self._start_timer()
        finally:
            self.release()


class TemporaryLevel:
    """Level of this package's records that holds for a while, beside that of all others."""

    def __init__(self) -> None:
        self._logger = logging.getLogger("gazette_sdk")
        self._before = logging.NOTSET
        self._timer: threading.Timer | None = None
        self._until = 0.0

    def change(self, level: str, duration_s: float) -> None:
        """Log from a level on. A later change takes the place of this one.

        Args:
            level: a key of :data:`LEVELS`.
            duration_s: seconds after which the level of before is back.
        """
        if self._timer is None:
            self._before = self._logger.level
        else:
            self._timer.cancel()
        self._logger.setLevel(LEVELS[level])
        self._until = time.time() + duration_s
        self._timer = timer = threading.Timer(duration_s, lambda: self._restore(timer))
        timer.daemon = True
        timer.start()

    def restore(self) -> None:
        """Bring the level of before back at once."""
        if self._timer is not None:
            self._timer.cancel()
            self._restore(self._timer)

    def _restore(self, timer: threading.Timer) -> None:
        if self._timer is timer:
            self._timer = None
            self._logger.setLevel(self._before)

    def shown(self) -> dict[str, Any]:
        """Return the present level, and until when it holds if it is a temporary one."""
        number = self._logger.getEffectiveLevel()
        level = _LEVEL_NAMES.get(number, logging.getLevelName(number).lower())
        if self._timer is None:
            return {"level": level}
        until = datetime.fromtimestamp(self._until, UTC).isoformat(timespec="seconds")
        return {"level": level, "until": until.replace("+00:00", "Z")}


LEVEL = TemporaryLevel()
"""Level of the log of this process, as ``/debug/log`` changes it."""

RECENT = RecentRecords()
"""Records of ``/debug/events``, in a process whose logging is configured here."""


def configure_logging(
    level: str = "warn",
    style: Literal["text", "json", "color"] = "text",
    stream: TextIO | None = None,
    *,
    member: str = "",
) -> None:
    """Log this process's records to ``stream``, by default standard error.

    Args:
        level: least level to log, a key of :data:`LEVELS`.
        style: format of records.
        stream: where to write them.
        member: field ``member`` of each record, for processes whose logs are one; empty for none.
    """
    formatters = {"text": TextFormatter, "json": JsonFormatter, "color": ColorFormatter}
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatters[style]())
    root = logging.getLogger()
    folding = FoldingHandler(handler, RECENT)

    def name_member(record: logging.LogRecord) -> bool:
        record.member = member
        return True

    if member:
        folding.addFilter(name_member)
    root.handlers[:] = [folding]
    root.setLevel(LEVELS[level])

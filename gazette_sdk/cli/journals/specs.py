"""``gazctl journals apply``, ``create``, ``edit``, ``delete`` and ``suspend``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

from gazette_sdk.cli.client import open_broker
from gazette_sdk.cli.formats import load, proto_text
from gazette_sdk.cli.journals.commands import APPLY, CREATE, DELETE, EDIT, SUSPEND, CreateSettings
from gazette_sdk.cli.journals.fragments import remove_stored
from gazette_sdk.cli.journals.list import (
    OutcomeFormat,
    list_some,
    missing_file_root,
    select,
    selection_of,
    show_outcomes,
    yaml_of,
)
from gazette_sdk.cli.program import CommandFailedError, Invocation, explain
from gazette_sdk.errors import (
    CallError,
    ConfigurationError,
    GazetteError,
    JournalNotFoundError,
    StatusError,
    SuspendedError,
    UnauthenticatedError,
    ValidationError,
)
from gazette_sdk.journals.changes import (
    TXN_CHANGES_MAX,
    AppliedChange,
    apply_changes,
    count_brokers,
    create_journals,
    list_named,
    warn_without_spare,
)
from gazette_sdk.journals.journal import JournalOptions
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import journalspace
from gazette_sdk.protocol import rules as rpc
from gazette_sdk.server.tls import file_root_of
from gazette_sdk.transport.append.append import append
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.loop import for_each

BLOCK_BYTES = 1 << 20
"""Greatest size of a block. Blocks of a pipe are smaller if less is available."""

BLOCKS_AHEAD = 4
"""Number of blocks that are read ahead."""


@contextmanager
def open_input(path: str) -> Iterator[BinaryIO]:
    """Open the file of an option; ``-`` is standard input."""
    if path == "-":
        yield sys.stdin.buffer
        return
    with Path(path).open("rb") as file:
        yield file


def length_of(file: BinaryIO) -> int | None:
    """Return the length of a regular file, or None of a pipe or terminal."""
    status = os.fstat(file.fileno())
    return status.st_size if stat.S_ISREG(status.st_mode) else None


async def blocks(file: BinaryIO) -> AsyncIterator[bytes]:
    """Yield the content of a file as it arrives.

    A daemon thread reads it, because a read of a terminal or a pipe cannot be cancelled.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(BLOCKS_AHEAD)
    is_wanted = True
    descriptor = os.dup(file.fileno())  # the thread may outlive the caller's file

    def read_ahead() -> None:
        item: bytes | OSError = b"more"
        try:
            while item and not isinstance(item, OSError) and room.acquire() and is_wanted:
                try:
                    item = os.read(descriptor, BLOCK_BYTES)
                except OSError as error:
                    item = error
                loop.call_soon_threadsafe(queue.put_nowait, item)
        except RuntimeError:
            return  # the loop has ended
        finally:
            os.close(descriptor)

    threading.Thread(target=read_ahead, name="input", daemon=True).start()
    try:
        while True:
            item = await queue.get()
            room.release()
            if isinstance(item, OSError):
                raise item
            if not item:
                return
            yield item
    finally:
        is_wanted = False
        room.release()


_log = logging.getLogger(__name__)


async def run_apply(invocation: Invocation) -> None:
    """Apply the specs of a file, or print the request."""
    settings = invocation.settings(APPLY)
    request = load(settings.specs, request_of)
    if settings.dry_run:
        sys.stdout.write(proto_text(request))
        return
    async with open_broker(invocation) as transport:
        await apply_and_show(transport, request.changes, settings.max_txn_size, settings.format)


def request_of(text: str | bytes) -> pb.ApplyRequest:
    """Return the changes that a YAML document describes.

    Raises:
        ValidationError: the document or a change is malformed.
    """
    root = journalspace.parse(text)
    if root == journalspace.Node():
        raise ValidationError("the document is empty; describe journals by their specs")
    root.validate()
    journalspace.push_down(root)
    request = journalspace.to_apply_request(root)
    rpc.validate(request)
    return request


async def apply_and_show(
    transport: Transport,
    changes: Sequence[pb.ApplyRequest.Change],
    size: int,
    form: OutcomeFormat,
    file: TextIO | None = None,
) -> None:
    """Apply changes, and show their outcomes, also of those before a failed one.

    Args:
        transport: how to reach the cluster.
        changes: valid changes.
        size: changes in each transaction; 0 means one transaction.
        form: format of the outcomes.
        file: output file; by default standard output.

    Raises:
        CommandFailedError: a transaction failed. It says how many changes were applied before.
    """
    step = size or max(len(changes), 1)
    done: list[AppliedChange] = []
    try:
        async for applied in apply_changes(transport, changes, step):
            done += applied
            _log.info("successfully applied", extra={"changes": len(applied)})
        await _warn_without_spare(transport, done)
    except (StatusError, CallError) as error:
        left = len(changes) - len(done)
        raise CommandFailedError(_failure(error, len(done), left, min(step, left))) from error
    finally:
        places = {each.delete or each.upsert.name: place for place, each in enumerate(changes)}
        if done:
            show_outcomes(sorted(done, key=lambda each: places[each.name]), form, file)


async def _warn_without_spare(transport: Transport, done: Sequence[AppliedChange]) -> None:
    """Log a warning of journals whose replication leaves no broker to spare."""
    replicated = [
        each.spec for each in done if each.spec.replication > 1 and each.outcome != "deleted"
    ]
    if replicated:
        # A token that may not list gets no warning.
        with contextlib.suppress(UnauthenticatedError):
            warn_without_spare(replicated, await count_brokers(transport, replicated[0].name))


def _failure(error: StatusError | CallError, done: int, left: int, batch: int) -> str:
    text = f"failed to apply journals: {error}"
    if batch > TXN_CHANGES_MAX:
        text += f"; {batch} changes are many for one transaction: try --max-txn-size=100"
    if done:
        text += f"; the first {done} of {done + left} changes were applied before"
    return text


async def run_create(invocation: Invocation) -> None:
    """Create the partitions of a topic, and show the outcome of each."""
    settings = invocation.settings(CREATE)
    options = options_of(settings)
    (name,) = invocation.arguments
    async with open_broker(invocation) as transport:
        made = await create_journals(
            transport,
            name,
            settings.partitions,
            options,
            continues=settings.continues,
            force=settings.force,
        )
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


async def run_edit(invocation: Invocation) -> None:
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


_KEPT = (
    "Fragments that are stored stay in their stores: a new journal of the same name continues "
    "after them, by `gazctl journals create --continue`. Content that brokers have not stored yet "
    "is lost."
)
_ALL_LOST = "All of their content is lost: fragments are removed from the stores, too."


async def run_delete(invocation: Invocation) -> None:
    """Delete journals by name or selector. On a terminal it asks first."""
    settings = invocation.settings(DELETE)
    names = sorted(set(invocation.arguments))
    if bool(names) == bool(settings.selector):
        raise ConfigurationError(
            "`journals delete` needs either names of journals, or a label selector (-l): give one"
        )
    async with open_broker(invocation) as transport:
        found = await _select(transport, names, settings.selector)
    root = file_root_of(settings.file_root)
    if settings.with_fragments and root is None:
        for each in found:
            if any(url.startswith("file:") for url in each.spec.fragment.stores):
                raise missing_file_root(each.spec.name)
    lost = _ALL_LOST if settings.with_fragments else _KEPT
    asks = not settings.yes and sys.stdin.isatty()
    if asks:
        await confirm("journal", [each.spec.name for each in found], lost)
    changes = [
        pb.ApplyRequest.Change(delete=each.spec.name, expect_mod_revision=each.mod_revision)
        for each in found
    ]
    # Opened again: the connection may not survive a long time of thinking.
    async with open_broker(invocation) as transport:
        await apply_and_show(transport, changes, TXN_CHANGES_MAX, settings.format)
    if settings.with_fragments:
        removed = await remove_stored([each.spec for each in found], root)
        many = "fragments" if removed != 1 else "fragment"
        sys.stderr.write(f"Removed {removed} {many} from the stores.\n")
    elif not asks:
        sys.stderr.write(f"{lost}\n")


async def _select(
    transport: Transport, names: Sequence[str], selector: str
) -> Sequence[pb.ListResponse.Journal]:
    """Return the journals to delete.

    Raises:
        JournalNotFoundError: a named journal does not exist.
        CommandFailedError: no journal matches the selector.
    """
    if selector:
        return (await list_some(transport, selector)).journals
    found = await list_named(transport, names)
    for name in names:
        if name not in found:
            raise JournalNotFoundError("nothing was deleted", journal=name)
    return [found[name] for name in names]


async def confirm(kind: str, names: Sequence[str], lost: str) -> None:
    """Ask on the terminal whether to delete something.

    Args:
        kind: what is to be deleted, as ``journal``.
        names: their names.
        lost: what is lost with them.

    Raises:
        CommandFailedError: the answer is no.
    """
    for name in names:
        sys.stderr.write(f"  {name}\n")
    count = f"this {kind}" if len(names) == 1 else f"these {len(names)} {kind}s"
    sys.stderr.write(f"{lost}\nDelete {count}? [y/N] ")
    sys.stderr.flush()
    answer = b""
    async for block in blocks(sys.stdin.buffer):
        answer += block
        if b"\n" in block:
            break
    if answer.strip().lower() not in {b"y", b"yes"}:
        raise CommandFailedError("cancelled; nothing was deleted")


async def run_suspend(invocation: Invocation) -> None:
    """Suspend journals. The first failure ends the command.

    Raises:
        GazetteError: that failure.
    """
    settings = invocation.settings(SUSPEND)
    selection = selection_of(invocation, settings)
    mode = pb.AppendRequest.SUSPEND_NOW if settings.force else pb.AppendRequest.SUSPEND_IF_FLUSHED
    async with open_broker(invocation) as transport:

        async def suspend(journal: str) -> None:
            try:
                await append(transport, pb.AppendRequest(journal=journal, suspend=mode), [])
                status = "OK"
            except SuspendedError:
                status = "SUSPENDED"
            _log.info("journal suspension status", extra={"journal": journal, "status": status})

        journals = await select(transport, selection)
        await for_each([each.spec.name for each in journals], suspend)


NOTE = "#⚙"
PROBLEM = "#⚠"

_INTRODUCTION = f"""\
{NOTE} Edit the spec below. Lines beginning with a '{NOTE}' or '{PROBLEM}' are generated by
{NOTE} this tool and will be ignored as input. An empty file will abort the edit.
{NOTE} If there is an error validating and applying this file, it will be reopened.
{NOTE}
"""


async def edit(
    text: str,
    *,
    prefix: str,
    environ: Mapping[str, str],
    apply: Callable[[str], Awaitable[None]],
) -> None:
    """Open ``text`` in an editor, and apply the edited text.

    Args:
        text: text to edit.
        prefix: prefix of the edited file's name.
        environ: environment; ``GAZ_EDITOR`` or ``EDITOR`` is the editor, else ``vi``.
        apply: applies the edited text. If it raises a :class:`GazetteError`, the editor opens
            again with the reason and the user's text.

    Raises:
        CommandFailedError: the editor failed. Edits that were not applied are kept, and the
            message names their file.
    """
    with tempfile.NamedTemporaryFile(prefix=prefix, delete=False) as file:
        path = Path(file.name)
    problem = ""
    while True:
        await asyncio.to_thread(path.write_text, header(problem) + text, encoding="utf-8")
        await _run_editor(environ, path, is_kept=bool(problem))
        try:
            edited = without_generated(await asyncio.to_thread(path.read_text, encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise CommandFailedError(f"cannot read the edited file {path}: {error}") from error
        if problem and edited == text:
            sys.stderr.write("Cancelled; no changes to invalid file.\n")
            sys.stderr.write(f"Last edits saved to {path}.\n")
            return
        if not edited.strip():
            sys.stderr.write("Cancelled; empty file.\n")
        elif edited == text:
            sys.stderr.write("Cancelled; nothing to do.\n")
        else:
            try:
                await apply(edited)
            except GazetteError as error:
                text, problem = edited, explain(error)
                continue
        await asyncio.to_thread(path.unlink, missing_ok=True)
        return


def header(problem: str) -> str:
    """Return the generated lines above the text, which state their own number.

    Args:
        problem: reason why the text was not applied; empty at first.
    """
    lines = _INTRODUCTION.splitlines()
    if problem:
        lines += [f"{PROBLEM} There were errors validating or applying the spec.", PROBLEM]
        lines += [f"{PROBLEM} {line}" for line in problem.splitlines()]
        lines.append(PROBLEM)
    count = len(lines) + 2
    lines += [f"{NOTE} Note: Any line numbers above do not include this header ({count} lines)."]
    return "\n".join([*lines, NOTE, ""])


def without_generated(text: str) -> str:
    """Return the text without the lines that this tool generated."""
    kept = [line for line in text.splitlines(keepends=True) if line[:2] not in {NOTE, PROBLEM}]
    return "".join(kept)


async def _run_editor(environ: Mapping[str, str], path: Path, *, is_kept: bool) -> None:
    """Run the editor on the terminal, and wait for it. Ctrl-C goes to the editor alone."""
    command = environ.get("GAZ_EDITOR") or environ.get("EDITOR") or "vi"
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    try:
        process = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", f"{command} {shlex.quote(str(path))}"
        )
        status = await process.wait()
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    if status == 0:
        return
    text = f"the editor `{command}` ended with status {status}; nothing was applied"
    if is_kept:
        text += f"; last edits saved to {path}"
    else:
        await asyncio.to_thread(path.unlink, missing_ok=True)
    raise CommandFailedError(text)

"""Calls of user code: keys, mappings, validators, framings, handlers, queries and hooks.

User code may raise anything. StopIteration ends a ``map()`` without an error, CancelledError a
task, SystemExit an event loop with all that waits for it. So user code is called only by the
functions of this module, or within ``try`` and ``except BaseException``. For each message,
:func:`check_raised` there does what :func:`call` does, at no cost until something is raised:

==========================  ======================  =============================================
raised                      :func:`call`            :func:`contained`, in the SDK's own threads
                                                    and event loops
==========================  ======================  =============================================
StopIteration,              UserCodeError           UserCodeError
StopAsyncIteration,
CancelledError,
GeneratorExit, others of
BaseException
KeyboardInterrupt,          as it is: the caller's  UserCodeError. Its waiters get it, then the
SystemExit                  program ends            owner ends the process in order
any other Exception         as it is                as it is
==========================  ======================  =============================================

The text of an exception is user code, too: :func:`text_of` returns it whatever ``__str__`` does.
What a plain function returns is checked by :func:`check_done` where nothing else uses it: of a
coroutine or a generator nothing has run.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import logging
import types
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from operator import length_hint
from typing import Any, TypeVar

from gazette_sdk.errors import UserCodeError

T = TypeVar("T")

_log = logging.getLogger(__name__)

EXITS = (KeyboardInterrupt, SystemExit)
"""Exceptions that end the process."""

_ENDS = (StopIteration, StopAsyncIteration)

_NOT_RUN = (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)

_CAUSES_MAX = 16
"""Causes of an exception that are looked at."""


def call(function: Callable[..., T], *arguments: Any) -> T:
    """Call user code on the thread of its caller.

    Raises:
        UserCodeError: it raised what would end an iteration or a task.
        Exception: whatever else it raised; KeyboardInterrupt and SystemExit, too.
    """
    try:
        return function(*arguments)
    except BaseException as error:
        check_raised(error, function)
        raise


def check_raised(error: BaseException, function: Callable[..., Any]) -> None:
    """Check what user code raised on the thread of its caller, who then raises it as it is.

    Raises:
        UserCodeError: it would end an iteration or a task.
    """
    if _is_control_flow(error) and not isinstance(error, EXITS):
        raise error_of(error, function) from error


def call_each(function: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
    """Call user code with each item, as :func:`call`, at the cost of ``map()``.

    Raises:
        UserCodeError: as of :func:`call`; its ``index`` is that of the item.
        Exception: whatever else it raised.
    """
    rest = iter(items)
    results: list[T] = []
    try:
        results = list(map(function, rest))
    except BaseException as error:
        if isinstance(error, EXITS) or not _is_control_flow(error):
            raise
        index = len(items) - length_hint(rest) - 1
        raise error_of(error, function, index=index) from error
    if len(results) != len(items):  # StopIteration ends map() early, without an error
        raise error_of(StopIteration(), function, index=len(results))
    return results


def contained(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Call user code on a thread, or in a task, of the SDK.

    Raises:
        UserCodeError: it raised what would end an iteration, a task, or the process.
        Exception: whatever else it raised.
    """
    try:
        return function(*arguments, **named)
    except BaseException as error:
        if not _is_control_flow(error):
            raise
        raise error_of(error, function) from error


async def acontained(function: Callable[..., Awaitable[T]], *arguments: Any, **named: Any) -> T:
    """Call and await user code in a task of the SDK, as :func:`contained`.

    Raises:
        asyncio.CancelledError: the task itself is being cancelled.
    """
    try:
        return await function(*arguments, **named)
    except BaseException as error:
        if not _is_control_flow(error) or is_cancellation(error):
            raise
        raise error_of(error, function) from error


def is_async(function: Callable[..., Any]) -> bool:
    """Return True for ``async def``: a function, a partial of one, or a callable object."""
    return inspect.iscoroutinefunction(_called(function))


def is_generator(function: Callable[..., Any]) -> bool:
    """Return True for functions with ``yield``, of which a call runs nothing."""
    called = _called(function)
    return inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called)


def check_done(result: object, function: Callable[..., Any]) -> None:
    """Check what a function returned that has done its work by then.

    Raises:
        UserCodeError: a coroutine or a generator, of which nothing has run.
    """
    if not isinstance(result, _NOT_RUN):
        return
    if isinstance(result, types.CoroutineType):
        result.close()  # without the warning that it was never awaited
    what = type(result).__name__.replace("_", " ")
    error = TypeError(f"returned a {what}")
    raise UserCodeError(
        f"{_name_of(function)} returned a {what}, of which nothing has run: declare it by"
        " `async def` where that is possible, await or run it there, or return without `yield`",
        error=error,
    ) from error


def notify(callback: Callable[..., object], *arguments: Any) -> None:
    """Call back where an error can be reported to no one: it is logged."""
    try:
        callback(*arguments)
    except BaseException as error:  # noqa: BLE001 - others are still to be called
        _log.error("%s raised %s", _name_of(callback), described(error), exc_info=error)


# ------------------------------------------------------------------------- threads

REPEAT_S = 0.05
"""Pause before a function that is to end is interrupted again. It doubles each time."""

REPEAT_MAX_S = 1.0


async def on_worker(
    workers: Executor | None,
    function: Callable[..., T],
    *arguments: object,
    on_cancelled: Callable[[], None] | None = None,
) -> T:
    """Call a function on a worker thread, and wait until it has returned, also if cancelled.

    A thread cannot be cancelled, and what it works on must not be closed under it.

    Args:
        workers: threads; None for those of the event loop.
        function: function to call.
        arguments: its arguments.
        on_cancelled: called on another thread if the wait is cancelled, to end the function; again
            and again, until it has returned.

    Raises:
        UserCodeError: it raised what would end an iteration, a task, or the process.
        Exception: whatever else it raises, unless the wait was cancelled.
    """
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    working = functools.partial(context.run, contained, function, *arguments)
    call = loop.run_in_executor(workers, working)
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        pause_s = REPEAT_S
        while not call.done():
            if on_cancelled is not None:
                with contextlib.suppress(RuntimeError):  # the program ends
                    loop.run_in_executor(None, functools.partial(notify, on_cancelled))
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([call], timeout=None if on_cancelled is None else pause_s)
            pause_s = min(2 * pause_s, REPEAT_MAX_S)
        if not call.cancelled():
            call.exception()  # retrieved: no one waits for it any more
        raise


# -------------------------------------------------------------------------- errors


def error_of(
    error: BaseException, function: Callable[..., Any], *, index: int | None = None
) -> UserCodeError:
    """Return the error that stands for an exception of user code.

    Args:
        error: the exception.
        function: function that raised it.
        index: index of the item that it was called with, of several.
    """
    text = f"{_name_of(function)} raised {described(error)}"
    if isinstance(error, _ENDS):
        text += ", which ends an iteration: catch it there, as with next(…, None)"
    elif isinstance(error, EXITS):
        text += ", which ends the process: raise another exception where only the call is to fail"
    else:
        text += ": catch it there, or raise an Exception"
    found = UserCodeError(text, error=error, index=index)
    found.__cause__ = error
    return found


def is_cancellation(error: BaseException) -> bool:
    """Return True if the running task ends by this: it is being cancelled, or thrown away."""
    if isinstance(error, GeneratorExit):
        return True
    if not isinstance(error, asyncio.CancelledError):
        return False
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def exit_within(error: BaseException | None) -> BaseException | None:
    """Return the KeyboardInterrupt or SystemExit among an exception and its causes, if any."""
    for _ in range(_CAUSES_MAX):
        if error is None or isinstance(error, EXITS):
            return error
        error = error.__cause__
    return None


def _is_control_flow(error: BaseException) -> bool:
    return not isinstance(error, Exception) or isinstance(error, _ENDS)


# --------------------------------------------------------------------------- texts


def text_of(value: object, form: Callable[[object], str] = str) -> str:
    """Return the text of an exception or another object, whatever its ``__str__`` does.

    Args:
        value: the object.
        form: makes the text: ``str`` or ``repr``.
    """
    try:
        text = form(value)
    except BaseException as error:  # noqa: BLE001 - the text says so
        text = f"(its __{form.__name__}__ raised {type(error).__name__})"
    return encodable(text)


def described(error: BaseException) -> str:
    """Return the class and the text of an exception."""
    name, text = encodable(type(error).__name__), text_of(error)
    return f"{name}: {text}" if text else name


def encodable(text: str) -> str:
    r"""Return a text as UTF-8 can hold it: lone surrogates become ``\udcff``."""
    return str.encode(text, "utf-8", "backslashreplace").decode()


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that a call runs: of a partial, or of an object's class."""
    function = _function_of(function)
    is_object = not inspect.isroutine(function) and not isinstance(function, type)
    return type(function).__call__ if is_object else function


def _function_of(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, with its module."""
    function = _function_of(function)
    name = getattr(function, "__qualname__", None)
    if not isinstance(name, str):
        return f"an object of {encodable(type(function).__qualname__)}"
    module = getattr(function, "__module__", None)
    return encodable(f"{module}.{name}" if isinstance(module, str) else name)

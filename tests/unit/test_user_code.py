"""User code may raise anything: it is called by one helper, and the code calls it nowhere else."""

from __future__ import annotations

import ast
import asyncio
import builtins
from collections.abc import Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path

import pytest

import gazette_sdk
from gazette_sdk.errors import UserCodeError
from gazette_sdk.user_code import (
    acontained,
    call,
    call_each,
    check_done,
    contained,
    described,
    exit_within,
    is_async,
    is_generator,
    notify,
    text_of,
)


class OddError(BaseException):
    pass


class NoTextError(Exception):
    def __str__(self):
        raise SystemExit(3)


ENDS = [StopIteration, StopAsyncIteration, asyncio.CancelledError, GeneratorExit, OddError]
EXITS = [KeyboardInterrupt, SystemExit]


def raising(error):
    def given(*_):
        raise error

    return given


# ------------------------------------------------------------------------ calls


@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("caller", [call, contained, partial(call_each)])
def test_what_ends_an_iteration_or_a_task_becomes_an_error_that_names_the_function(kind, caller):
    with pytest.raises(
        UserCodeError, match=rf"test_user_code.raising.*given raised {kind.__name__}"
    ):
        caller(raising(kind()), [1])


@pytest.mark.parametrize("kind", [ValueError, MemoryError, NoTextError, *EXITS])
@pytest.mark.parametrize("caller", [call, call_each])
def test_the_caller_gets_every_other_exception_as_it_is(kind, caller):
    error = kind()
    with pytest.raises(kind) as caught:
        caller(raising(error), [1])
    assert caught.value is error


@pytest.mark.parametrize("kind", EXITS)
def test_threads_and_loops_of_the_sdk_outlive_what_ends_a_process(kind):
    with pytest.raises(UserCodeError, match=f"{kind.__name__}.*ends the process") as caught:
        contained(raising(kind()))
    assert isinstance(exit_within(caught.value), kind)
    assert exit_within(ValueError()) is None


@pytest.mark.parametrize("kind", [StopIteration, OddError])
@pytest.mark.parametrize("bad", [0, 2, 4])
def test_an_item_that_ends_an_iteration_is_named(kind, bad):
    def odd(item):
        if item == bad:
            raise kind
        return item

    with pytest.raises(UserCodeError) as caught:
        call_each(odd, range(5))
    assert caught.value.index == bad
    assert call_each(odd, (7, 8)) == [7, 8]
    assert call_each(itemgetter(0), []) == []


@pytest.mark.parametrize("kind", [asyncio.CancelledError, OddError, *EXITS])
def test_a_coroutine_that_raises_what_ends_its_task_has_failed(kind):
    async def given():
        raise kind

    with pytest.raises(UserCodeError, match=kind.__name__):
        asyncio.run(wrapped(given))


async def wrapped(given):
    await acontained(given)


def test_a_task_that_is_cancelled_ends_as_such():
    async def cancelled():
        running = asyncio.create_task(wrapped(asyncio.Event().wait))
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        return running.cancelled()

    assert asyncio.run(cancelled())


def test_a_callback_that_raises_is_logged(caplog):
    notify(raising(SystemExit(3)))
    assert "given raised SystemExit: 3" in caplog.text


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("two words"), "ValueError: two words"),
        (ValueError(), "ValueError"),
        (ValueError("file \udcff"), "ValueError: file \\udcff"),
        (NoTextError(), "NoTextError: (its __str__ raised SystemExit)"),
    ],
)
def test_every_exception_has_a_text_that_can_be_encoded(error, text):
    assert described(error) == text
    text_of(error).encode()


# ------------------------------------------------------- functions that do not run


async def coroutine():
    """Nothing."""


def generator():
    yield


async def generator_async():
    yield


class Callable:
    async def __call__(self):
        """Nothing."""


@pytest.mark.parametrize("given", [coroutine, partial(coroutine), Callable(), partial(Callable())])
def test_every_form_of_a_coroutine_function_is_one(given):
    assert is_async(given)
    assert not is_generator(given)


@pytest.mark.parametrize("given", [generator, generator_async, partial(generator)])
def test_functions_that_yield_are_generators(given):
    assert is_generator(given)
    assert not is_async(given)


@pytest.mark.parametrize("given", [print, int, partial(print), itemgetter(0), [].append])
def test_other_functions_are_neither(given):
    assert not is_async(given)
    assert not is_generator(given)


@pytest.mark.parametrize("given", [coroutine, generator, generator_async])
def test_what_has_not_run_is_no_result(given):
    with pytest.raises(UserCodeError, match=f"{given.__name__} returned a .*nothing has run"):
        check_done(given(), given)


def test_any_other_result_is_done():
    for each in (None, 1, "text", [], iter([])):
        check_done(each, print)


# ----------------------------------------------------------------- the code itself

ROOMS = ("framing", "message", "shard")

USER_FUNCTIONS = frozenset(
    {
        "call_validate",
        "chosen",
        "handle",
        "hook",
        "key",
        "mapping",
        "on_error",
        "own",
        "save",
        "serve",
        "shard_of",
        "validate",
    }
)
"""Variables with functions of users, or with what calls their methods."""

USER_ATTRIBUTES = frozenset({"_choose", "_key", "_loads", "_on_error", "_save"})
"""Attributes with such functions."""

HOOKS = frozenset(
    {"begin", "consume", "finalize", "finished", "new_message", "rpcs", "start", "stop"}
)
"""Methods of an application; ``new_store`` is called on a worker."""

HELPERS = frozenset({"call", "call_each", "contained", "acontained", "notify"})

HELPED = frozenset({"call_validate", "_consume_or_leave_out"})
"""Functions of ours that only the helper calls, or a guarded loop."""

ITERATING = frozenset({"map", "filter", "starmap", "iter", "reduce", "takewhile", "dropwhile"})

DEFERRING = frozenset(
    {
        "partial",
        "run_in_executor",
        "submit",
        "to_thread",
        "add_done_callback",
        "call_soon",
        "call_later",
    }
)

KNOWN = frozenset({"get", "parse", "make", "made"})
"""Functions of ours in variables, which iterations call."""


class Finder(ast.NodeVisitor):
    """Finds calls of user functions beside the helper."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[tuple[int, str]] = []
        self.defined = {
            each.name
            for each in ast.walk(tree)
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        } | {
            alias.asname or alias.name
            for each in ast.walk(tree)
            if isinstance(each, ast.Import | ast.ImportFrom)
            for alias in each.names
        }
        self._guards = 0
        self._functions: list[str] = []

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        guards, self._guards = self._guards, 0
        self._functions.append(node.name)
        self.generic_visit(node)
        self._functions.pop()
        self._guards = guards

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]  # noqa: N815 - of ast

    def visit_Try(self, node: ast.Try) -> None:
        guards = any(
            each.type is None
            or (isinstance(each.type, ast.Name) and each.type.id == "BaseException")
            for each in node.handlers
        )
        self._guards += guards
        for each in node.body:
            self.visit(each)
        self._guards -= guards
        for each in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(each)

    def visit_Call(self, node: ast.Call) -> None:
        name = name_of(node.func)
        if (
            self._is_users(node.func)
            and not self._guards
            and not HELPED.intersection(self._functions)
        ):
            self.found.append((node.lineno, ast.unparse(node)))
        given = node.args[0] if node.args else None
        if given is not None and name_of(given) in HELPERS:
            given = None  # partial(contained, function)
        iterated = name in ITERATING and isinstance(node.func, ast.Name) and len(node.args) > 1
        if given is not None and (
            (iterated and not self._is_ours(given))
            or (name in DEFERRING and any(map(self._is_users, node.args)))
        ):
            self.found.append((node.lineno, ast.unparse(node)))
        for keyword in node.keywords:
            sorts = keyword.arg == "key" and name in {"sorted", "min", "max", "sort"}
            if sorts and not self._is_ours(keyword.value):
                self.found.append((node.lineno, ast.unparse(node)))
        self._guards += name in HELPERS
        self.generic_visit(node)
        self._guards -= name in HELPERS

    def _is_users(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Attribute):
            is_hook = name_of(node.value) in {"application", "_application"} and node.attr in HOOKS
            return is_hook or node.attr in USER_ATTRIBUTES
        name = name_of(node)
        return name in USER_FUNCTIONS and name not in self.defined

    def _is_ours(self, given: ast.expr) -> bool:
        """Return True for a lambda, whose calls are looked at, and for functions of the code."""
        if isinstance(given, ast.Lambda | ast.Constant):
            return True
        name = name_of(given)
        if self._is_users(given):
            return False
        if isinstance(given, ast.Attribute) or name in KNOWN or hasattr(builtins, name):
            return True  # methods of ours, and attributes that hold no user's function
        return name in self.defined


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def beside_the_helper(source: str) -> list[tuple[int, str]]:
    tree = ast.parse(source)
    finder = Finder(tree)
    finder.visit(tree)
    return finder.found


def modules() -> Iterator[Path]:
    root = Path(gazette_sdk.__file__).parent
    for room in ROOMS:
        yield from sorted((root / room).rglob("*.py"))


def test_user_functions_are_called_by_the_helper_only():
    found = [
        f"{path.parts[-2]}/{path.name}:{line}: {text}"
        for path in modules()
        for line, text in beside_the_helper(path.read_text())
    ]
    assert not found, "call these through gazette_sdk.user_code:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "names = list(map(mapping, messages))",
        "def route(self): return [self._key(each) for each in self.messages]",
        "def f(key, messages): return sorted(messages, key=key)",
        "def f(function, items): return any(map(function, items))",
        "future.add_done_callback(on_error)",
        "loop.run_in_executor(None, partial(self.application.start, process))",
        "try:\n    self._save(intents)\nexcept Exception:\n    pass",
        "self.application.finalize(txn)",
    ],
)
def test_a_call_beside_the_helper_is_found(source):
    assert beside_the_helper(source)


@pytest.mark.parametrize(
    "source",
    [
        "names = call_each(mapping, messages)",
        "journal = call(self._key, message)",
        "try:\n    handle(txn, message)\nexcept BaseException as error:\n    raise Failed(error)",
        "sizes = list(map(len, contents))",
        "loop.run_in_executor(None, partial(contained, function))",
    ],
)
def test_a_call_through_the_helper_is_none(source):
    assert not beside_the_helper(source)


def test_exceptions_of_others_become_text_by_the_helper():
    """``f"{type(error).__name__}: {error}"`` is the pattern of a foreign exception's text."""
    root = Path(gazette_sdk.__file__).parent
    found = [
        str(path.relative_to(root))
        for room in ("message", "shard", "server", "framing")
        for path in sorted((root / room).rglob("*.py"))
        if "{type(error).__name__}: {error}" in path.read_text()
    ]
    assert not found, "use gazette_sdk.user_code.described"

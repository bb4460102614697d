"""Each duration in the code has its unit; each log message and error its subject or remedy."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import gazette_sdk
from gazette_sdk import errors
from gazette_sdk.message.publisher import Publisher
from gazette_sdk.message.receipt import BatchReceipt, Receipt
from gazette_sdk.transport import loop

ROOT = Path(gazette_sdk.__file__).parent
FILES = [path for path in sorted(ROOT.rglob("*.py")) if not path.name.endswith("_pb2.py")]

DURATION = re.compile(r"timeout|interval|delay", re.IGNORECASE)
UNIT = re.compile(r"_(s|ms|us|ns)(_(min|max))?$", re.IGNORECASE)
QUANTITY = re.compile(r"_(s|ms|us|ns|bytes)(_(min|max))?$", re.IGNORECASE)
UNIT_BEHIND = re.compile(r" ?(s|ms|us|ns|bytes|seconds|milliseconds)\b")

CONTRACT = "fixed by the contract: seconds, as in concurrent.futures"
WITHOUT_UNIT = {
    ("message/publisher.py", "timeout"): CONTRACT,
    ("message/receipt.py", "timeout"): CONTRACT,
    ("transport/loop.py", "timeout"): "public: seconds, as in concurrent.futures",
    ("adaptive_spin.py", "timeout"): "interface of selectors.BaseSelector",
    ("broker/append/append.py", "_delayed_chunks"): "a number of chunks, no duration",
    ("broker/append/append.py", "delayed_chunks"): "a number of chunks, no duration",
    ("broker/append/content.py", "delayed_chunks"): "a number of chunks, no duration",
    ("transport/stream/pool.py", "_dial_timeouts"): "asyncio.Timeout objects, no duration",
}
"""Names of durations without a unit, by module, with the reason."""

LOGS_WITHOUT_SUBJECT = {
    "goodbye": "recorded: the last line of a broker",
    "no journals were matched by the selector": "recorded: gazctl's own selector is the only one",
}
ERRORS_WITHOUT_SUBJECT = {
    "member key not found in Etcd": "recorded: a broker has one member key",
    "transaction checks did not succeed": "fixed by test vectors",
}
SUBJECTS = {"journal", "offset", "path", "spec"}
"""Keyword arguments of errors that name a subject, which is part of the text."""

SUBJECT_ADDED = {
    "ValidationError": "callers put the path of the field before the text",
    "StreamProtocolError": "names a frame; callers put the peer before the text",
}
"""Errors whose texts have their subject elsewhere."""

LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
ERRORS = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}


class Call(NamedTuple):
    """Call that logs, or that makes an error."""

    place: str
    name: str
    call: ast.Call

    @property
    def text(self) -> str | None:
        """The constant text; None for any other."""
        first = self.call.args[0] if self.call.args else None
        is_text = isinstance(first, ast.Constant) and isinstance(first.value, str)
        return first.value if is_text else None


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in FILES
    }


def _names(node: ast.AST) -> list[str]:
    """Return the names that a node introduces: parameters, variables, attributes."""
    if isinstance(node, ast.arg):
        return [node.arg]
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = [
            part
            for target in node.targets
            for part in (target.elts if isinstance(target, ast.Tuple) else [target])
        ]
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
        targets = [node.target]
    return [
        each.attr if isinstance(each, ast.Attribute) else each.id
        for each in targets
        if isinstance(each, (ast.Attribute, ast.Name))
    ]


def _durations_without_unit(module: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        for name in _names(node):
            if DURATION.search(name) and not UNIT.search(name):
                yield module, name


def _calls(trees: dict[str, ast.Module]) -> Iterator[Call]:
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                function = node.func
                place = f"{module}:{node.lineno}"
                if isinstance(function, ast.Name):
                    yield Call(place, function.id, node)
                elif isinstance(function, ast.Attribute):
                    is_log = function.attr in LEVELS and "log" in ast.unparse(function.value)
                    yield Call(place, "log" if is_log else function.attr, node)


def _keywords(call: ast.Call) -> set[str]:
    return {each.arg or "" for each in call.keywords}


def _names_remedy(text: str) -> bool:
    return ": " in text or "; " in text


def bare_logs(trees: dict[str, ast.Module]) -> list[str]:
    """Return log calls with a constant text that has neither values nor a remedy."""
    return [
        f"{each.place}: {each.text}"
        for each in _calls(trees)
        if each.name == "log"
        and each.text is not None
        and len(each.call.args) == 1
        and not _keywords(each.call) & {"extra", "exc_info"}
        and not _names_remedy(each.text)
        and each.text not in LOGS_WITHOUT_SUBJECT
    ]


def bare_errors(trees: dict[str, ast.Module]) -> list[str]:
    """Return errors with a constant text that has neither a subject nor a remedy."""
    return [
        f"{each.place}: {each.text}"
        for each in _calls(trees)
        if each.name in ERRORS - SUBJECT_ADDED.keys()
        and each.text is not None
        and not _keywords(each.call) & SUBJECTS
        and not _names_remedy(each.text)
        and each.text not in ERRORS_WITHOUT_SUBJECT
    ]


def _name_of(value: ast.expr) -> str:
    """Return the last name of an expression: of a variable, an attribute."""
    if isinstance(value, ast.Attribute):
        return value.attr
    return value.id if isinstance(value, ast.Name) else ""


def _values_without_unit(text: ast.expr, arguments: list[ast.expr]) -> Iterator[str]:
    """Yield quantities in a message, behind which no unit stands."""
    if isinstance(text, ast.JoinedStr):
        parts = [*text.values, ast.Constant("")]
        before = ""
        for value, after in itertools.pairwise(parts):
            if isinstance(value, ast.FormattedValue):
                name = _name_of(value.value)
                is_argument = before.endswith("=")  # the argument's own name has the unit
                behind = str(after.value) if isinstance(after, ast.Constant) else ""
                if QUANTITY.search(name) and not is_argument and not UNIT_BEHIND.match(behind):
                    yield name
            before = str(value.value) if isinstance(value, ast.Constant) else ""
    elif isinstance(text, ast.Constant) and isinstance(text.value, str):
        places = re.finditer(r"%[-+.0-9]*[a-z]", text.value)
        for place, argument in zip(places, arguments, strict=False):
            name = _name_of(argument)
            if QUANTITY.search(name) and not UNIT_BEHIND.match(text.value[place.end() :]):
                yield name


def quantities_without_unit(trees: dict[str, ast.Module]) -> list[str]:
    """Return durations and sizes in log messages and errors, behind which no unit stands."""
    return [
        f"{each.place}: {name}"
        for each in _calls(trees)
        if each.call.args and (each.name == "log" or each.name in ERRORS)
        for name in _values_without_unit(each.call.args[0], each.call.args[1:])
    ]


def test_each_parameter_and_constant_of_a_duration_has_its_unit_in_its_name(trees):
    found = {
        each for module, tree in trees.items() for each in _durations_without_unit(module, tree)
    }
    assert found - WITHOUT_UNIT.keys() == set()
    assert WITHOUT_UNIT.keys() - found == set(), "these are mended: take them off the list"


@pytest.mark.parametrize(
    "function",
    [
        Receipt.result,
        BatchReceipt.result,
        Publisher.flush,
        Publisher.close,
        loop.run,
    ],
    ids=lambda function: function.__qualname__,
)
def test_a_public_timeout_without_its_unit_names_it_in_its_docstring(function):
    assert "timeout" in inspect.signature(function).parameters
    assert re.search(r"timeout:[^:]*\bseconds\b", inspect.getdoc(function) or ""), function


def test_each_log_message_has_a_value_or_a_remedy(trees):
    assert bare_logs(trees) == []


def test_each_error_has_a_subject_or_a_remedy(trees):
    assert bare_errors(trees) == []


def test_durations_and_sizes_in_messages_have_their_units(trees):
    assert quantities_without_unit(trees) == []


def test_a_message_that_breaks_the_rules_is_found():
    bad = {
        "bad.py": ast.parse(
            "def wait(timeout): pass\n"
            "RETRY_INTERVAL = 3\n"
            "_log.warning('gone')\n"
            "raise ClosedError('gone')\n"
            "raise CallError(f'no answer in {timeout_s}: try again')\n"
            "_log.info('waiting for %.1f: patience', self.timeout_s)\n"
        )
    }
    assert {name for _, name in _durations_without_unit("bad.py", bad["bad.py"])} == {
        "timeout",
        "RETRY_INTERVAL",
    }
    assert bare_logs(bad) == ["bad.py:3: gone"]
    assert bare_errors(bad) == ["bad.py:4: gone"]
    assert quantities_without_unit(bad) == ["bad.py:5: timeout_s", "bad.py:6: timeout_s"]

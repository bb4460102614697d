"""What packages export is what they say they export."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import gazette_sdk
from gazette_sdk.errors import GazetteError

CONTRACT = {
    "Envelope",
    "GazetteError",
    "JsonMessage",
    "Publisher",
    "Reader",
    "connect",
    "framing",
    "mapping",
}


@pytest.mark.parametrize(
    "name", ["gazette_sdk", "gazette_sdk.framing", "gazette_sdk.message", "gazette_sdk.testing"]
)
def test_exports_are_sorted_and_there(name):
    package = importlib.import_module(name)
    constants = [each for each in package.__all__ if each.isupper()]
    classes = [each for each in package.__all__ if each[0].isupper() and not each.isupper()]
    others = [each for each in package.__all__ if not each[0].isupper()]
    assert package.__all__ == [*sorted(constants), *sorted(classes), *sorted(others)]
    for each in package.__all__:
        assert hasattr(package, each)


def test_the_names_of_the_contract_are_exported():
    assert set(gazette_sdk.__all__) >= CONTRACT


def test_the_mappings_of_the_contract_are_offered():
    for name in ("modulo", "rendezvous", "random", "direct"):
        assert callable(getattr(gazette_sdk.mapping, name))
    assert callable(gazette_sdk.framing.register)


def test_every_error_is_a_gazette_error():
    errors = importlib.import_module("gazette_sdk.errors")
    for name in errors.__all__:
        found = getattr(errors, name)
        if isinstance(found, type):
            assert issubclass(found, GazetteError)


def test_importing_the_package_starts_nothing():
    program = (
        "import threading, gazette_sdk\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)

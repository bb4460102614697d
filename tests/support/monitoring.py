"""Rules and dashboards of ``gazette monitoring write``, and promtool, which checks them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gazette_sdk.cli.monitoring import written_files
from support.services import promtool

TIMEOUT_S = 60


def rules(name: str) -> list[dict[str, Any]]:
    """The rules of a file."""
    groups = yaml.safe_load(written_files()[name])["groups"]
    return [rule for group in groups for rule in group["rules"]]


def recorded() -> set[str]:
    """Names of recorded series."""
    return {
        rule["record"]
        for name in ("rules.yml", "slo.yml")
        for rule in rules(name)
        if "record" in rule
    }


def alerts() -> dict[str, dict[str, Any]]:
    """Alerts by name, the option's, too."""
    every = [*rules("alerts.yml"), *rules("slo.yml")]
    return {rule["alert"]: rule for rule in every if "alert" in rule}


def panels(name: str) -> list[dict[str, Any]]:
    """Panels of a dashboard, without its rows."""
    found = json.loads(written_files()[name])["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def expressions(name: str) -> Iterator[str]:
    """Yield the expressions of a file of rules or a dashboard, with values for its variables."""
    if name.endswith(".yml"):
        for rule in rules(name):
            yield rule["expr"]
        return
    for panel in panels(name):
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "5m")
            for variable in ("cluster", "zone", "topic", "application"):
                expression = expression.replace(f"${variable}", ".*")
            assert "$" not in expression, expression
            yield expression


def said_by_promtool(
    directory: Path, *arguments: str, stdin: str = "", must_succeed: bool = False
) -> str:
    """Return the output of promtool. Without it a test is skipped, and fails in CI."""
    try:
        program = promtool()
    except RuntimeError as missing:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(missing))
    done = subprocess.run(
        [program, *arguments],
        cwd=directory,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0 or not must_succeed, said
    return said


def checked_by_promtool(directory: Path, *arguments: str) -> str:
    """Return the output of promtool for good files.

    Raises:
        AssertionError: they are not good.
    """
    return said_by_promtool(directory, *arguments, must_succeed=True)

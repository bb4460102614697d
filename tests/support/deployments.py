"""Contents of the files below ``deploy/``, and the options that they may use."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"

TIMEOUT_S = 60.0


@cache
def help_of(*command: str) -> str:
    """Return the help of a command of ``gazette``."""
    return subprocess.run(
        [sys.executable, "-m", "gazette_sdk.cli.gazette", *command, "--help"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    ).stdout


def flags_of(*command: str) -> set[str]:
    """Return the flags of a command, with their dashes."""
    return set(re.findall(r"^  (--[a-z][a-z.-]*)", help_of(*command), re.MULTILINE))


def variables_of(*command: str) -> set[str]:
    """Return the environment variables that a command reads as options."""
    return set(re.findall(r"\[\$([A-Z_]+)\]", help_of(*command)))


def environment_of(lines: Iterable[str], *, commented: bool = False) -> dict[str, str]:
    """Return the variables of lines ``NAME=value``.

    Args:
        lines: the lines.
        commented: also those of comments, which are examples.
    """
    pattern = re.compile(r"#?([A-Z_]+)=(.*)" if commented else r"([A-Z_]+)=(.*)")
    return dict(found.groups() for line in lines if (found := pattern.fullmatch(line)))


def script(name: str) -> ModuleType:
    """Return a Python program of ``scripts/`` as a module."""
    loader = importlib.machinery.SourceFileLoader(
        name.replace("-", "_"), str(ROOT / "scripts" / name)
    )
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def objects_of(text: str) -> list[dict[str, Any]]:
    """Return the objects of a rendered set."""
    return [each for each in yaml.safe_load_all(text) if each]


@dataclass(frozen=True)
class Workload:
    """An object that makes pods, and the template of its pods.

    Attributes:
        source: the object.
        labels: of its pods.
        pod: specification of its pods.
    """

    source: dict[str, Any]
    labels: dict[str, str]
    pod: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.source['kind']}/{self.source['metadata']['name']}"

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [*self.pod.get("initContainers", []), *self.pod["containers"]]

    @property
    def serves(self) -> bool:
        """True unless its pods end by themselves."""
        return self.source["kind"] in {"StatefulSet", "Deployment"}

    def ports(self) -> dict[str, int]:
        """Return the named ports of its pods."""
        return {
            port["name"]: port["containerPort"]
            for container in self.containers
            for port in container.get("ports", [])
        }


def workloads_of(objects: Iterable[dict[str, Any]]) -> Iterator[Workload]:
    """Yield the objects that make pods."""
    for each in objects:
        spec = each.get("spec", {})
        if each["kind"] == "CronJob":
            spec = spec["jobTemplate"]["spec"]
        if "template" in spec:
            template = spec["template"]
            yield Workload(each, template["metadata"]["labels"], template["spec"])


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    """Return True if a selector by labels selects pods with these labels."""
    return selector.items() <= labels.items()

"""Hook of the wheel's build: refuses to go without the libraries of the console."""

import hashlib
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class LibrariesHook(BuildHookInterface):
    """Check of the libraries' SHA-256. An editable installation may lack them."""

    def initialize(self, version: str, build_data: dict[str, object]) -> None:  # noqa: ARG002
        """Check the files before they are packed."""
        if version == "editable":
            return
        static = Path(self.root, "gazette_sdk", "console", "static")
        for line in (static / "libraries.sha256").read_text().splitlines():
            digest, name = line.split()
            path = static / name
            if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
                raise SystemExit(f"{path} is missing or changed: run scripts/console-libraries")

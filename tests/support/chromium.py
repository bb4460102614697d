"""Chromium for tests, without a window. ``scripts/setup dev`` installs it on Debian."""

from __future__ import annotations

import shutil
import subprocess
import tempfile

LOAD_TIMEOUT_S = 60.0
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_OPTIONS = (
    "--headless",
    "--no-sandbox",  # of the operating system, which root has not
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


def program() -> str | None:
    """Return the path of Chromium, or None where it is not installed."""
    return next(filter(None, map(shutil.which, _PROGRAMS)), None)


def loaded_page(url: str) -> str:
    """Load a page with a profile of its own; return its document as it is afterwards, as HTML."""
    found = program()
    if found is None:
        raise FileNotFoundError("Chromium is not installed; run scripts/setup dev")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [found, *_OPTIONS, f"--user-data-dir={profile}", "--dump-dom", url]
        return subprocess.run(
            command,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=LOAD_TIMEOUT_S,
        ).stdout.decode()

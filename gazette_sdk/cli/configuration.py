"""``print-config``: the effective configuration as an INI file."""

from __future__ import annotations

import sys

from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.settings import PRINT_CONFIG
from gazette_sdk.server.options import load, print_config

__all__ = ["run"]


def run(invocation: Invocation) -> None:
    """Write the configuration to standard output (cli section 1.5)."""
    shown = [(group, load(group, invocation.sources, partial=True)) for group in invocation.known]
    show_secrets = invocation.settings(PRINT_CONFIG).show_secrets
    sys.stdout.write(print_config(shown, show_secrets=show_secrets))

"""A Python program with faulty fragment stores, such as a broker in a process of its own.

::

    python -m gazette_sdk.testing.faulty_process faults.json gazette_sdk.cli.gazette serve ...

The file is written by :func:`gazette_sdk.testing.store_faults.save_store_faults`. It may be
replaced while the program runs: the next operation of a store follows it.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from gazette_sdk.errors import ConfigurationError, GazetteError
from gazette_sdk.testing.store_faults import StoreFaultInjector


def main(arguments: list[str]) -> None:
    """Run a module as a program, with faulty stores. The program's exit status is this one's.

    Args:
        arguments: the settings file, the module's name, and the program's arguments.

    Raises:
        ConfigurationError: an argument is missing, or the file has no settings.
    """
    if len(arguments) < 2:
        raise ConfigurationError(
            "there is nothing to run: give a settings file, a module, and the program's arguments"
        )
    path, module, *_ = arguments
    sys.argv = arguments[1:]  # the program's name is replaced by its file's
    with StoreFaultInjector.following(Path(path)).installed():
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except GazetteError as error:
        sys.exit(str(error))

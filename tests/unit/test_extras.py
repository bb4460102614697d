"""Errors of packages that are not installed name their extra, wherever a user meets them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gazette_sdk.errors import ConfigurationError, MissingPackageError, needs_extra

MAIN = "from gazette_sdk.cli.{} import main; sys.argv[1:] = {!r}.split(); sys.exit(main())"

IN_PYTHON = [
    ("from gazette_sdk.shard import RocksStore", "rocksdict", "shards"),
    ("from gazette_sdk.shard import SqlStore", "sqlalchemy", "shards"),
    ("from gazette_sdk.shard import EmbeddedConsumer", "google_crc32c", "shards"),
    ("import gazette_spark", "pyspark", "spark"),
    (
        "from gazette_sdk import Reader; Reader(dict, 'name=a/b').arrow()",
        "pyarrow",
        "arrow",
    ),
    (
        "from gazette_sdk.fragment.stores import open_store; open_store('s3://a/b/')",
        "s3fs",
        "s3",
    ),
]

IN_A_TERMINAL = [
    (MAIN.format("gazette", "run-consumer this:app"), "google_crc32c", "shards"),
    (MAIN.format("gazette", "spark transactions list"), "pyspark", "spark"),
    (MAIN.format("gazette", "spark transactions complete a-writer"), "pyspark", "spark"),
    (MAIN.format("gazctl", "shards prune --dry-run -l a=b"), "google_crc32c", "shards"),
]


def run_without(package: str, program: str) -> subprocess.CompletedProcess[str]:
    program = f"import sys; sys.modules[{package!r}] = None; {program}"
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("program", "package", "extra"), IN_PYTHON)
def test_an_import_names_the_extra(program, package, extra):
    done = run_without(package, program)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert repr(package) in last
    assert f'run `pip install "gazette-sdk[{extra}]"`' in last


@pytest.mark.parametrize(("program", "package", "extra"), IN_A_TERMINAL)
def test_a_command_names_the_extra_in_one_line(program, package, extra):
    done = run_without(package, program)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert repr(package) in line
    assert f"gazette-sdk[{extra}]" in line  # a server's line is logfmt, with \" for "


def test_the_error_is_an_import_error_too():
    with pytest.raises(MissingPackageError, match="columns need") as caught:  # noqa: SIM117
        with needs_extra("arrow", "columns"):
            raise ModuleNotFoundError("no such thing", name="pyarrow.json")
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, ConfigurationError)
    assert "'pyarrow'" in str(caught.value)


def test_other_errors_pass():
    with pytest.raises(ImportError, match="of another kind") as caught:  # noqa: SIM117
        with needs_extra("arrow", "columns"):
            raise ImportError("of another kind")
    assert not isinstance(caught.value, MissingPackageError)

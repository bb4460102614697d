"""Tables of the documentation agree with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gazette_sdk.protocol.names import _COMMON_ARGUMENTS, _S3_ARGUMENTS, STORE_SCHEMES
from gazette_sdk.transport.connect import _SCHEMES
from gazette_spark.options import KNOWN
from gazette_spark.write_options import KNOWN as WRITE_KNOWN
from support.made_tables import PACKAGE, renewed, tables
from support.pages import ROOT, pages

DOCS = ROOT / "docs"


@pytest.mark.parametrize("page", tables(), ids=lambda page: page.name)
def test_tables_made_of_the_code_are_up_to_date(page: Path):
    hint = "run `python tests/support/made_tables.py`"
    assert renewed(page) == page.read_text(encoding="utf-8"), hint


def test_every_scheme_of_connect_is_documented():
    text = (DOCS / "transports.md").read_text(encoding="utf-8")
    assert [scheme for scheme in _SCHEMES if f"`{scheme}://" not in text] == []


def test_every_store_and_every_argument_of_its_url_is_documented():
    text = (DOCS / "stores.md").read_text(encoding="utf-8")
    assert [scheme for scheme in STORE_SCHEMES if f"`{scheme}://" not in text] == []
    arguments = _COMMON_ARGUMENTS | _S3_ARGUMENTS
    assert [name for name in sorted(arguments) if f"`{name}`" not in text] == []


def test_every_option_of_the_spark_source_is_documented():
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "spark.md").read_text("utf-8"), re.MULTILINE)
    documented = {name.lower() for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert documented >= {name.lower() for name in KNOWN} | WRITE_KNOWN


def test_every_benchmark_is_documented():
    text = (DOCS / "performance.md").read_text(encoding="utf-8")
    programs = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py"))
    assert programs
    assert [name for name in programs if f"`{name}`" not in text] == []


def test_every_file_that_the_architecture_names_exists():
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`([\w/]+/\w+\.py)`", text))
    assert names
    rooms = [ROOT, PACKAGE, *(PACKAGE / room for room in ("broker", "transport"))]
    missing = [name for name in names if not any((room / name).is_file() for room in rooms)]
    assert missing == []


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text("utf-8"))
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_page_begins_with_an_example():
    for page in pages():
        if page.parent != DOCS or page.name in {"index.md", "changelog.md", "contributing.md"}:
            continue
        lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.strip()]
        fences = [number for number, line in enumerate(lines) if line.startswith("```")]
        assert fences, page.name
        assert fences[0] <= 8, f"{page.name} has its first example far down"

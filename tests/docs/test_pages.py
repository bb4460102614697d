"""Every example of the documentation is run, against a real cluster without journals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gazette_sdk.embedded import EmbeddedCluster
from support.pages import PageRun, blocks_of, commands_of, page_id, pages

pytest_plugins = ["support.spark"]

FIRST_HOURS = ("application.md", "tutorial.md")
"""Pages whose blocks ``test_first_hour`` runs in the same way, with the built wheel."""

PAGES = [
    pytest.param(
        page, id=page_id(page), marks=[pytest.mark.long] if page_id(page) in FIRST_HOURS else []
    )
    for page in pages()
]


@pytest.mark.timeout(600)  # Spark starts many processes, which takes minutes on a busy machine
@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_run_in_order(
    page: Path,
    gazette_cluster: Callable[[int], EmbeddedCluster],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
):
    blocks = blocks_of(page)
    runnable = [
        block
        for block in blocks
        if block.language in {"python", "console", "yaml"} and block.marker != "not run"
    ]
    if not runnable:
        return
    if any("pyspark" in block.text for block in runnable):
        request.getfixturevalue("spark")  # with its settings, before the page gets it
    cluster = gazette_cluster(1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with PageRun(page, cluster.address, cluster.etcd_endpoint, tmp_path) as run:
        for block in blocks:
            try:
                run.run(block)
            except BaseException as error:
                error.add_note(f"in the block at {block.where}")
                raise
        run.finish()


def test_blocks_that_are_not_run_say_why(record_property: Callable[[str, object], None]):
    left_out = [block for page in pages() for block in blocks_of(page) if block.marker == "not run"]
    for block in left_out:
        print(f"{block.where}: {block.language} block is not run: {block.reason}")
        record_property("not run", f"{block.where}: {block.reason}")
        assert block.reason, block.where


def test_commands_are_found_behind_prompts_and_without_them():
    assert commands_of("$ one \\\n  two\nprinted\n$ three\n") == "one \\\n  two\nthree\n"
    assert commands_of("one\ntwo\n") == "one\ntwo\n"

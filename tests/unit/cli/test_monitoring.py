"""Alerts, rules and dashboards: their files, and what belongs to each."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import yaml
from prometheus_client import REGISTRY

from gazette_sdk.cli.gazctl import GAZCTL
from gazette_sdk.cli.gazette import GAZETTE
from gazette_sdk.cli.monitoring import RUNBOOKS, written_files
from gazette_sdk.server.metrics import metrics_text
from support.monitoring import (
    alerts,
    checked_by_promtool,
    expressions,
    panels,
    recorded,
    rules,
    said_by_promtool,
)
from support.pages import ROOT, blocks_of

BOARDS = sorted(name for name in written_files() if name.endswith(".json"))
SEVERITIES = {"page", "warning"}


def test_files_are_written_and_left_alone_where_they_are_the_same(tmp_path, capsys):
    target = tmp_path / "a" / "b"
    assert GAZETTE.main(["monitoring", "write", str(target)]) == 0
    assert {
        str(path.relative_to(target)): path.read_text() for path in target.rglob("*.*")
    } == written_files()
    (target / "rules.yml").write_text("changed")
    capsys.readouterr()
    assert GAZETTE.main(["monitoring", "write", str(target)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.endswith(": written")] == [
        f"{target}/rules.yml: written"
    ]
    assert len(lines) == len(written_files())


def test_a_directory_that_cannot_be_written_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert GAZETTE.main(["monitoring", "write", str(tmp_path / "file")]) == 1
    assert f"{tmp_path}/file/alerts.yml cannot be written" in capsys.readouterr().err


def test_alerts_link_to_another_page_of_runbooks_if_wanted(tmp_path):
    target = str(tmp_path)
    assert GAZETTE.main(["monitoring", "write", target, "--runbooks", "https://wiki/gazette"]) == 0
    text = (tmp_path / "alerts.yml").read_text()
    assert "runbook_url: https://wiki/gazette#gazettebrokerdown" in text
    assert RUNBOOKS not in text


def test_the_repository_shows_the_files_of_the_package():
    shown = ROOT / "monitoring"
    assert {
        str(path.relative_to(shown)): path.read_text() for path in shown.rglob("*.*")
    } == written_files()


def test_dashboards_are_as_the_script_makes_them():
    script = ROOT / "scripts" / "dashboards.py"
    spec = importlib.util.spec_from_file_location("dashboards", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    hint = "run `python scripts/dashboards.py`"
    made = {f"dashboards/{name}": text for name, text in module.boards().items()}
    assert made == {name: written_files()[name] for name in BOARDS}, hint


def test_there_are_four_dashboards_with_their_variables_and_not_too_many_panels():
    assert len(BOARDS) == 4
    for name in BOARDS:
        board = yaml.safe_load(written_files()[name])
        variables = [each["name"] for each in board["templating"]["list"]]
        assert variables == ["datasource", "cluster", "zone", "topic", "application"]
        assert 5 <= len(panels(name)) <= 25, name
        for panel in panels(name):
            assert panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert [target["refId"] for target in panel["targets"]] == list(
                "ABCD"[: len(panel["targets"])]
            )


@pytest.mark.parametrize("name", alerts())
def test_each_alert_has_a_severity_a_summary_and_a_runbook(name: str):
    alert = alerts()[name]
    assert alert["labels"]["severity"] in SEVERITIES
    assert alert["annotations"]["summary"].endswith(".")
    anchor = alert["annotations"]["runbook_url"].removeprefix(RUNBOOKS)
    text = (ROOT / "docs" / "runbooks.md").read_text("utf-8")
    headings = [line[3:].lower() for line in text.splitlines() if line.startswith("## ")]
    assert anchor in headings


def test_each_runbook_has_its_parts_and_three_commands():
    text = (ROOT / "docs" / "runbooks.md").read_text("utf-8")
    books = dict(
        zip(*[iter(re.split(r"^## (Gazette\w+)$", text, flags=re.MULTILINE)[1:])] * 2, strict=True)
    )
    assert set(books) == {name for name in alerts() if "Budget" not in name}
    for name, book in books.items():
        for part in ("Symptom", "Likely causes", "Commands", "Do not"):
            assert f"**{part}.**" in book, (name, part)
        commands = [line for line in book.splitlines() if line.startswith("$ ")]
        assert len(commands) == 3, name


@pytest.mark.parametrize("name", sorted(written_files()))
def test_every_expression_is_one_that_prometheus_accepts(name: str, tmp_path: Path):
    wrapped = [
        {"record": f"tested:expression_{number}", "expr": each}
        for number, each in enumerate(expressions(name))
    ]
    described = {"groups": [{"name": "tested", "rules": wrapped}]}
    (tmp_path / "wrapped.yml").write_text(yaml.safe_dump(described))
    said = checked_by_promtool(tmp_path, "check", "rules", "wrapped.yml")
    assert f"{len(wrapped)} rules found" in said


@pytest.mark.parametrize("name", ["alerts.yml", "rules.yml", "slo.yml"])
def test_files_of_rules_are_good(name: str, tmp_path: Path):
    (tmp_path / name).write_text(written_files()[name])
    said = checked_by_promtool(tmp_path, "check", "rules", name)
    assert f"{len(rules(name))} rules found" in said


def test_the_configuration_of_the_page_is_good(tmp_path: Path):
    [block] = [
        each for each in blocks_of(ROOT / "docs" / "monitoring.md") if each.language == "yaml"
    ]
    assert GAZETTE.main(["monitoring", "write", str(tmp_path / "monitoring")]) == 0
    (tmp_path / block.file_name).write_text(block.text)
    said = checked_by_promtool(tmp_path, "check", "config", block.file_name)
    assert "17 rules found" in said


def test_commands_of_runbooks_are_those_of_the_programs():
    """Their options are taken by the commands. Nothing is run."""
    found = 0
    for block in blocks_of(ROOT / "docs" / "runbooks.md"):
        for line in block.text.splitlines():
            program, *words = shlex.split(line.removeprefix("$ "))
            known = {"gazctl": GAZCTL, "gazette": GAZETTE}.get(program)
            if known is None:
                continue
            [command] = [
                each
                for each in known.commands
                if words[: len(each.name.split())] == each.name.split()
            ]
            options = {f"--{option.long}" for group in command.groups for option in group.options}
            options |= {"--timeout"}
            assert {word for word in words if word.startswith("--")} <= options, line
            found += 1
    assert found >= 25


def test_every_recorded_series_that_is_used_is_recorded():
    every = "\n".join(each for name in written_files() for each in expressions(name))
    used = set(re.findall(r"\b\w+:gazette_\w+:\w+", every))
    assert used <= recorded()


def test_names_of_metrics_are_as_prometheus_wants_them_but_for_those_of_gazette():
    """Names without `_total`, or with `_totals`, are those of Gazette's own dashboards."""
    import gazette_sdk.broker.api.served  # noqa: PLC0415 - registers the metrics
    import gazette_sdk.shard.consumer.embedded  # noqa: F401, PLC0415

    assert REGISTRY
    found = checked_metrics(metrics_text())
    assert found <= {
        "gazette_journal_server_started_totals",
        "gazette_journal_server_completed_totals",
        "gazette_sequencer_queued",
        "gazette_sequencer_replay",
        "gazette_store_list_items_count",
    }


def checked_metrics(text: str) -> set[str]:
    """Names of which promtool complains."""
    said = said_by_promtool(Path(), "check", "metrics", stdin=text)
    return {found[1] for line in said.splitlines() if (found := re.match(r"(gazette_\w+) ", line))}

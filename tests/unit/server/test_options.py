from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.server.options import (
    Group,
    Option,
    Seconds,
    Settings,
    Sources,
    find_ini,
    load,
    parse_arguments,
    parse_ini,
    print_config,
    public_values,
)


class Values(Settings):
    name: Annotated[str, Option("Name", "A text", short="n")] = "default"
    count: Annotated[int, Option("Count", "An integer"), Field(ge=0)] = 1
    ratio: Annotated[float, Option("Ratio", "A number")] = 0.5
    wait_s: Annotated[Seconds, Option("WaitTime", "A duration")] = 20.0
    dry_run: Annotated[bool, Option("DryRun", "A flag")] = False
    kind: Annotated[Literal["red", "blue"], Option("Kind", "A choice")] = "red"
    many: Annotated[tuple[str, ...], Option("Many", "A list", short="L")] = ()
    auth_key: Annotated[str, Option("AuthKey", "A secret")] = ""
    only_flag: Annotated[str, Option("OnlyFlag", "Not in files", in_ini=False)] = ""


GROUP = Group("Things.list", Values, prefix="thing.", env_prefix="THING_")


def layers(
    arguments: list[str] | None = None,
    ini: str | None = None,
    environ: dict[str, str] | None = None,
) -> Sources:
    return Sources(
        parse_arguments([GROUP], arguments or []).values,
        parse_ini(ini, Path("things.ini")) if ini is not None else None,
        environ or {},
    )


def test_names_follow_from_the_table():
    assert [(bound.long, bound.env, bound.kind) for bound in GROUP.options] == [
        ("thing.name", "THING_NAME", "text"),
        ("thing.count", "THING_COUNT", "integer"),
        ("thing.ratio", "THING_RATIO", "number"),
        ("thing.wait", "THING_WAIT", "duration"),
        ("thing.dry-run", "THING_DRY_RUN", "flag"),
        ("thing.kind", "THING_KIND", "choice"),
        ("thing.many", "THING_MANY", "list"),
        ("thing.auth-key", "THING_AUTH_KEY", "text"),
        ("thing.only-flag", "THING_ONLY_FLAG", "text"),
    ]


@pytest.mark.parametrize(
    ("field", "argument", "ini", "environment", "values"),
    [
        ("name", "--thing.name=c", "Name = i", ("THING_NAME", "e"), ["c", "i", "e", "default"]),
        ("count", "--thing.count=3", "Count = 2", ("THING_COUNT", "5"), [3, 2, 5, 1]),
        ("ratio", "--thing.ratio=3", "Ratio = 2", ("THING_RATIO", "5"), [3.0, 2.0, 5.0, 0.5]),
        (
            "wait_s",
            "--thing.wait=1m30s",
            "WaitTime = 500ms",
            ("THING_WAIT", "1h"),
            [90, 0.5, 3600, 20],
        ),
        (
            "dry_run",
            "--thing.dry-run",
            "DryRun = true",
            ("THING_DRY_RUN", "1"),
            [True, True, True, False],
        ),
        (
            "kind",
            "--thing.kind=blue",
            "Kind = blue",
            ("THING_KIND", "blue"),
            ["blue"] * 3 + ["red"],
        ),
        (
            "many",
            "-La",
            "Many = b\nMany = c",
            ("THING_MANY", "d,e"),
            [("a",), ("b", "c"), ("d,e",), ()],
        ),
    ],
)
def test_the_command_line_beats_the_file_beats_the_environment(
    field, argument, ini, environment, values
):
    section = f"[Things.list]\n{ini}\n"
    environ = dict([environment])
    given = [
        layers([argument], section, environ),
        layers(ini=section, environ=environ),
        layers(environ=environ),
        layers(),
    ]
    assert [getattr(load(GROUP, sources), field) for sources in given] == values


@pytest.mark.parametrize("key", ["Name", "thing.name", "n"])
@pytest.mark.parametrize("section", ["Things.list", "things.LIST"])
def test_a_file_names_options_in_three_ways_in_any_case_of_the_section(key, section):
    assert load(GROUP, layers(ini=f"[{section}]\n{key}=x\n")).name == "x"


def test_values_of_a_group_do_not_depend_on_other_entries():
    ini = "[Other]\nName = wrong\n[Things.list]\nUnknown = 1\nOnlyFlag = no\nname = lower case\n"
    values = load(GROUP, layers(ini=ini))
    assert (values.name, values.only_flag) == ("default", "")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--thing.name", "a"], {"thing.name": ["a"]}),
        (["--thing.name=a=b"], {"thing.name": ["a=b"]}),
        (["--thing.name="], {"thing.name": [""]}),
        (["-n", "a"], {"thing.name": ["a"]}),
        (["-na"], {"thing.name": ["a"]}),
        (["-n=a"], {"thing.name": ["a"]}),
        (["-n", "-x"], {"thing.name": ["-x"]}),
        (["-La", "-L", "b"], {"thing.many": ["a", "b"]}),
        (["--thing.dry-run"], {"thing.dry-run": ["true"]}),
    ],
)
def test_options_are_written_in_every_usual_way(arguments, expected):
    assert parse_arguments([GROUP], arguments).values == expected


def test_arguments_that_are_no_options_are_kept_in_order():
    parsed = parse_arguments(
        [GROUP], ["one", "--thing.name", "a", "two", "-", "--", "-n", "--help"]
    )
    assert parsed.positional == ["one", "two", "-", "-n", "--help"]
    assert not parsed.wants_help
    assert parse_arguments([GROUP], ["one", "-h"]).wants_help


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--thing.nope"], "unknown option --thing.nope"),
        (["-x"], "unknown option -x"),
        (["--thing.dry-run=true"], "flag: it takes no value"),
        (["--thing.name"], "needs a value"),
    ],
)
def test_a_wrong_command_line_is_explained(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        parse_arguments([GROUP], arguments)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (layers(["--thing.count", "x"]), "--thing.count: 'x' is no integer"),
        (layers(["--thing.count", "-1"]), "--thing.count: -1 is less than 0, the least allowed"),
        (layers(["--thing.wait", "20"]), r"--thing.wait: not a duration"),
        (
            layers(ini="[Things.list]\nKind = green"),
            r"things.ini \[Things.list\] Kind: .*red, blue",
        ),
        (
            layers(environ={"THING_DRY_RUN": "perhaps"}),
            "environment variable THING_DRY_RUN: 'perhaps' is no boolean",
        ),
    ],
)
def test_a_wrong_value_is_named_with_where_it_was_given(sources, message):
    with pytest.raises(ConfigurationError, match=message):
        load(GROUP, sources)


def test_a_required_option_may_be_given_anywhere():
    class Needs(Settings):
        path: Annotated[str, Option("Path", "Required")]

    group = Group("Needs", Needs)
    with pytest.raises(ConfigurationError, match="required option --path was not given"):
        load(group, Sources())
    assert load(group, Sources(ini=parse_ini("[needs]\nPath=x", Path("x.ini")))).path == "x"


@pytest.mark.parametrize(
    "values",
    [
        Values(),
        Values(name="x", count=7, ratio=2.5, wait_s=90, dry_run=True, kind="blue", many=("a", "b")),
        Values(name='  spaces and "quotes" ', many=("line\nbreak", "; no comment", '"')),
        Values(name=""),
    ],
)
def test_a_printed_configuration_has_the_same_effect_when_loaded(values):
    printed = print_config([(GROUP, values)], show_secrets=True)
    assert load(GROUP, layers(ini=printed)) == values


def test_defaults_are_printed_as_comments():
    assert print_config([(GROUP, Values(count=2, many=("a", "b")))]).splitlines()[:8] == [
        "[Things.list]",
        "; A text",
        "; Name = default",
        "",
        "; An integer",
        "Count = 2",
        "",
        "; A number",
    ]


def test_secrets_are_printed_only_when_asked_for():
    values = Values(auth_key="c2VjcmV0")
    assert "c2VjcmV0" not in repr(values)
    assert "auth_key=''" in repr(Values())
    printed = print_config([(GROUP, values)])
    assert "c2VjcmV0" not in printed
    assert load(GROUP, layers(ini=printed)).auth_key == ""
    assert "AuthKey = c2VjcmV0" in print_config([(GROUP, values)], show_secrets=True)
    assert public_values(GROUP, values)["AuthKey"] == "…"
    assert public_values(GROUP, Values())["AuthKey"] == ""


# --------------------------------------------------------------------- files


def test_the_first_existing_file_is_the_only_one(tmp_path):
    first, second, third = (tmp_path / name for name in "abc")
    second.mkdir()
    third.mkdir()
    (second / "x.ini").write_text("[S]\nA = 2\n")
    (third / "x.ini").write_text("[S]\nA = 3\nB = 3\n")
    ini = find_ini("x.ini", [first, second, third])
    assert ini is not None
    assert [entry[:3] for entry in ini.entries] == [("s", "A", "2")]
    assert find_ini("y.ini", [first, second]) is None


def test_an_ini_file_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "x.ini").write_bytes(b"\xef\xbb\xbf[s]\r\nA = b\r\n")
    assert [entry[:3] for entry in find_ini("x.ini", [tmp_path]).entries] == [("s", "A", "b")]


def test_files_are_looked_for_here_and_at_home(tmp_path, monkeypatch):
    home = tmp_path / "home" / ".config" / "gazette"
    home.mkdir(parents=True)
    (home / "x.ini").write_text("[S]\nA = home\n")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert [entry[:3] for entry in find_ini("x.ini").entries] == [("s", "A", "home")]
    (tmp_path / "x.ini").write_text("[S]\nA = here\n")
    assert [entry[:3] for entry in find_ini("x.ini").entries] == [("s", "A", "here")]


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    (tmp_path / "x.ini").mkdir()
    with pytest.raises(ConfigurationError, match="cannot be read"):
        find_ini("x.ini", [tmp_path])


def test_comments_quotes_and_repetitions():
    text = """
        # a comment
        ; another
        [One]
        A = 1
        A=2
        B = "quoted ; # \\"text\\" \\n"
        C =
        D = a = b ; kept
    """
    assert [entry[:3] for entry in parse_ini(text, Path("x.ini")).entries] == [
        ("one", "A", "1"),
        ("one", "A", "2"),
        ("one", "B", 'quoted ; # "text" \n'),
        ("one", "C", ""),
        ("one", "D", "a = b ; kept"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[One\n", r"x.ini:1: a section ends"),
        ("[One]\n\nwhat is this\n", r"x.ini:3: write `Key = value`"),
        ('[One]\nA = "a\\q"\n', r"x.ini:2: the quoted value"),
    ],
)
def test_a_malformed_line_is_named(text, message):
    with pytest.raises(ConfigurationError, match=message):
        parse_ini(text, Path("x.ini"))

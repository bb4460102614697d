"""Command lines, layers of options, help, exit statuses."""

from __future__ import annotations

import gc
import importlib.metadata
import subprocess
import sys

import pytest

import gazette_sdk
from gazette_sdk.cli import program as failure
from gazette_sdk.cli.gazctl import GAZCTL
from gazette_sdk.cli.gazette import GAZETTE
from gazette_sdk.server.logging import hide_secrets
from gazette_sdk.server.options import parse_ini

SPEC = b"""
name: made/one
replication: 1
fragment: {length: 65536, compression_codec: NONE, refresh_interval: 1m}
"""


@pytest.mark.parametrize("command", [*GAZCTL.commands, *GAZETTE.commands], ids=lambda c: c.name)
def test_help_of_every_command_has_examples_and_ends_well(gazctl, gazette, command):
    tool = gazctl if command in GAZCTL.commands else gazette
    outcome = tool(*command.name.split(), "--help")
    assert outcome.status == 0
    assert outcome.text.startswith(command.summary)
    assert "Examples:" in outcome.text
    assert max(map(len, outcome.text.splitlines())) <= 100
    assert "version" in outcome.stderr


def test_the_version_is_that_of_the_installed_distribution(gazctl, gazette):
    version = importlib.metadata.version("gazette-sdk")
    assert gazette_sdk.__version__ == version
    for tool, name in ((gazctl, "gazctl"), (gazette, "gazette")):
        outcome = tool.ok("--version")
        assert (outcome.text, outcome.stderr) == (f"{name} version {version}\n", "")
    assert gazctl.ok("journals", "--version").text == f"gazctl version {version}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["journals", "--help"]])
def test_help_of_a_program_lists_its_commands(gazctl, arguments):
    outcome = gazctl(*arguments)
    assert outcome.status == 0
    assert "journals list" in outcome.text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "a command must be given"),
        (["journals", "lst"], "unknown command `journals lst`; did you mean `journals list`?"),
        (["journals"], "a command must be given"),
        (["nope"], "unknown command `nope`"),
        (["journals", "nope"], "unknown command `journals nope`\n"),
        (["jurnals", "list"], "unknown command `jurnals`; did you mean `journals list`?"),
        (["journal", "read", "a/b", "-n1"], "; did you mean `journals read`?"),
        (["jurnals"], "; did you mean `journals`?"),
        (["dev", "--port", "80"], "unknown command `dev`; did you mean `gazette dev`?"),
    ],
)
def test_without_a_command_help_goes_to_standard_error(gazctl, arguments, problem):
    outcome = gazctl(*arguments)
    assert (outcome.status, outcome.stdout) == (1, b"")
    assert problem in outcome.stderr
    assert "Commands:" in outcome.stderr
    assert "version" in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["journals", "list"], "unknown command `journals`; did you mean `gazctl journals list`?"),
        (["jurnals", "lst"], "unknown command `jurnals`; did you mean `gazctl journals list`?"),
        (["dev", "kil", "broker-1"], "takes no argument 'kil'; did you mean `dev kill`?"),
        (["dev", "other"], "takes no argument 'other'; --help shows how it is called"),
    ],
)
def test_a_mistyped_command_names_the_one_that_is_like_it(gazette, arguments, problem):
    outcome = gazette(*arguments)
    assert (outcome.status, outcome.stdout) == (1, b"")
    assert problem in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["journals", "list", "--nope"], "unknown option --nope"),
        (["journals", "list", "--format=xml"], "table, wide, yaml, json, proto"),
        (["journals", "store-health", "s3://a/", "surplus"], "takes no argument 'surplus'"),
        (["journals", "list", "--wath"], "unknown option --wath; did you mean --watch?"),
        (["journals", "list", "a name"], "'a name'"),
        (["journals", "list", "an/example", "-l", "topic=a"], "not both"),
        (["journals", "list", "--heads", "-o", "json"], "--heads needs -o table or wide"),
        (["journals", "list", "--unstored", "-o", "yaml"], "--unstored needs -o table or wide"),
        (["journals", "list", "--timeout=-1s"], "--timeout: -1s is less than 0s, the least"),
        (
            ["journals", "read", "an/example", "-n", "-1"],
            "--max-messages: -1 is less than 0, the least",
        ),
        (
            ["journals", "read", "an/example", "--since=noon"],
            "--since: 'noon' is no time; write 2026-",
        ),
        (["journals", "read", "an/example", "--since=2026-01-31T12:00:00"], "has no time zone"),
        (["journals", "read", "an/example", "--since=1h", "--tail"], "--since and --tail"),
        (["journals", "read", "an/example", "--since=1h", "--from=1"], "--since and --from"),
        (["journals", "list", "--watch=true"], "--watch is a flag"),
        (["journals", "apply", "--max-txn-size=-1"], "--max-txn-size"),
        (["journals", "read"], "the required option --selector was not given"),
        (["journals", "store-health"], "needs STORE_URL"),
        (["journals", "list", "--log.level=loud"], "--log.level"),
        (["journals", "list", "--broker.address=nonsense"], "is not the address of a broker"),
        (["journals", "list", "--broker.address=s3://bucket/"], "is not the address of a broker"),
        (["journals", "list", "--broker.address=http://"], "is not the address of a broker"),
        (["journals", "list", "--broker.address=http://b:1?wire=x"], "auto, grpc, stream"),
        (["journals", "list", "--broker.address=http://b:1?zone=a"], "unknown argument 'zone'"),
        (["journals", "list", "--broker.auth-keys=???"], "key"),
        (["journals", "list", "--broker.cache.ttl=soon"], "--broker.cache.ttl"),
        (["journals", "append", "-l", "aa", "-m", "modulo"], "--framing"),
        (["journals", "append", "-l", "aa", "-f", "lines", "--base64"], "--base64"),
        (["journals", "read", "-l", "aa", "--file-root", "/no/such"], "/no/such"),
        (["journals", "prune", "-l", "aa", "--file-root", "/no/such"], "/no/such"),
        (["journals", "append", "-l", "aa", "-i", "/no/such"], "/no/such"),
        (["attach-uuids", "/no/such"], "/no/such"),
    ],
)
def test_a_mistake_is_one_line_and_status_1(gazctl, arguments, problem):
    outcome = gazctl(*arguments)
    assert (outcome.status, outcome.stdout) == (1, b"")
    assert problem in outcome.stderr
    assert outcome.stderr.startswith("gazctl: ")
    assert outcome.stderr.count("\n") == 1


def test_options_of_parent_commands_stand_anywhere(gazctl):
    for arguments in (
        ["--broker.address", "http://a:1", "journals", "apply", "--dry-run"],
        ["journals", "--broker.address", "http://a:1", "apply", "--dry-run"],
        ["journals", "--broker.address=http://a:1", "--zone", "z", "apply", "--dry-run"],
        ["journals", "apply", "--dry-run", "--broker.address", "http://a:1"],
        ["journals", "--log.level=info", "apply", "--specs=-", "--dry-run"],
    ):
        assert "made/one" in gazctl.ok(*arguments, stdin=SPEC).text


def test_options_of_a_command_stand_before_its_last_word_too(gazctl):
    for arguments in (
        ["journals", "--specs", "-", "apply", "--dry-run"],
        ["journals", "--specs=-", "--dry-run", "apply"],
    ):
        assert "made/one" in gazctl.ok(*arguments, stdin=SPEC).text


def test_words_after_two_dashes_name_no_command(gazctl, gazette):
    assert "a command must be given" in gazctl("--", "journals", "list").stderr
    assert "`dev` takes no argument 'kill'" in gazette("dev", "--", "kill").stderr


# ----------------------------------------------------------------- precedence

ADDRESSES = {
    "flag": "of-flag",
    "ini": "of-ini",
    "BROKER_ADDRESS": "of-env",
    "GAZETTE_ADDRESS": "of-sdk",
}
"""What each layer says, the highest first. None is an address: the error names what was used."""


@pytest.mark.parametrize("highest", ADDRESSES)
def test_the_address_comes_from_the_highest_layer(gazctl, highest):
    layers = list(ADDRESSES)
    there = layers[layers.index(highest) :]
    arguments = ["journals", "list"]
    if "flag" in there:
        arguments.append(f"--broker.address={ADDRESSES['flag']}")
    if "ini" in there:
        text = f"[journals.broker]\nAddress = {ADDRESSES['ini']}\n"
        (gazctl.directory / "gazctl.ini").write_text(text)
    environ = {name: ADDRESSES[name] for name in there if name.isupper()}
    outcome = gazctl(*arguments, environ=environ)
    assert outcome.status == 1
    assert repr(ADDRESSES[highest]) in outcome.stderr


def test_without_any_the_address_is_the_local_one(gazctl):
    assert "\n; Address = http://localhost:8080\n" in gazctl.ok("print-config").text


VALUES = [
    ("Limit", "--broker.limit", "BROKER_LIMIT", ("1", "2", "3"), "1024"),
    ("FileOnly", "--broker.file-only", "BROKER_FILE_ONLY", ("", "true", "true"), "false"),
    ("WatchDelay", "--broker.watch-delay", "BROKER_WATCH_DELAY", ("1s", "2s", "3s"), "30ms"),
    ("AllowOrigin", "--broker.allow-origin", "BROKER_ALLOW_ORIGIN", ("a", "b", "c"), ""),
    ("Durability", "--broker.durability", "BROKER_DURABILITY", ("persisted",) * 3, "replicated"),
    ("Zone", "--broker.zone", "BROKER_ZONE", ("f", "i", "e"), "local"),
]


@pytest.mark.parametrize("option", VALUES, ids=lambda option: option[0])
@pytest.mark.parametrize("layers", ["flag ini env", "ini env", "env", ""])
def test_each_kind_of_option_has_its_layers(gazette, option, layers):
    key, flag, variable, (of_flag, of_ini, of_env), default = option
    arguments = ["print-config", "--broker.file-root=/"]
    environ = {}
    if "flag" in layers:
        arguments.append(f"{flag}={of_flag}" if of_flag else flag)
    if "ini" in layers:
        (gazette.directory / "gazette.ini").write_text(f"[Broker]\n{key} = {of_ini}\n")
    if "env" in layers:
        environ[variable] = of_env
    text = gazette(*arguments, environ=environ).text
    broker = text[: text.index("[Etcd]")]
    if not layers:
        assert f"; {key} = {default}".rstrip() in broker
        return
    wanted = {"flag ini env": of_flag or "true", "ini env": of_ini, "env": of_env}[layers]
    assert f"\n{key} = {wanted}\n" in broker


def test_the_first_existing_ini_file_is_used_and_an_unreadable_one_is_told_of(gazctl):
    home = gazctl.directory / ".config" / "gazette"
    home.mkdir(parents=True)
    (home / "gazctl.ini").write_text("[journals]\nZone = home\n")
    assert "\nZone = home\n" in gazctl.ok("print-config").text
    here = gazctl.directory / "gazctl.ini"
    here.write_text("[journals]\nZone = here\n[Unknown]\nKey = 1\n")
    assert "\nZone = here\n" in gazctl.ok("print-config").text
    here.write_text("[journals\n")
    outcome = gazctl("print-config")
    assert outcome.status == 1
    assert "gazctl.ini:1" in outcome.stderr


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[journals.broker]\nAdress = a", "2: [journals.Broker] has no key 'Adress'; did you mean"),
        ("\n[journals]\nzone=a\nzoen=a", "4: [journals] has no key 'zoen'; did you mean zone?"),
        ("[journals.read]\nQuux = 1", "has no key 'Quux'; `print-config` shows all keys"),
        ("[journals.raed]\nBlock = true", "2: unknown section [journals.raed]; did you mean ["),
    ],
)
def test_unknown_keys_of_a_file_are_refused_with_the_nearest_known(gazctl, text, problem):
    (gazctl.directory / "gazctl.ini").write_text(text)
    for arguments in (["journals", "list"], ["print-config"], ["attach-uuids"]):
        outcome = gazctl(*arguments)
        assert (outcome.status, outcome.stdout) == (1, b"")
        assert f"gazctl.ini:{problem}" in outcome.stderr or problem in outcome.stderr
    assert gazctl("journals", "list", "--help").status == 0


def test_sections_of_other_programs_are_left_alone(gazctl, gazette):
    (gazctl.directory / "gazctl.ini").write_text("[shards.list]\nLag = true\n[shards]\nZone = a\n")
    gazctl.ok("print-config")
    ini = "[Broker]\nZone = a\nAddress = http://a:1\n[Consumer]\nLimit = 1\n[My App]\nKey = 1\n"
    (gazette.directory / "gazette.ini").write_text(ini)
    assert "\nZone = a\n" in gazette.ok("print-config").text


def test_a_refused_value_states_the_limit(gazette):
    outcome = gazette("serve", "--broker.limit=200000")
    assert "--broker.limit: 200000 is more than 131072, the greatest allowed" in outcome.stderr
    outcome = gazette("bench", "--duration=0s")
    assert "--duration: 0s is not allowed: give more than 0s" in outcome.stderr


def test_a_required_option_is_satisfied_by_the_ini_file_but_not_that_of_edit(gazctl):
    ini = gazctl.directory / "gazctl.ini"
    ini.write_text("[journals.read]\nSelector = a b c\n[journals.edit]\nSelector = a b c\n")
    problem = gazctl("journals", "read").stderr
    assert "could not match 'a b c'" in problem
    assert "such as topic=orders" in problem
    assert "--selector was not given" in gazctl("journals", "edit").stderr


@pytest.mark.parametrize(
    ("command", "text", "problem"),
    [
        (
            ["journals", "apply"],
            "name: shop/orders\nreplicaton: 1\n",
            "line 2: unknown key 'replicaton'",
        ),
        (["journals", "apply"], "", "the document is empty; describe journals"),
        (["shards", "apply"], "shards: [\n", "not YAML: line 2"),
    ],
)
def test_a_malformed_document_is_named(gazctl, command, text, problem):
    (gazctl.directory / "specs.yaml").write_text(text)
    outcome = gazctl(*command, "--specs", "specs.yaml")
    assert outcome.status == 1
    assert outcome.stderr.startswith(f"gazctl: specs.yaml: {problem}")
    assert f"gazctl: standard input: {problem}" in gazctl(*command, stdin=text.encode()).stderr


def test_print_config_is_an_ini_file_with_the_same_effect(gazctl):
    ini = gazctl.directory / "gazctl.ini"
    ini.write_text(
        "[journals.list]\nLabels = a\nLabels = b\nRF = true\n"
        "[journals.read]\nSelector = topic=x\n[attach-uuids]\nMaxLength = 5\n"
    )
    first = gazctl.ok("print-config").text
    assert "\nSelector = topic=x\n" in first
    assert "\nLabels = a\nLabels = b\n" in first
    ini.write_text(first)
    assert gazctl.ok("print-config").text == first
    sections = {entry.section for entry in parse_ini(first, ini).entries}
    assert sections == {"journals.list", "journals.read", "attach-uuids"}


def test_print_config_keeps_secrets_unless_asked(gazette):
    environ = {"BROKER_AUTH_KEYS": "c2VjcmV0LWtleQ=="}
    assert "c2VjcmV0LWtleQ==" not in gazette("print-config", environ=environ).text
    shown = gazette("print-config", "--show-secrets", environ=environ).text
    assert "AuthKeys = c2VjcmV0LWtleQ==" in shown


def test_print_config_shows_no_secret_of_any_group(gazette):
    environ = {
        bound.env: f"c2VjcmV0{bound.env}"
        for group in GAZETTE.all_groups()
        for bound in group.options
        if bound.is_secret and bound.env
    }
    assert {"ETCD_PASSWORD", "BROKER_AUTH_KEYS", "CONSUMER_AUTH_KEYS"} <= environ.keys()
    assert "c2VjcmV0" not in gazette("print-config", environ=environ).text


def test_the_secret_options_are_these():
    groups = [*GAZETTE.all_groups(), *GAZCTL.all_groups()]
    options = {bound.long: bound for group in groups for bound in group.options}
    assert sorted(name for name, bound in options.items() if bound.is_secret) == [
        "auth-keys",
        "auth-token",
        "broker.auth-keys",
        "broker.auth-token",
        "consumer.auth-keys",
        "consumer.auth-token",
        "etcd.password",
    ]
    for name, bound in options.items():
        given = [f"--{name}=c2VjcmV0", f"--{name}", "c2VjcmV0"]
        hidden = [f"--{name}=…", f"--{name}", "…"]
        assert hide_secrets(given) == (hidden if bound.is_secret else given)


def test_failures_are_records_where_the_log_is_json(gazctl):
    outcome = gazctl("journals", "list", "-l", "a b c", "--log.format=json")
    assert outcome.status == 1
    assert '"level":"fatal"' in outcome.stderr


def test_the_termination_log_gets_the_error(gazctl, monkeypatch):
    path = gazctl.directory / "termination-log"
    path.touch()
    monkeypatch.setattr(failure, "TERMINATION_LOG", path)
    outcome = gazctl("journals", "list", "-l", "a b c")
    assert path.read_text().strip() == outcome.stderr.removeprefix("gazctl: ").strip()


def test_a_program_leaves_what_it_imported_out_of_garbage_collection():
    program = (
        "import gc, sys\n"
        "from gazette_sdk.cli.gazctl import main\n"
        "sys.argv = ['gazctl', 'completion', 'bash']\n"
        "assert main() == 0\n"
        "assert gc.isenabled()\n"
        "assert gc.get_freeze_count() > 10_000\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)


def test_a_command_within_another_program_leaves_its_garbage_collection_as_it_is(gazctl):
    before = gc.get_freeze_count()
    gazctl.ok("completion", "bash")
    assert gc.isenabled()
    assert gc.get_freeze_count() == before

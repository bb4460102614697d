import io
import json
import logging
import os

import pytest

from gazette_sdk.contexts import logged_context
from gazette_sdk.server import logging as server_logging
from gazette_sdk.server.logging import (
    IDENTITY,
    LEVEL,
    LOG_RECORDS,
    RECENT,
    configure_logging,
    fields_of,
    hide_secrets,
    redact,
)
from support.stream_servers import until

TOKEN = "eyJhbGciOiJIUzI1NiJ9.eyJjYXAiOjh9.c2lnbmF0dXJl"


@pytest.fixture
def logged():
    """Configures logging for a test, gives the output, and undoes it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    out = io.StringIO()

    def configure(*arguments, **options) -> io.StringIO:
        configure_logging(*arguments, stream=out, **options)
        return out

    yield configure
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    RECENT.lines.clear()


def test_json_is_one_object_per_line(logged):
    out = logged("info", "json")
    log = logging.getLogger("a")
    log.info("line\nbreak", extra={"journal": "a/b", "count": 3, "tags": ("x", b"y")})
    log.error("failed", exc_info=ZeroDivisionError("oops"))
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert first["msg"] == "line\nbreak"
    assert (first["level"], first["journal"], first["count"]) == ("info", "a/b", 3)
    assert first["tags"] == ["x", "b'y'"]
    assert first["time"].endswith("Z")
    assert "ZeroDivisionError: oops" in second["traceback"]


def test_each_record_has_the_member_of_its_process(logged, monkeypatch):
    monkeypatch.setattr(server_logging, "FOLD_S", 60.0)
    out = logged("info", "json", member="host-7-2")
    log = logging.getLogger("a")
    log.info("one")
    for _ in range(9):
        log.error("again")
    [handler] = logging.getLogger().handlers
    handler.flush()
    records = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [each["member"] for each in records] == ["host-7-2"] * 3
    assert records[-1]["repeated"] == 8


class NoTextError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize("style", ["text", "json", "color"])
@pytest.mark.parametrize("error", [NoTextError(), ValueError("file \udcff")])
def test_a_record_is_written_whatever_the_text_of_its_error_is(logged, style, error):
    out = logged("info", style)
    logging.getLogger("a").error("it failed: %s", error, exc_info=error, extra={"err": error})
    out.getvalue().encode()
    assert "it failed: " in out.getvalue()
    assert "it failed: " in RECENT.lines[-1]


def test_repeated_warnings_are_one_record_with_their_number(logged, monkeypatch):
    monkeypatch.setattr(server_logging, "FOLD_S", 0.2)
    out = logged("info", "json")
    log = logging.getLogger("a")
    for number in range(100):
        log.warning("a pulse of %s failed: %s", f"a/{number}", "broker-2 is gone")
        log.warning("no disk")
    log.error("another level")

    def lines():
        return [
            (each["msg"], each.get("repeated"))
            for each in map(json.loads, out.getvalue().splitlines())
            if each["msg"].startswith(("a pulse", "no disk", "another"))  # not of other threads
        ]

    failed = "a pulse of a/{} failed: broker-2 is gone"
    first = [
        (failed.format(0), None),
        ("no disk", None),
        (failed.format(1), None),
        (failed.format(2), None),
        ("another level", None),
    ]
    assert lines() == first
    until(lambda: len(lines()) > len(first))
    together = [(failed.format(99), 97), ("no disk", 99)]
    assert lines() == first + together
    log.warning("no disk")  # it continues
    until(lambda: len(lines()) > len(first + together))
    continued = [("no disk", 1)]
    assert lines() == first + together + continued
    until(lambda: not logging.getLogger().handlers[0]._kinds)
    log.warning("no disk")  # it is new again
    assert lines() == [*first, *together, *continued, ("no disk", None)]
    assert len(RECENT.lines) == len(lines())


@pytest.fixture
def identity(monkeypatch):
    monkeypatch.setattr(IDENTITY, "process", "a/broker-1")
    monkeypatch.setattr(IDENTITY, "component", "broker")


def test_each_record_names_the_process_and_its_component(logged, identity):
    out = logged("info", "json")
    logging.getLogger("a").info("assigned")
    assert list(json.loads(out.getvalue()))[:5] == ["time", "level", "msg", "process", "component"]
    assert json.loads(out.getvalue())["process"] == "a/broker-1"


def test_a_process_without_a_name_is_named_by_its_number(logged):
    out = logged("info", "json")
    logging.getLogger("a").info("started")
    written = json.loads(out.getvalue())
    assert (written["process"], written["component"]) == (str(os.getpid()), "gazette")


def test_records_of_a_task_have_the_fields_of_its_context(logged):
    out = logged("info", "json")
    log = logging.getLogger("a")

    def work():
        log.info("plain")
        log.info("other", extra={"journal": "c/d"})

    logged_context(journal="a/b").run(lambda: logged_context(peer="a/broker-2").run(work))
    log.info("outside")
    plain, other, outside = map(json.loads, out.getvalue().splitlines())
    assert (plain["journal"], plain["peer"]) == ("a/b", "a/broker-2")
    assert (other["journal"], other["peer"]) == ("c/d", "a/broker-2")
    assert "journal" not in outside


def test_records_are_counted_by_level_also_if_they_are_folded(logged):
    before = LOG_RECORDS.value("warning")
    logged("info", "text")
    for _ in range(20):
        logging.getLogger("a").warning("counted")
    assert LOG_RECORDS.value("warning") - before >= 20


def test_a_level_holds_for_a_while(logged):
    out = logged("warn", "text")
    log = logging.getLogger("gazette_sdk.a")
    LEVEL.change("debug", 0.3)
    log.debug("seen")
    assert LEVEL.shown()["level"] == "debug"
    LEVEL.change("info", 0.2)  # in its place
    until(lambda: LEVEL.shown() == {"level": "warning"})
    log.info("not seen")
    assert "msg=seen" in out.getvalue()
    assert "not seen" not in out.getvalue()


def test_what_was_counted_is_written_at_the_end(logged, identity):
    out = logged("info", "text")
    for _ in range(3):
        logging.getLogger("a").warning("no disk")
    logging.getLogger().handlers[0].close()
    assert [line.partition("msg=")[2] for line in out.getvalue().splitlines()] == [
        '"no disk" process=a/broker-1 component=broker',
        '"no disk" process=a/broker-1 component=broker repeated=2',
    ]


def test_information_and_the_audit_log_are_not_folded(logged):
    out = logged("info", "text")
    for _ in range(5):
        logging.getLogger("a").info("assigned")
        server_logging.AUDIT.warning("Append refused")
    assert len(out.getvalue().splitlines()) == 10


def test_text_is_pairs_quoted_where_needed(logged, identity):
    out = logged("debug", "text")
    logging.getLogger("a").debug("two words", extra={"plain": "x", "quoted": 'a "b"', "n": None})
    line = out.getvalue().strip()
    assert line.split(" ", 1)[0].startswith("time=")
    fields = 'process=a/broker-1 component=broker plain=x quoted="a \\"b\\"" n=null'
    assert line.endswith(f'level=debug msg="two words" {fields}')


def test_colour_names_level_and_fields(logged):
    out = logged("warn", "color")
    logging.getLogger("a").warning("careful", extra={"store": "s3://x"})
    assert "\x1b[33mWARNING\x1b[0m" in out.getvalue()
    assert "\x1b[33mstore\x1b[0m=s3://x" in out.getvalue()


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("trace", ["trace", "debug", "info", "warning", "error", "fatal"]),
        ("warn", ["warning", "error", "fatal"]),
        ("fatal", ["fatal"]),
    ],
)
def test_levels_below_are_left_out(logged, level, shown):
    out = logged(level, "json")
    for number in (5, 10, 20, 30, 40, 50):
        logging.getLogger("a").log(number, "x")
    assert [json.loads(line)["level"] for line in out.getvalue().splitlines()] == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"authorization: Bearer {TOKEN} end", "authorization: Bearer … end"),
        ("authorization: bearer abc.def", "authorization: bearer …"),
        (f"token {TOKEN}!", "token …!"),
        (
            "https://b.s3.amazonaws.com/x?X-Amz-Credential=AKIA%2F2&X-Amz-Signature=abc&y=1",
            "https://b.s3.amazonaws.com/x?X-Amz-Credential=…&X-Amz-Signature=…&y=1",
        ),
        (
            "https://a.blob.core.windows.net/c?sv=1&sig=q%3D",
            "https://a.blob.core.windows.net/c?sv=1&sig=…",
        ),
        (
            "https://storage.googleapis.com/x?GoogleAccessId=me&Signature=abc",
            "https://storage.googleapis.com/x?GoogleAccessId=…&Signature=…",
        ),
        ("postgres://me:pass@host/db", "postgres://me:…@host/db"),
        (
            "GET /webhdfs/v1/a?delegation=KAA-_&op=OPEN HTTP/1.1",
            "GET /webhdfs/v1/a?delegation=…&op=OPEN HTTP/1.1",
        ),
        ("run with --etcd.password=hunter2 --x=1", "run with --etcd.password=… --x=1"),
        ("ETCD_PASSWORD=hunter2", "ETCD_PASSWORD=…"),
        ("Settings(auth_token='abc', zone='a')", "Settings(auth_token='…', zone='a')"),
        ("Settings(auth_token='', zone='a')", "Settings(auth_token='', zone='a')"),
        ("check --etcd.user and --etcd.password", "check --etcd.user and --etcd.password"),
        ("--auth-keys-file=/run/keys is empty", "--auth-keys-file=/run/keys is empty"),
        (
            "nothing secret at http://host:8080/a?offset=1",
            "nothing secret at http://host:8080/a?offset=1",
        ),
    ],
)
def test_secrets_are_taken_out_of_text(text, shown):
    assert redact(text) == shown


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--etcd.password", "x", "y"], ["--etcd.password", "…", "y"]),
        (["--etcd.password=x", "y"], ["--etcd.password=…", "y"]),
        (["--etcd.password", "--etcd.password", "y"], ["--etcd.password", "…", "y"]),
        (["--etcd.password=", "y"], ["--etcd.password=", "y"]),
        (["-auth_token", "x y"], ["-auth_token", "…"]),
        (["--AUTH-TOKEN=x y=z"], ["--AUTH-TOKEN=…"]),
        (["--conf", "a.secret.key=x"], ["--conf", "a.secret.key=…"]),
        (["--conf=a.password=x,y b=c"], ["--conf=a.password=…"]),
        (["host=a password=x y dbname=b"], ["host=a password=…"]),
        (["postgres://me:pass@host"], ["postgres://me:…@host"]),
        (["--etcd.password-file", "x"], ["--etcd.password-file", "x"]),
        (["password", "x", "--key=a", "--show-secrets", "b"],) * 2,
    ],
)
def test_secrets_are_taken_out_of_command_lines(arguments, shown):
    assert hide_secrets(arguments) == shown


def test_secrets_are_taken_out_of_fields():
    record = logging.makeLogRecord(
        {
            "auth_keys": "c2VjcmV0",
            "authorization": "Basic x",
            "empty_auth_keys": "",
            "config": {"AuthKeys": "c2VjcmV0", "Zone": "a", "urls": ["x?sig=abc"]},
            "url": "x?sig=abc",
        }
    )
    assert fields_of(record) == {
        "auth_keys": "…",
        "authorization": "…",
        "empty_auth_keys": "",
        "config": {"AuthKeys": "…", "Zone": "a", "urls": ["x?sig=…"]},
        "url": "x?sig=…",
    }


@pytest.mark.parametrize("style", ["text", "json", "color"])
def test_no_secret_reaches_the_output(logged, style):
    out = logged("debug", style)
    error = RuntimeError(f"refused: Bearer {TOKEN}")
    logging.getLogger("a").error(
        "failed with %s", TOKEN, extra={"auth_token": TOKEN}, exc_info=error
    )
    assert TOKEN not in out.getvalue()
    assert TOKEN not in "".join(RECENT.lines)

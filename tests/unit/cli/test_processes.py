from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading

import pytest

from gazette_sdk.cli import processes, settings
from gazette_sdk.cli.gazette import GAZETTE
from gazette_sdk.cli.processes import (
    MemberOptions,
    MembersEndedError,
    command_line,
    options_of_members,
    run_members,
)
from gazette_sdk.cli.settings import BROKER_PROCESSES, CONSUMER_PROCESSES, ConsumerSettings
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.server.options import Sources, load
from gazette_sdk.server.settings import BrokerSettings, DebugSettings


def members_of(count=3, *, debug="", of=BrokerSettings, **options):
    options = {"id": "host-7", **options}
    return options_of_members(of(**options), DebugSettings(port=debug), count)


def test_members_have_ids_ports_and_spool_directories_of_their_own():
    members = members_of(
        2, port="8080", advertise_port=9080, debug="8090", spool_dir="/spools", zone="a"
    )
    assert [each.id for each in members] == ["host-7-1", "host-7-2"]
    assert members[1].values == {
        "processes": "1",
        "broker.id": "host-7-2",
        "broker.port": "8081",
        "broker.advertise-port": "9081",
        "debug.port": "8091",
        "broker.spool-dir": "/spools/host-7-2",
    }


@pytest.mark.parametrize("port", ["", "0"])
def test_free_ports_stay_free_ports(port):
    assert members_of(1, port=port)[0].values == {"processes": "1", "broker.id": "host-7-1"}


def test_consumers_share_a_directory_in_which_each_makes_its_own():
    [member] = members_of(1, of=ConsumerSettings, port="8081", directory="/shards")
    assert member.values == {
        "processes": "1",
        "consumer.id": "host-7-1",
        "consumer.port": "8081",
    }


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"port": "unix:///run/gazette.sock"}, "--broker.port unix:///run/gazette.sock is one"),
        ({"debug": "unix:///run/debug.sock"}, "--debug.port unix:///run/debug.sock is one socket"),
        ({"port": "65534"}, "--broker.port 65534 leaves no ports for 3 processes: .* up to 65533"),
        ({"port": "8080", "debug": "8082"}, "--broker.port 8080 and --debug.port 8082 overlap"),
        ({"port": "8082", "debug": "8080"}, "at least 3 away"),
    ],
)
def test_options_that_members_cannot_share_are_refused(options, problem):
    with pytest.raises(ConfigurationError, match=problem):
        members_of(**options)


@pytest.mark.parametrize("text", ["0", "-1", "many", "1025", "²", ""])
@pytest.mark.parametrize("group", [BROKER_PROCESSES, CONSUMER_PROCESSES])
def test_a_number_of_processes_that_is_none_is_refused(group, text):
    with pytest.raises(ConfigurationError, match="neither a number from 1 to 1024 nor auto"):
        load(group, Sources({"processes": [text]}))


def test_the_number_of_processes_is_an_option_of_every_source():
    assert load(BROKER_PROCESSES, Sources()).count == 1
    assert load(BROKER_PROCESSES, Sources({"processes": ["3"]})).count == 3
    assert load(CONSUMER_PROCESSES, Sources(environ={"CONSUMER_PROCESSES": "4"})).count == 4


@pytest.mark.parametrize(
    ("quota", "count"),
    [
        ("150000 100000\n", 2),
        ("50000 100000\n", 1),
        ("max 100000\n", 3),
        (None, 3),
        ("9000000 1", 3),
    ],
)
def test_auto_is_one_process_for_each_core_that_may_be_used(tmp_path, monkeypatch, quota, count):
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(settings, "CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 5}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert load(BROKER_PROCESSES, Sources({"processes": ["auto"]})).count == count


def invocation(*arguments):
    _, parsed = GAZETTE._parse(list(arguments))
    return parsed


def test_a_member_has_the_options_of_the_parent_and_its_own(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "gazette", "serve", "--broker.id=x"])
    monkeypatch.setattr(sys, "argv", ["/lib/gazette.py", "serve", "--broker.id=x"])
    given = ["--broker.id=host", "--debug.private", "--processes", "2"]
    call = invocation("serve", *given, "--broker.allow-host", "a", "--broker.allow-host=b")
    line = command_line(call, "serve", {"processes": "1", "broker.id": "host-1"})
    assert line[:4] == [sys.executable, "-m", "gazette", "serve"]
    child = invocation(*line[3:])
    assert child.sources.arguments == {
        "broker.id": ["host-1"],
        "debug.private": ["true"],
        "processes": ["1"],
        "broker.allow-host": ["a", "b"],
    }


def test_arguments_reach_a_member():
    call = invocation("run-consumer", "orders:totals", "--consumer.workers=3")
    line = command_line(call, "run-consumer", {"consumer.id": "host-1"})
    child = invocation(*line[line.index("run-consumer") :])
    assert child.arguments == ("orders:totals",)
    assert child.sources.arguments == {"consumer.workers": ["3"], "consumer.id": ["host-1"]}


@pytest.fixture
def parent_of(monkeypatch):
    """A parent of programs instead of members, by their ids."""

    def run(programs):
        def line(_invocation, _command, values):
            return [sys.executable, "-I", "-S", "-c", programs[values["id"]]]

        monkeypatch.setattr(processes, "command_line", line)
        members = [MemberOptions(name, {"id": name}) for name in programs]
        asyncio.run(asyncio.wait_for(run_members(invocation("serve"), "serve", members), 60))

    return run


def test_members_that_all_fail_end_the_parent_with_the_status_of_the_last(parent_of):
    with pytest.raises(MembersEndedError, match="all 2 processes have failed, at last") as caught:
        parent_of({"one": "raise SystemExit(3)", "two": "raise SystemExit(3)"})
    assert caught.value.exit_status == 3


def test_a_member_that_fails_is_started_again_and_no_other_ends(parent_of, tmp_path):
    """The first one fails twice, and then asks the parent to end."""
    starts = tmp_path / "starts"
    stop = f"os.kill({os.getpid()}, signal.SIGTERM)"
    fails_twice = (
        "import os, signal, pathlib\n"
        f"starts = pathlib.Path({str(starts)!r})\n"
        "count = starts.stat().st_size if starts.exists() else 0\n"
        "starts.open('ab').write(b'.')\n"
        f"{stop} if count == 2 else os._exit(4)\n"
    )
    serves = "import signal\nsignal.sigwait({signal.SIGTERM})"
    parent_of({"one": fails_twice, "two": serves})
    assert starts.read_bytes() == b"..."


READY = """
import os, signal, socket
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reports:
    reports.sendto(b"READY=1\\nSTATUS=serving 3 journals", os.environ["NOTIFY_SOCKET"])
"""


def test_the_service_manager_is_sent_that_all_members_serve(parent_of, tmp_path, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "manager"))
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(60)
        manager.bind(str(tmp_path / "manager"))
        serves = f"{READY}\nassert 'WATCHDOG_USEC' not in os.environ\nsignal.sigwait({{15}})"
        ready = []

        def wait_and_end():
            while not (report := manager.recv(1 << 12)).startswith(b"READY=1"):
                pass
            ready.append(report)
            os.kill(os.getpid(), signal.SIGTERM)

        waiting = threading.Thread(target=wait_and_end)
        waiting.start()
        parent_of({"one": serves, "two": serves})
        waiting.join(60)
        assert ready == [b"READY=1\nSTATUS=2 of 2 processes serve"]
        while not (report := manager.recv(1 << 12)).startswith(b"STOPPING=1"):
            assert report.startswith(b"WATCHDOG=1\nSTATUS=")
        assert report == b"STOPPING=1\nSTATUS=2 of 2 processes end"


def test_members_that_have_served_are_started_again_when_all_fail_at_once(parent_of, tmp_path):
    """The third process of the first one asks the parent to end."""
    starts = tmp_path / "starts"
    fails = f"{READY}\nraise SystemExit(6)"
    ends = (
        f"{READY}\nimport pathlib\nstarts = pathlib.Path({str(starts)!r})\n"
        "starts.open('ab').write(b'.')\n"
        f"if starts.stat().st_size == 3:\n    os.kill({os.getpid()}, signal.SIGTERM)\n"
        "    signal.sigwait({15})\n    raise SystemExit(0)\n"
        "raise SystemExit(6)"
    )
    with contextlib.suppress(MembersEndedError):  # the other one may fail while both end
        parent_of({"one": ends, "two": fails})
    assert starts.read_bytes() == b"..."


def test_a_member_that_fails_while_it_drains_is_the_failure_of_the_parent(parent_of):
    stop = f"import os, signal\nos.kill({os.getpid()}, signal.SIGTERM)\n"
    fails = f"{stop}signal.sigwait({{signal.SIGTERM}})\nraise SystemExit(5)"
    fails = "import signal\nsignal.pthread_sigmask(0, {signal.SIGTERM})\n" + fails
    with pytest.raises(MembersEndedError, match="one ended with status 5; its log") as caught:
        parent_of({"one": fails})
    assert caught.value.exit_status == 5


def test_the_status_of_a_killed_member_is_that_of_a_shell():
    assert MembersEndedError("one", -signal.SIGKILL).exit_status == 137

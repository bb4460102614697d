"""Options of ``gazette dev``, and commands about its brokers."""

import pytest

from gazette_sdk.cli import dev as dev_control
from gazette_sdk.local_cluster.cluster import BrokerStatus


@pytest.fixture
def calls(monkeypatch):
    """Requests to the running cluster."""
    asked = []

    async def call(data, control, names):
        asked.append((data.name, control, tuple(names)))
        return [BrokerStatus("broker-1", "b", "ended", "http://localhost:1", None, 2)]

    monkeypatch.setattr(dev_control, "call", call)
    return asked


@pytest.mark.parametrize("control", ["kill", "pause", "resume", "drain", "start", "status"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["dev", "{}", "broker-1", "--data", "play"],
        ["dev", "{}", "--data", "play", "broker-1"],
        ["dev", "--data", "play", "{}", "broker-1"],
    ],
)
def test_brokers_are_controlled_by_name(gazette, calls, control, arguments):
    outcome = gazette(*(each.format(control) for each in arguments))
    assert outcome.status == 0
    assert calls == [("play", control, ("broker-1",))]
    assert outcome.text.split()[-6:] == [
        "broker-1",
        "b",
        "ended",
        "http://localhost:1",
        "<none>",
        "2",
    ]


def test_status_is_json_for_programs(gazette, calls):
    outcome = gazette("dev", "status", "-o", "json")
    assert outcome.status == 0
    assert outcome.text == (
        '{"name":"broker-1","zone":"b","state":"ended","address":"http://localhost:1",'
        '"pid":null,"starts":2}\n'
    )
    assert calls == [("gazette-data", "status", ())]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["dev", "kill"], "`dev kill` needs BROKER..."),
        (["dev", "slaughter"], "`dev` takes no argument 'slaughter'"),
        (["dev", "kill", "broker-1", "--port", "1"], "unknown option --port"),
        (["dev", "--zones", "a,b"], "as many zones as there are brokers"),
        (["dev", "--zones", "a,", "--brokers", "2"], "as many zones as there are brokers"),
    ],
)
def test_mistakes_are_told_of(gazette, arguments, problem):
    outcome = gazette(*arguments)
    assert outcome.status == 1
    assert problem in outcome.stderr


def test_without_a_running_cluster_the_remedy_is_named(gazette, tmp_path):
    outcome = gazette("dev", "status", "--data", str(tmp_path))
    assert outcome.status == 1
    assert "start one by `gazette dev --brokers 3`" in outcome.stderr

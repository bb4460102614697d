"""`gazctl console` prints an address; brokers and consumers have an option for the console."""

from __future__ import annotations

import base64
import json

import pytest

from gazette_sdk.cli import console
from gazette_sdk.cli.gazctl import GAZCTL
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.server.settings import BrokerSettings

KEY = base64.b64encode(b"a key of the cluster").decode()


def test_without_keys_the_address_has_no_token(capsys):
    assert GAZCTL.main(["console", "--broker.address", "http://broker:8080/"]) == 0
    assert capsys.readouterr().out == "http://broker:8080/console/\n"


def test_with_keys_the_token_may_list_and_read_for_a_time(capsys):
    assert GAZCTL.main(["console", "--broker.auth-keys", KEY, "--duration", "1h"]) == 0
    address, _, token = capsys.readouterr().out.strip().partition("#token=")
    assert address == "http://localhost:8080/console/"
    payload = token.split(".")[1]
    claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    assert claims["cap"] == Capability.LIST | Capability.READ
    assert 3600 <= claims["exp"] - claims["iat"] <= 3601
    assert Authority(KEY).verify(f"Bearer {token}", Capability.READ, claims["iat"])


def test_a_given_token_is_used_as_it_is(capsys):
    assert GAZCTL.main(["console", "--broker.auth-token", "a.b.c"]) == 0
    assert capsys.readouterr().out == "http://localhost:8080/console/#token=a.b.c\n"


def test_a_socket_is_no_address_for_browsers(capsys):
    assert GAZCTL.main(["console", "--broker.address", "unix:///run/gazette/socket"]) == 1
    assert "gazette console --broker.address" in capsys.readouterr().err


@pytest.mark.parametrize(("is_there", "status"), [(True, 0), (False, 1)])
def test_a_browser_is_opened_if_wanted(monkeypatch, capsys, is_there, status):
    opened = []
    monkeypatch.setattr(console.webbrowser, "open", lambda url: opened.append(url) or is_there)
    assert GAZCTL.main(["console", "--open"]) == status
    assert opened == ["http://localhost:8080/console/"]
    assert capsys.readouterr().out == "http://localhost:8080/console/\n"


def test_the_console_is_on_by_default():
    assert BrokerSettings().console == "on"

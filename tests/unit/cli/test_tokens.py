"""``gazctl token create`` and ``show``."""

from __future__ import annotations

import base64
import json
import time

import pytest

from gazette_sdk.cli import tokens
from gazette_sdk.cli.tokens import accepted_keys, explained, key_states
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.protocol.labels import format_selector, parse_selector

SECRETS = [base64.b64encode(bytes([n]) * 32).decode() for n in (1, 2)]
KEYS = f"new:{SECRETS[0]} old:{SECRETS[1]}"
HOUR_S = 3600.0


@pytest.fixture
def keys(gazctl):
    path = gazctl.directory / "keys"
    path.write_text(KEYS + "\n")
    return str(path)


def created(gazctl, *arguments):
    return gazctl.ok("token", "create", *arguments).text.strip()


def shown(gazctl, token, *arguments):
    return json.loads(gazctl.ok("token", "show", "-o", "json", *arguments, token).text)


def test_servers_with_the_keys_accept_a_created_token_for_its_rights_and_its_time(gazctl, keys):
    options = ["--capability", "list,READ", "--capability", "0x10000", "-l", "topic=orders"]
    token = created(gazctl, "--key-file", keys, *options, "--subject", "ada", "--expires", "90m")
    now = time.time()
    claims = Authority(KEYS).verify(f"Bearer {token}", Capability.READ, now)
    assert claims.capability == Capability.LIST | Capability.READ | 0x10000
    assert format_selector(claims.selector) == "topic=orders"
    assert now + 5390 < claims.expires_at < now + 5410
    assert Authority(KEYS).identity(f"Bearer {token}") == ("ada", "new")


def test_a_token_is_signed_with_the_key_of_an_id(gazctl, keys):
    token = created(gazctl, "--key-file", keys, "--capability", "ALL", "--key-id", "old")
    assert shown(gazctl, token)["key_id"] == "old"
    Authority(f"old:{SECRETS[1]}").verify(f"Bearer {token}", Capability.APPLY, time.time())


def test_keys_are_taken_from_the_environment_as_servers_take_them(gazctl, keys):
    gazctl.environ["BROKER_AUTH_KEYS_FILE"] = keys
    token = created(gazctl, "--capability", "LIST")
    assert shown(gazctl, token)["signature"] == "good"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--capability", "LIST"], "give --key-file"),
        (["--auth-keys", KEYS], "give --capability"),
        (["--auth-keys", KEYS, "--capability", "WRITE"], "there is no right 'WRITE'"),
        (["--auth-keys", KEYS, "--capability", "-1"], "there is no right '-1'"),
        (["--auth-keys", KEYS, "--capability", "0x100000000"], "there is no right"),
        (["--auth-keys", KEYS, "--capability", "LIST", "--key-id", "x"], "keys are: new, old"),
        (["--auth-keys", KEYS, "--capability", "LIST", "-l", "a in"], "selector"),
        (["--auth-keys", KEYS, "--capability", "LIST", "--expires", "0s"], "expires"),
        (["--auth-keys", "AA==", "--capability", "LIST"], "at least one authorization key"),
        (["--auth-keys", "k:?", "--capability", "LIST"], "is not standard base64"),
        (["--key-file", "missing", "--capability", "LIST"], "missing"),
    ],
)
def test_what_cannot_be_created_is_refused_with_a_remedy_and_without_a_secret(
    gazctl, options, text
):
    outcome = gazctl("token", "create", *options)
    assert (outcome.status, outcome.text) == (1, "")
    assert text in outcome.stderr
    assert not any(secret in outcome.stderr for secret in SECRETS)


def test_a_token_is_explained_without_keys_and_says_that_it_is_not_checked(gazctl, keys):
    token = created(gazctl, "--key-file", keys, "--capability", "LIST", "-l", "aa=bb")
    for arguments, stdin in (
        ([token], b""),
        ([f"Bearer {token}"], b""),
        ([], f"bearer {token}\n".encode()),
        (["-"], token.encode()),
    ):
        text = gazctl.ok("token", "show", *arguments, stdin=stdin).text
        assert "LIST" in text
        assert "aa=bb" in text
        assert "not checked: give --key-file" in text
        assert token not in text


def test_a_token_of_other_keys_is_bad_and_one_of_the_keys_is_good(gazctl, keys):
    token = created(gazctl, "--key-file", keys, "--capability", "LIST")
    assert "good: one of the keys" in gazctl.ok("token", "show", "--key-file", keys, token).text
    other = base64.b64encode(b"x" * 32).decode()
    outcome = gazctl("token", "show", "--auth-keys", other, token)
    assert outcome.status == 1
    assert "bad: none of the keys" in outcome.text
    assert "no configured key made its signature" in outcome.stderr
    assert other not in outcome.text + outcome.stderr


def test_an_expired_token_says_since_when(gazctl):
    token = Authority(KEYS).sign(2, parse_selector(""), 60, time.time() - 2 * HOUR_S)
    outcome = gazctl("token", "show", token)
    assert outcome.status == 1
    assert "(1h5" in outcome.text
    assert "ago)" in outcome.text
    assert "it has expired" in outcome.stderr


def test_what_is_no_token_is_refused(gazctl):
    for given in ("abc", "a.b.c", "..", "a.é.b"):
        outcome = gazctl("token", "show", given)
        assert outcome.status == 1
        assert "invalid token" in outcome.stderr
    assert "there is no token" in gazctl("token", "show", stdin=b" \n").stderr


def test_all_rights_and_a_token_that_does_not_expire_are_named():
    authority = Authority(KEYS)
    token = authority.sign(Capability.ALL, parse_selector(""), 10**12, 0)
    found = explained(token, KEYS, 1.0)
    assert (found.capabilities, found.selector, found.problem) == (["ALL"], "", "")
    assert found.expires == "1000000000000 s after 1970"


# ---------------------------------------------------------------- keys


def member(name, *keys, version="1", error=""):
    id_ = pb.ProcessSpec.ID(zone="a", suffix=name)
    return clpb.Member(id=id_, version=version, key_ids=keys, error=error)


def checked(monkeypatch, gazctl, members, *arguments):
    async def call_cluster(*_):
        return clpb.MembersResponse(members=members)

    monkeypatch.setattr(tokens, "call_cluster", call_cluster)
    return gazctl("keys", "check", *arguments)


def test_the_old_key_can_go_once_all_members_sign_with_another_one(monkeypatch, gazctl):
    members = [member("one", "new", "old"), member("two", "new", "old", "AA==")]
    outcome = checked(monkeypatch, gazctl, members, "old")
    assert (outcome.status, outcome.stderr) == (0, "")
    assert "can go, with the tokens that it has signed" in outcome.text
    assert "AA==" not in outcome.text
    outcome = checked(monkeypatch, gazctl, members, "new")
    assert outcome.status == 1
    assert "cannot go: in use: it signs at a/one, a/two" in outcome.stderr
    assert checked(monkeypatch, gazctl, members).status == 0
    outcome = checked(monkeypatch, gazctl, members, "older")
    assert "no member accepts a key 'older'; the keys are: new, old" in outcome.stderr


def test_a_key_stays_while_a_member_signs_with_it_or_lacks_the_next_one(monkeypatch, gazctl):
    halfway = [member("one", "new", "old"), member("two", "old", "new")]
    assert "it signs at a/two" in checked(monkeypatch, gazctl, halfway, "old").stderr
    lacking = [member("one", "new", "old"), member("two", "mid", "old"), member("six", "new")]
    outcome = checked(monkeypatch, gazctl, lacking, "old")
    assert "another key signs that not all members accept yet" in outcome.stderr
    outcome = checked(monkeypatch, gazctl, lacking)
    assert outcome.status == 1
    assert "a/two lack the key new" in outcome.stderr
    assert "a/two lack it: add it there at once" in outcome.text


def test_members_that_do_not_say_leave_the_question_open(monkeypatch, gazctl):
    members = [
        member("one", "new", "old"),
        member("two", version="", error="no answer within 1 s"),
        member("six", version=""),
    ]
    outcome = checked(monkeypatch, gazctl, members, "old")
    assert outcome.status == 1
    assert "the keys of a/two are not known: no answer within 1 s" in outcome.stderr
    assert "the keys of a/six are not known: it is of another implementation" in outcome.stderr
    assert "not known: a/two, a/six did not say" in outcome.text
    assert checked(monkeypatch, gazctl, members).status == 1


def test_keys_of_a_file_are_checked_before_they_sign(monkeypatch, gazctl, keys):
    members = [member("one", "old"), member("two", "old", "new")]
    outcome = checked(monkeypatch, gazctl, members, "--key-file", keys, "-o", "json")
    assert outcome.status == 1
    found = {each["id"]: each for each in json.loads(outcome.text)["keys"]}
    assert found["new"]["missing_at"] == ["a/one"]
    assert found["new"]["verdict"] == "may not sign yet: a/one lack it"
    assert not any(secret in outcome.text + outcome.stderr for secret in SECRETS)
    both = [member("one", "old", "new"), member("two", "old", "new")]
    assert checked(monkeypatch, gazctl, both, "--key-file", keys).status == 0
    none = [member("one", "old"), member("two", "old")]
    assert "not known to any member" in checked(monkeypatch, gazctl, none, "--key-file", keys).text


def test_a_cluster_without_keys_is_no_success(monkeypatch, gazctl):
    outcome = checked(monkeypatch, gazctl, [member("one", "AA=="), member("two")])
    assert outcome.status == 1
    assert "no member has keys" in outcome.stderr


def test_many_members_are_counted():
    accepted, silent = accepted_keys([member(f"m{n}", "key") for n in range(5)])
    (state,) = key_states(accepted, silent)
    assert state.verdict == "in use: it signs at a/m0, a/m1, a/m2 and 2 more"

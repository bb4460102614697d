"""``gazctl token create`` and ``show``, and ``gazctl keys check``: tokens and keys of a cluster."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import orjson

from gazette_sdk.cli.client import call_cluster
from gazette_sdk.cli.formats import write_table
from gazette_sdk.cli.program import CommandFailedError, Invocation
from gazette_sdk.cli.settings import CHECK_KEYS, CREATE_TOKEN, SHOW_TOKEN
from gazette_sdk.errors import ConfigurationError, UnauthenticatedError
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol.authorization import (
    PASS_THROUGH_KEY,
    Authority,
    Capability,
    Claims,
    key_ids,
    parse_keys,
    unverified,
)
from gazette_sdk.protocol.durations import SECOND_NS, format_duration
from gazette_sdk.protocol.labels import format_selector, parse_selector, validate_selector
from gazette_sdk.protocol.rules import MEMBERS_RPC
from gazette_sdk.server.tls import with_secrets

TOKEN_BYTES_MAX = 64 << 10
"""Greatest length of a token on standard input."""

MEMBERS_TIMEOUT_S = 15.0
"""Longest time of the call for members, which bounds its own calls by a second."""

_NAMED = (
    Capability.LIST,
    Capability.READ,
    Capability.APPEND,
    Capability.APPLY,
    Capability.REPLICATE,
)


def run_create(invocation: Invocation) -> None:
    """Print a token.

    Raises:
        ConfigurationError: there is no key, or a right or the selector is malformed.
    """
    settings = with_secrets(CREATE_TOKEN, invocation.settings(CREATE_TOKEN))
    if not settings.auth_keys.strip():
        raise ConfigurationError(
            "a token needs a key that signs it: give --key-file, the file with the keys of the"
            " servers, or BROKER_AUTH_KEYS"
        )
    if not settings.capability:
        raise ConfigurationError(
            "a token without a right allows nothing: give --capability, such as --capability READ"
        )
    mask = 0
    for text in settings.capability:
        for name in text.split(","):
            mask |= capability_of(name.strip())
    selector = parse_selector(settings.selector)
    validate_selector(selector)
    authority = Authority(signing_first(settings.auth_keys, settings.key_id))
    token = authority.sign(
        mask, selector, settings.expires_s, time.time(), subject=settings.subject
    )
    sys.stdout.write(token + "\n")


def capability_of(name: str) -> int:
    """Return the bits of a right.

    Raises:
        ConfigurationError: there is no such right.
    """
    found = Capability.__members__.get(name.upper())
    if found is not None:
        return int(found)
    try:
        bits = int(name, 0)
    except ValueError:
        bits = 0
    if not 0 < bits <= Capability.ALL:
        known = ", ".join([*(str(each.name) for each in _NAMED), "ALL"])
        raise ConfigurationError(
            f"--capability: there is no right {name!r}; use {known}, or the number of a bit of an"
            " application, such as 0x10000"
        )
    return bits


def signing_first(keys: str, key_id: str) -> str:
    """Return keys with the one of an id before the others.

    Args:
        keys: the keys, as servers have them.
        key_id: the id; empty to leave the order as it is.

    Raises:
        ConfigurationError: no key has the id.
    """
    parse_keys(keys)
    if not key_id:
        return keys
    texts = keys.replace(",", " ").split()
    first = [text for text in texts if text.rpartition(":")[0] == key_id]
    if not first:
        known = ", ".join(filter(None, key_ids(keys))) or "none"
        raise ConfigurationError(
            f"--key-id: no key has the id {key_id!r}; the ids of the keys are: {known}"
        )
    return " ".join([*first, *texts])


# ---------------------------------------------------------------- show


@dataclass(frozen=True, slots=True)
class ShownToken:
    """Token as it is shown.

    Attributes:
        capabilities: its rights, bits of applications as numbers.
        selector: journals and shards that it allows; empty for all.
        expires: time from which on it is refused; None if it never is.
        issued: time at which it was signed, if it says so.
        not_before: time from which on it is valid, if it says so.
        subject: who it is for; empty if it does not say.
        id: its id; empty if it has none.
        key_id: id of the key that signed it, as its header says; empty if it does not say.
        signature: ``not checked``, ``good`` or ``bad``.
        problem: why servers refuse it; empty if nothing is known that speaks against it.
    """

    capabilities: list[str]
    selector: str
    expires: str | None
    issued: str | None
    not_before: str | None
    subject: str
    id: str
    key_id: str
    signature: str
    problem: str


def run_show(invocation: Invocation) -> None:
    """Explain a token.

    Raises:
        CommandFailedError: servers refuse it.
        UnauthenticatedError: it is malformed.
    """
    settings = with_secrets(SHOW_TOKEN, invocation.settings(SHOW_TOKEN))
    text = _given(invocation)
    shown = explained(text, settings.auth_keys, time.time())
    if settings.format == "json":
        sys.stdout.write(orjson.dumps(asdict(shown)).decode() + "\n")
    else:
        write_table(["Field", "Value"], _rows(shown, time.time()))
    sys.stdout.flush()
    if shown.problem:
        raise CommandFailedError(f"servers refuse the token: {shown.problem}")


def _given(invocation: Invocation) -> str:
    """Return the token of the command line, or of standard input."""
    text = invocation.arguments[0] if invocation.arguments else "-"
    if text == "-":
        text = sys.stdin.buffer.read(TOKEN_BYTES_MAX).decode(errors="replace")
    text = text.strip()
    if text[:7].lower() == "bearer ":
        text = text[7:].strip()
    if not text:
        raise ConfigurationError("there is no token: give it as argument or on standard input")
    return text


def explained(text: str, keys: str, now: float) -> ShownToken:
    """Return what a token says.

    Args:
        text: the token.
        keys: keys of the servers; empty not to check its signature.
        now: Unix time in seconds.

    Raises:
        UnauthenticatedError: it is malformed.
        ConfigurationError: the keys are.
    """
    from gazette_sdk.protocol import signatures  # noqa: PLC0415 - costly

    token = unverified(text)
    signature, problem = "not checked", ""
    try:
        if keys.strip():
            signature = "bad"
            Authority(keys).verify_signature(text)
            signature = "good"
        token.check_times(now)
    except UnauthenticatedError as error:
        problem = str(error)
    return ShownToken(
        capabilities=_names(token.claims),
        selector=format_selector(token.claims.selector),
        expires=_time(token.claims.expires_at),
        issued=_time(token.issued_at),
        not_before=_time(token.not_before),
        subject=token.subject,
        id=token.token_id,
        key_id=str(signatures.key_id(text) or ""),
        signature=signature,
        problem=problem,
    )


def _names(claims: Claims) -> list[str]:
    if claims.capability == Capability.ALL:
        return ["ALL"]
    names = [str(each.name) for each in _NAMED if claims.capability & each]
    rest = claims.capability & ~sum(_NAMED)
    return [*names, *([f"{rest:#x}"] if rest else [])]


def _time(at: float) -> str | None:
    if math.isinf(at):
        return None
    try:
        return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return f"{at:.0f} s after 1970"


def _rows(shown: ShownToken, now: float) -> list[list[str]]:
    expires = shown.expires or "never"
    if shown.expires is not None and shown.expires[:4].isdigit() and "T" in shown.expires:
        left_s = datetime.fromisoformat(shown.expires).timestamp() - now
        span = format_duration(round(abs(left_s)) * SECOND_NS)
        expires += f" (in {span})" if left_s > 0 else f" ({span} ago)"
    signature = {
        "not checked": "not checked: give --key-file to find out who signed it",
        "good": "good: one of the keys has made it",
        "bad": "bad: none of the keys has made it",
    }[shown.signature]
    return [
        ["Allows", ", ".join(shown.capabilities) or "nothing"],
        ["Journals and shards", shown.selector or "all"],
        ["Expires", expires],
        ["Issued", shown.issued or "not said"],
        *([["Not before", shown.not_before]] if shown.not_before else []),
        ["Subject", shown.subject or "not said"],
        *([["Id", shown.id]] if shown.id else []),
        ["Key", shown.key_id or "not said"],
        ["Signature", signature],
    ]


# ---------------------------------------------------------------- keys


@dataclass(frozen=True, slots=True)
class KeyState:
    """Key of a cluster.

    Attributes:
        id: its id, or its fingerprint.
        accepted_by: members that accept it.
        missing_at: members that answered, and do not accept it.
        signs_at: members that sign their own calls with it.
        verdict: what can be done with it, in words.
        can_go: True if it can be removed from all members.
    """

    id: str
    accepted_by: list[str]
    missing_at: list[str]
    signs_at: list[str]
    verdict: str
    can_go: bool


async def run_check(invocation: Invocation) -> None:
    """Show which keys the members accept.

    Raises:
        CommandFailedError: the key cannot go, or members accept different keys.
        GazetteError: the broker at the address did not answer.
    """
    settings = with_secrets(CHECK_KEYS, invocation.settings(CHECK_KEYS))
    wanted = Authority(settings.auth_keys).key_ids if settings.auth_keys.strip() else ()
    request = clpb.MembersRequest()
    answer = await call_cluster(invocation, MEMBERS_RPC, request, MEMBERS_TIMEOUT_S)
    accepted, silent = accepted_keys(answer.members)
    states = key_states(accepted, silent, wanted)
    if settings.format == "json":
        shown = {
            "keys": [asdict(each) for each in states],
            "members": {name: list(keys) for name, keys in accepted.items()},
            "unknown": silent,
        }
        sys.stdout.write(orjson.dumps(shown).decode() + "\n")
    else:
        rows = [
            [each.id, f"{len(each.accepted_by)}/{len(accepted)}", each.verdict] for each in states
        ]
        write_table(["Key", "Members", "Verdict"], rows)
    sys.stdout.flush()
    _judge(invocation.arguments, states, silent)


def accepted_keys(
    members: Sequence[clpb.Member],
) -> tuple[Mapping[str, Sequence[str]], dict[str, str]]:
    """Return the keys by member, and of those whose keys are not known, why.

    Admission without a token counts as no key.
    """
    accepted: dict[str, Sequence[str]] = {}
    silent: dict[str, str] = {}
    for member in members:
        name = f"{member.id.zone}/{member.id.suffix}"
        if not member.version:
            silent[name] = member.error or "it is of another implementation, and does not say"
        else:
            accepted[name] = [each for each in member.key_ids if each != PASS_THROUGH_KEY]
    return accepted, silent


def key_states(
    accepted: Mapping[str, Sequence[str]], silent: Mapping[str, str], wanted: Collection[str] = ()
) -> list[KeyState]:
    """Return the keys of a cluster.

    Args:
        accepted: keys by member, the one that signs first.
        silent: members whose keys are not known.
        wanted: further keys that members should accept.
    """
    signing = {keys[0] for keys in accepted.values() if keys}
    everywhere = {key for key in signing if all(key in keys for keys in accepted.values() if keys)}
    found = dict.fromkeys([*(key for keys in accepted.values() for key in keys), *wanted])
    states = []
    for key in found:
        by = [name for name, keys in accepted.items() if key in keys]
        missing = [name for name, keys in accepted.items() if key not in keys]
        signs = [name for name, keys in accepted.items() if keys[:1] == [key]]
        can_go = False
        if signs:
            verdict = f"in use: it signs at {_some(signs)}"
            if missing:
                verdict += f", and {_some(missing)} lack it: add it there at once"
        elif silent:
            verdict = f"not known: {_some(list(silent))} did not say what they accept"
        elif signing - everywhere:
            verdict = "stays: another key signs that not all members accept yet"
        elif not by:
            verdict = "not known to any member: add it to all, as a further key"
        elif key in wanted and missing:
            verdict = f"may not sign yet: {_some(missing)} lack it"
        else:
            verdict, can_go = "can go, with the tokens that it has signed", True
            if not missing:
                verdict = "may sign; " + verdict
        states.append(KeyState(key, by, missing, signs, verdict, can_go))
    return states


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def _judge(
    arguments: Sequence[str],
    states: Sequence[KeyState],
    silent: Mapping[str, str],
) -> None:
    """Raise a CommandFailedError if what was asked for does not hold."""
    for name, reason in silent.items():
        sys.stderr.write(f"gazctl: the keys of {name} are not known: {reason}\n")
    if arguments:
        (key,) = arguments
        state = next((each for each in states if each.id == key), None)
        if state is None:
            known = ", ".join(each.id for each in states) or "none"
            raise CommandFailedError(f"no member accepts a key {key!r}; the keys are: {known}")
        if not state.can_go:
            raise CommandFailedError(f"the key {key} cannot go: {state.verdict}")
        return
    if not states:
        raise CommandFailedError(
            "no member has keys: everybody may do everything; give them by --broker.auth-keys-file"
        )
    if lacking := [each for each in states if each.missing_at]:
        raise CommandFailedError(
            f"{_some(lacking[0].missing_at)} lack the key {lacking[0].id}, which others accept; add"
            " it to their --broker.auth-keys-file"
        )
    if silent:
        raise CommandFailedError(f"the keys of {_some(list(silent))} are not known")

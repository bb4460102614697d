"""Bearer tokens: capabilities and the journals they allow (protocol section 12).

A token is a JWT with claims ``cap`` (capability mask), ``sel`` (label selector) and ``exp``.
Clients and brokers that share the keys sign a narrow token for each call. :func:`admit_change`
decides if a token allows to change a journal.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Any, Protocol

from google.protobuf.message import Message

from gazette_sdk.errors import ConfigurationError, UnauthenticatedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.labels import journal_selector, label_set, matches, matches_journal

LEEWAY_S = 5.0
"""Greatest difference between the clocks of signer and verifier."""
KEY_BYTES_MIN = 8
"""Least length of a server's key. Verifying tokens needs none, and 32 bytes are recommended."""

PASS_THROUGH_KEY = "AA=="  # noqa: S105 - it is no key
"""Entry of the keys that admits requests without a token."""
PASS_THROUGH_TTL_S = 3600.0
"""Greatest duration of a call without a token."""

_HOUR_S = 3600.0
_MINUTE_S = 60.0
_SCHEME = "Bearer "
_VERIFIED_TOKENS_MOST = 1024
"""Number of tokens whose verified signature is cached: a client sends a long-lived token with every
call."""


class Capability(IntFlag):
    """Rights of a token. Bits from 2^16 on belong to applications."""

    LIST = 2
    APPLY = 4
    READ = 8
    APPEND = 16
    REPLICATE = 32
    ALL = 0xFFFFFFFF


_BASIC = (
    Capability.LIST,
    Capability.APPLY,
    Capability.READ,
    Capability.APPEND,
    Capability.REPLICATE,
)


@dataclass(frozen=True, slots=True)
class Claims:
    """Rights of a verified caller.

    Attributes:
        capability: capability mask.
        selector: journals that the token allows; an empty selector matches all.
        expires_at: Unix time in seconds at which calls of the token end; infinite without keys.
    """

    capability: int
    selector: pb.LabelSelector
    expires_at: float

    @property
    def allows_every_journal(self) -> bool:
        """True if the selector is empty."""
        return not self.selector.include.labels and not self.selector.exclude.labels


@dataclass(frozen=True, slots=True)
class RequestedClaims:
    """Claims of a token that a client signs for one call.

    Attributes:
        capability: capability mask.
        selector: journals.
        ttl_s: lifetime in seconds.
    """

    capability: Capability
    selector: pb.LabelSelector
    ttl_s: float


def claims_for(request: Message) -> RequestedClaims:
    """Return the narrow claims that a holder of the keys signs for a call, by its first request.

    Raises:
        TypeError: the message is no request of a known service.
    """
    if request.DESCRIPTOR.file.package == clpb.DESCRIPTOR.package:
        return _claims_to_view(request)
    return _claims_to_call(request)


def _claims_to_call(request: Message) -> RequestedClaims:
    """Return the claims for a call of the journal service or the shard service."""
    if isinstance(request, pb.ListRequest | cpb.ListRequest):
        return RequestedClaims(Capability.LIST, request.selector, _HOUR_S)
    if isinstance(request, pb.ApplyRequest | cpb.ApplyRequest | cpb.UnassignRequest):
        return RequestedClaims(Capability.APPLY, pb.LabelSelector(), _MINUTE_S)
    if isinstance(request, pb.ReadRequest | pb.FragmentsRequest | pb.AppendRequest):
        is_append = isinstance(request, pb.AppendRequest)
        capability = Capability.APPEND if is_append else Capability.READ
        return RequestedClaims(capability, journal_selector(request.journal), _HOUR_S)
    if isinstance(request, pb.ReplicateRequest):
        return RequestedClaims(
            Capability.REPLICATE, journal_selector(request.proposal.journal), _HOUR_S
        )
    if isinstance(request, pb.FragmentStoreHealthRequest):
        # A store that no journal names yet is checked for those who may create one with it.
        return RequestedClaims(Capability.READ | Capability.APPLY, pb.LabelSelector(), _MINUTE_S)
    if not isinstance(request, cpb.StatRequest | cpb.GetHintsRequest | cpb.StateRequest):
        raise TypeError(f"{type(request).__name__} is no request of a known service")
    shard = pb.LabelSelector(include=label_set((("id", request.shard),)))
    return RequestedClaims(Capability.READ, shard, _HOUR_S)


def _claims_to_view(request: Message) -> RequestedClaims:
    """Return the claims for a call about a cluster as a whole."""
    if isinstance(request, clpb.DrainRequest):
        return RequestedClaims(Capability.APPLY, pb.LabelSelector(), _MINUTE_S)
    if isinstance(request, clpb.JournalsPageRequest | clpb.ShardsPageRequest):
        return RequestedClaims(Capability.LIST | Capability.READ, request.selector, _MINUTE_S)
    capability = Capability.READ if isinstance(request, clpb.HeadsRequest) else Capability.LIST
    return RequestedClaims(capability, pb.LabelSelector(), _HOUR_S)


# ---------------------------------------------------------------- clients


class Authorizer(Protocol):
    """Source of the ``authorization`` metadata of calls."""

    def header(
        self, capability: int, selector: pb.LabelSelector, ttl_s: float, now: float
    ) -> str | None:
        """Return the value of the header, or ``None`` for none."""


@dataclass(frozen=True, slots=True)
class FixedToken:
    """An authorizer that attaches the same token to all calls.

    Args:
        token: the token, without ``Bearer``.
    """

    token: str = field(repr=False)

    def header(
        self,
        capability: int,  # noqa: ARG002 - the token has its own
        selector: pb.LabelSelector,  # noqa: ARG002 - the token has its own
        ttl_s: float,  # noqa: ARG002 - the token has its own
        now: float,  # noqa: ARG002 - the token has its own
    ) -> str | None:
        """Return ``Bearer`` and the token."""
        return _SCHEME + self.token


def may_be_limited(authorizer: Authorizer | None) -> bool:
    """Return True if calls may have a token with a selector, which listings then apply.

    A token that signs for each call allows what the call asks for. One that cannot be read, and an
    authorizer of another class, may have any selector.
    """
    if not isinstance(authorizer, FixedToken):
        return not (authorizer is None or isinstance(authorizer, Authority | AllowAll))
    try:
        token = unverified(authorizer.token)
    except UnauthenticatedError:
        return True
    return not token.claims.allows_every_journal


# ---------------------------------------------------------------- servers


class Authority:
    """Signer and verifier of tokens, with shared keys.

    Args:
        keys: standard-base64 keys, separated by white space or commas. The first one signs,
            all verify. ``AA==`` among them admits requests without a token. A key may have an id:
            ``ID:KEY``. Then tokens that it signs have the header ``kid``, and a token with that
            header is verified with this key alone. Other tokens are verified with all keys.

    Raises:
        ConfigurationError: a key is not base64, or there is none beside ``AA==``.
    """

    def __init__(self, keys: str) -> None:
        from gazette_sdk.protocol import signatures  # noqa: PLC0415 - costly, and needs keys

        self._signatures = signatures
        self._keys, self._pass_through = parse_keys(keys)
        self._ids = key_ids(keys)
        self._verified: OrderedDict[str, Token] = OrderedDict()

    def replace(self, keys: str) -> None:
        """Sign and verify with other keys from now on.

        Raises:
            ConfigurationError: as the constructor. The earlier keys stay in use.
        """
        self._keys, self._pass_through = parse_keys(keys)
        self._ids = key_ids(keys)
        self._verified.clear()

    @property
    def key_count(self) -> int:
        """Number of keys that verify."""
        return len(self._keys)

    @property
    def key_ids(self) -> tuple[str, ...]:
        """Names of the keys that verify: their ids, or short fingerprints of keys without one.

        ``AA==`` is among them where requests without a token are admitted.
        """
        named = zip(self._ids, self._keys, strict=True)
        names = tuple(name or self._fingerprint(key) for name, key in named)
        return (*names, PASS_THROUGH_KEY) if self._pass_through else names

    def _fingerprint(self, key: bytes) -> str:
        """Return a name of a key, from which the key cannot be found."""
        return "unnamed-" + self._signatures.fingerprint(key)

    @property
    def requires_tokens(self) -> bool:
        """True if requests without a token are refused."""
        return not self._pass_through

    def sign(
        self,
        capability: int,
        selector: pb.LabelSelector,
        ttl_s: float,
        now: float,
        *,
        subject: str = "",
    ) -> str:
        """Return a token, without ``Bearer``.

        Args:
            capability: capability mask.
            selector: journals that the token allows.
            ttl_s: lifetime in seconds.
            now: Unix time in seconds.
            subject: who the token is for, in audit logs; empty for no one in particular.
        """
        payload: dict[str, Any] = {
            "cap": int(capability),
            "sel": _selector_json(selector),
            "exp": math.ceil(now + ttl_s),
            "iat": int(now),
        }
        if subject:
            payload["sub"] = subject
        return self._signatures.sign(
            json.dumps(payload, separators=(",", ":")).encode(),
            self._keys[0],
            {"kid": self._ids[0]} if self._ids[0] else None,
        )

    def header(
        self, capability: int, selector: pb.LabelSelector, ttl_s: float, now: float
    ) -> str | None:
        """Return ``Bearer`` and a token signed for the call; see :meth:`sign`."""
        return _SCHEME + self.sign(capability, selector, ttl_s, now)

    def verify(self, header: str | None, required: Capability, now: float) -> Claims:
        """Return the claims of a caller.

        Args:
            header: its ``authorization`` header, if it sent one.
            required: capability that the call needs.
            now: Unix time in seconds.

        Raises:
            UnauthenticatedError: in checking order, the header is missing, does not begin with
                ``Bearer``, has a token that is invalid or expired or lacks the capability.
        """
        if header is None:
            if self._pass_through:
                return Claims(int(required), pb.LabelSelector(), now + PASS_THROUGH_TTL_S)
            raise UnauthenticatedError(
                "missing authorization header: sign in with a token or the cluster's keys"
            )
        if not header.startswith(_SCHEME):
            raise UnauthenticatedError(
                "authorization header must begin with `Bearer `: send `Authorization: Bearer TOKEN`"
            )
        verified = self.verify_signature(header[len(_SCHEME) :])
        verified.check_times(now)
        missing = required & ~verified.claims.capability
        if missing:
            raise UnauthenticatedError(
                f"token lacks the required capability {_first_name(missing)}"
            )
        return verified.claims

    def identity(self, header: str | None) -> tuple[str, str]:
        """Return the claim ``sub`` of a caller's token, and its ``jti`` or else its key id.

        They are empty if the token has none, or if its signature is not good.
        """
        if header is None or not header.startswith(_SCHEME):
            return "", ""
        token = header[len(_SCHEME) :]
        try:
            verified = self.verify_signature(token)
        except UnauthenticatedError:
            return "", ""
        return verified.subject, verified.token_id or str(self._signatures.key_id(token) or "")

    def verify_signature(self, token: str) -> Token:
        """Return a token that one of the keys has signed. Its times are not checked.

        Raises:
            UnauthenticatedError: none has, or the token is malformed.
        """
        known = self._verified.get(token)
        if known is not None:
            self._verified.move_to_end(token)
            return known
        verified = _parse_payload(self._payload(token))
        self._verified[token] = verified
        if len(self._verified) > _VERIFIED_TOKENS_MOST:
            self._verified.popitem(last=False)
        return verified

    def _payload(self, token: str) -> bytes:
        for key in self._keys_of(token):
            if (payload := self._signatures.verify(token, key)) is not None:
                return payload
        raise UnauthenticatedError("invalid token: no configured key made its signature")

    def _keys_of(self, token: str) -> Sequence[bytes]:
        """Return the keys that may have signed a token."""
        if any(self._ids) and (key_id := self._signatures.key_id(token)) in self._ids and key_id:
            return [key for key, name in zip(self._keys, self._ids, strict=True) if name == key_id]
        return self._keys


_EVERYTHING = Claims(int(Capability.ALL), pb.LabelSelector(), math.inf)


class AllowAll:
    """Authority without keys: every caller has every right."""

    key_count = 0
    key_ids: tuple[str, ...] = ()
    requires_tokens = False

    def header(
        self,
        capability: int,  # noqa: ARG002 - there is no header
        selector: pb.LabelSelector,  # noqa: ARG002 - there is no header
        ttl_s: float,  # noqa: ARG002 - there is no header
        now: float,  # noqa: ARG002 - there is no header
    ) -> str | None:
        """Return None: requests need no header."""
        return None

    def verify(
        self,
        header: str | None,  # noqa: ARG002 - no header is checked
        required: Capability,  # noqa: ARG002 - everything is allowed
        now: float,  # noqa: ARG002 - the claims never expire
    ) -> Claims:
        """Return claims of every capability over all journals, which never expire."""
        return _EVERYTHING

    def identity(self, header: str | None) -> tuple[str, str]:  # noqa: ARG002 - no header is checked
        """Return empty texts: no one is known."""
        return "", ""


def authority_for(keys: str | None) -> Authority | AllowAll:
    """Return the authority of a string of keys; :class:`AllowAll` where it is absent or empty.

    Raises:
        ConfigurationError: as :class:`Authority`. A blank string is refused, too: a secret that was
            not filled in must not open a cluster to everybody.
    """
    return Authority(keys) if keys else AllowAll()


def check_key_lengths(keys: str) -> None:
    """Check that keys are long enough to protect a server.

    Raises:
        ConfigurationError: as :class:`Authority`, or a key has less than :data:`KEY_BYTES_MIN`
            bytes.
    """
    for index, key in enumerate(parse_keys(keys)[0]):
        if len(key) < KEY_BYTES_MIN:
            raise ConfigurationError(
                f"authorization key {index + 1} has {len(key)} bytes, less than {KEY_BYTES_MIN}"
                " bytes: everybody can guess it; make one with `openssl rand -base64 32`"
            )


def parse_keys(keys: str) -> tuple[tuple[bytes, ...], bool]:
    """Return the keys of a string, and whether requests without a token are admitted.

    Raises:
        ConfigurationError: a key is not base64, or there is none beside ``AA==``.
    """
    found: list[bytes] = []
    pass_through = False
    for index, text in enumerate(keys.replace(",", " ").split()):
        if text == PASS_THROUGH_KEY:
            pass_through = True
            continue
        try:
            found.append(base64.b64decode(text.rpartition(":")[2], validate=True))
        except binascii.Error as error:
            raise ConfigurationError(
                f"authorization key {index + 1} is not standard base64 ({error}): make one with "
                "`openssl rand -base64 32`"
            ) from None
    if not found:
        raise ConfigurationError(
            "at least one authorization key is required: make one with `openssl rand -base64 32`"
        )
    return tuple(found), pass_through


def key_ids(keys: str) -> tuple[str, ...]:
    """Return the ids of the keys of a string, in order; empty for a key without an id."""
    texts = keys.replace(",", " ").split()
    return tuple(text.rpartition(":")[0] for text in texts if text != PASS_THROUGH_KEY)


def admit_change(
    claims: Claims,
    change: pb.ApplyRequest.Change,
    existing: pb.JournalSpec | None = None,
    *,
    allowed_stores: Collection[str] = (),
) -> None:
    """Check that the caller's claims allow to change a journal.

    An upsert must match by the new spec's labels and name, a deletion by the name alone. A journal
    that exists must match, too: otherwise a caller could put its own label on any journal. A caller
    with a selector must not change where content is stored, because stores rewrite paths
    (``find`` and ``replace``) and postfixes extend them, so that one journal could read and write
    the fragments of another.

    Args:
        claims: the caller's.
        change: the change.
        existing: current spec of the journal, if it exists. Claims without a selector need none.
        allowed_stores: URLs of stores that any caller may give to its journals.

    Raises:
        UnauthenticatedError: they do not allow it.
    """
    if claims.allows_every_journal:
        return
    name = change.delete or change.upsert.name
    if change.delete:
        is_admitted = matches(claims.selector, label_set(name=name))
    else:
        is_admitted = matches_journal(claims.selector, change.upsert)
    if existing is not None:
        is_admitted = is_admitted and matches_journal(claims.selector, existing)
    if not is_admitted:
        raise UnauthenticatedError(
            f"the token's selector does not allow to change {name}; use a token whose selector "
            "matches the journal's name and labels, before and after the change"
        )
    if not change.delete:
        _admit_storage(change.upsert.fragment, existing, allowed_stores, name)


def _admit_storage(
    fragment: pb.JournalSpec.Fragment,
    existing: pb.JournalSpec | None,
    allowed_stores: Collection[str],
    name: str,
) -> None:
    """Check that a caller with a selector does not change where content is stored.

    Raises:
        UnauthenticatedError: it does.
    """
    current = existing.fragment if existing is not None else pb.JournalSpec.Fragment()
    for store in fragment.stores:
        if store not in current.stores and store not in allowed_stores:
            raise UnauthenticatedError(
                f"a token with a selector does not allow to store {name} in {store!r}; use a token "
                "without a selector, or add the store to the brokers' --broker.allow-store"
            )
    if fragment.path_postfix_template not in {"", current.path_postfix_template}:
        raise UnauthenticatedError(
            f"a token with a selector does not allow to change the path postfix of {name}; use a "
            "token without a selector"
        )


# ---------------------------------------------------------------- tokens


@dataclass(frozen=True, slots=True)
class Token:
    """Content of a token.

    Attributes:
        claims: rights of its holder.
        issued_at: Unix time at which it was signed; minus infinity if it does not say.
        not_before: Unix time from which on it is valid; minus infinity if it does not say.
        subject: who it is for; empty if it does not say.
        token_id: its id; empty if it has none.
    """

    claims: Claims
    issued_at: float
    not_before: float
    subject: str
    token_id: str

    def check_times(self, now: float) -> None:
        """Check that the token is valid at a time.

        Args:
            now: Unix time in seconds.

        Raises:
            UnauthenticatedError: it is not.
        """
        if now >= self.claims.expires_at + LEEWAY_S:
            raise UnauthenticatedError("invalid token: it has expired; get a new one")
        if self.issued_at > now + LEEWAY_S:
            raise UnauthenticatedError("invalid token: issued in the future; check the clocks")
        if self.not_before > now + LEEWAY_S:
            raise UnauthenticatedError("invalid token: not valid yet")


def unverified(token: str) -> Token:
    """Return the content of a token, which anybody may have signed.

    Raises:
        UnauthenticatedError: it is malformed.
    """
    try:
        _, payload, _ = token.split(".")
        content = base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))
    except ValueError:
        raise UnauthenticatedError(
            "invalid token: it is not three parts of base64 with dots between them"
        ) from None
    return _parse_payload(content)


def _parse_payload(payload: bytes) -> Token:
    try:
        claims = json.loads(payload)
    except ValueError:
        raise UnauthenticatedError("invalid token: its payload is not JSON") from None
    if not isinstance(claims, dict):
        raise UnauthenticatedError("invalid token: its payload is not a JSON object")
    if "exp" not in claims:
        raise UnauthenticatedError("invalid token: claim `exp` is required")
    capability = _number(claims, "cap", 0)
    if not 0 <= capability <= Capability.ALL or capability != int(capability):
        raise UnauthenticatedError("invalid token: claim `cap` is not a capability mask")
    return Token(
        Claims(
            int(capability), _parse_selector(claims.get("sel")), _number(claims, "exp", math.inf)
        ),
        issued_at=_number(claims, "iat", -math.inf),
        not_before=_number(claims, "nbf", -math.inf),
        subject=str(claims.get("sub", "")),
        token_id=str(claims.get("jti", "")),
    )


def _number(claims: dict[str, Any], name: str, absent: float) -> float:
    value = claims.get(name)
    if value is None and name != "exp":
        return absent
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise UnauthenticatedError(f"invalid token: claim `{name}` is not a number")
    return value


def _selector_json(selector: pb.LabelSelector) -> dict[str, Any]:
    return {
        "include": {"labels": _labels_json(selector.include)},
        "exclude": {"labels": _labels_json(selector.exclude)},
    }


def _labels_json(labels: pb.LabelSet) -> list[dict[str, str | bool]] | None:
    return [
        {descriptor.name: value for descriptor, value in label.ListFields()}
        for label in labels.labels
    ] or None


def _parse_selector(value: object) -> pb.LabelSelector:
    selector = pb.LabelSelector()
    if value is None:
        return selector
    try:
        for half, labels in (("include", selector.include), ("exclude", selector.exclude)):
            for label in _member(_member(value, half, _HALVES), "labels", {"labels"}) or ():
                if not isinstance(label, dict):
                    raise TypeError("a label is not an object")  # noqa: TRY301
                _check_keys(label, _LABEL_KEYS)
                labels.labels.add(
                    name=label.get("name") or "",
                    value=label.get("value") or "",
                    prefix=label.get("prefix") or False,
                )
    except (TypeError, ValueError) as error:
        raise UnauthenticatedError(
            f"invalid token: claim `sel` is not a label selector ({error})"
        ) from None
    return selector


_HALVES = frozenset({"include", "exclude"})
_LABEL_KEYS = frozenset({"name", "value", "prefix"})


def _member(value: object, name: str, known: AbstractSet[str]) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise TypeError(f"expected an object with {name!r}")
    _check_keys(value, known)
    return value.get(name)


def _check_keys(value: Mapping[str, object], known: AbstractSet[str]) -> None:
    """Refuse unknown keys: a selector without what they say may allow more than was meant."""
    if unknown := value.keys() - known:
        raise ValueError(f"unknown key {min(unknown)!r}")


def _first_name(missing: int) -> str:
    for capability in _BASIC:
        if missing & capability:
            return str(capability.name)
    return f"{missing:#x}"

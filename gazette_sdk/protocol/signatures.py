"""Signatures of tokens: JSON web signatures by HMAC (protocol section 12).

A module of their own, because the library costs a tenth of the start of a program without keys.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Any

import jwt
from jwt.algorithms import HMACAlgorithm

from gazette_sdk.errors import UnauthenticatedError


class _Hmac(HMACAlgorithm):
    """HMAC with keys of any length: the operator of the cluster chooses it."""

    def check_key_length(self, key: bytes) -> None:
        """Accept every length."""


def _make_jws() -> jwt.PyJWS:
    jws = jwt.PyJWS(algorithms=[])
    for name, hash_algorithm in (("HS256", HMACAlgorithm.SHA256), ("HS384", HMACAlgorithm.SHA384)):
        jws.unregister_algorithm(name) if name in jws.get_algorithms() else None
        jws.register_algorithm(name, _Hmac(hash_algorithm))
    return jws


_JWS = _make_jws()


def sign(payload: bytes, key: bytes, headers: Mapping[str, Any] | None = None) -> str:
    """Return a token: a payload with its signature by SHA-256.

    Args:
        payload: claims as JSON.
        key: signs it.
        headers: further header fields.
    """
    return _JWS.encode(payload, key, algorithm="HS256", headers=dict(headers or {}))


def verify(token: str, key: bytes) -> bytes | None:
    """Return the payload of a token; None if the key did not sign it.

    Raises:
        UnauthenticatedError: the token is malformed.
    """
    try:
        payload: bytes = _JWS.decode(token, key, algorithms=["HS256", "HS384"])
    except jwt.InvalidSignatureError:
        return None
    except jwt.InvalidTokenError as error:
        raise UnauthenticatedError(f"invalid token: {error}") from None
    except UnicodeEncodeError:  # a header of HTTP holds any bytes
        raise UnauthenticatedError("invalid token: it is not ASCII text") from None
    return payload


def key_id(token: str) -> object:
    """Return the id of the key that signed a token, as its header has it; None for none."""
    try:
        return jwt.get_unverified_header(token).get("kid")
    except jwt.InvalidTokenError:
        return None  # verification finds the reason


def fingerprint(key: bytes) -> str:
    """Return a short text by which equal keys are recognized: 32 bits of an HMAC of a constant."""
    return hmac.digest(key, b"fingerprint of a Gazette key", "sha256")[:4].hex()

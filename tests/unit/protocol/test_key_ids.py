import base64

import jwt
import pytest

from gazette_sdk.errors import UnauthenticatedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authority, Capability

NOW = 1_800_000_000.0
OLD, NEW = (base64.b64encode(text * 4).decode() for text in (b"old-key ", b"new-key "))


def token(keys):
    return Authority(keys).sign(Capability.READ, pb.LabelSelector(), 60, NOW)


def verifies(keys, signed):
    try:
        Authority(keys).verify("Bearer " + signed, Capability.READ, NOW)
    except UnauthenticatedError:
        return False
    return True


def test_a_key_with_an_id_names_itself_in_its_tokens():
    assert jwt.get_unverified_header(token(f"2026:{NEW},{OLD}"))["kid"] == "2026"
    assert "kid" not in jwt.get_unverified_header(token(f"{NEW},2025:{OLD}"))


def test_a_token_with_an_id_is_verified_with_that_key_alone():
    keys = f"2026:{NEW} 2025:{OLD}"
    assert verifies(keys, token(f"2026:{NEW}"))
    assert verifies(keys, token(f"2025:{OLD}"))
    assert not verifies(keys, token(f"2025:{NEW}")), "another key signed it than it says"


@pytest.mark.parametrize("keys", [f"2026:{NEW} 2025:{OLD}", f"{NEW} {OLD}", f"{NEW} x:{OLD}"])
def test_all_keys_are_tried_for_a_token_without_an_id_or_with_an_unknown_one(keys):
    assert verifies(keys, token(OLD))
    assert verifies(keys, token(f"elsewhere:{OLD}"))


def test_replaced_keys_are_used_at_once_also_for_tokens_that_were_verified_before():
    authority, signed = Authority(OLD), token(OLD)
    authority.verify("Bearer " + signed, Capability.READ, NOW)
    authority.replace(NEW)
    with pytest.raises(UnauthenticatedError):
        authority.verify("Bearer " + signed, Capability.READ, NOW)
    authority.verify("Bearer " + token(NEW), Capability.READ, NOW)

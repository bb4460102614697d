"""Kind of JSON messages: pydantic models."""

from __future__ import annotations

from typing import Any

import pydantic
import pydantic_core

from gazette_sdk.message.kinds.json_kind import KEY, JsonKind, own_uuid
from gazette_sdk.user_code import call, text_of

__all__ = ["PydanticKind"]


class PydanticKind(JsonKind):
    """Kind of pydantic models, by their aliases where they have some."""

    def __init__(self, message_type: type[Any]) -> None:
        names = {
            each.serialization_alias or each.alias or name: name
            for name, each in message_type.model_fields.items()
        }
        key = getattr(message_type, "uuid_field", KEY)
        strict = message_type.model_config.get("extra", "ignore") != "ignore"
        super().__init__(
            message_type,
            self._validated,
            key=key,
            field=names.get(key),
            strict=strict,
            names=names,
        )
        if self._field is None and key in _computed_keys(message_type):
            raise own_uuid(f"{message_type.__qualname__} has a computed field {key!r}")
        self._takes_extra = message_type.model_config.get("extra") == "allow"
        self._dumps = self._encode
        self._serializer = message_type.__pydantic_serializer__
        self._validator = message_type.__pydantic_validator__

    def _encode(self, message: Any, *, warns: bool = True) -> bytes:
        if self._takes_extra and self.key in (message.__pydantic_extra__ or ()):
            raise own_uuid(f"the {self.message_type.__qualname__} has an extra field {self.key!r}")
        try:
            body = call(self._serialized, message, warns)
        except pydantic_core.PydanticSerializationError as error:
            raise ValueError(text_of(error)) from error
        if body[:1] != b"{":
            raise ValueError("its serializer makes no object of it, which could hold a UUID")
        return body

    def _serialized(self, message: Any, warns: bool) -> bytes:  # noqa: FBT001 - called by position
        return bytes(self._serializer.to_json(message, by_alias=True, warnings=warns))

    def _dumps_empty(self, message: Any) -> bytes:
        return self._encode(message, warns=False)

    def _validated(self, payload: bytes) -> Any:
        try:
            return self._validator.validate_json(payload)
        except pydantic.ValidationError as error:
            # The error's own text has many lines.
            raise ValueError("; ".join(map(_complaint, error.errors()))) from error


def _computed_keys(message_type: type[pydantic.BaseModel]) -> set[str]:
    fields = message_type.model_computed_fields
    return {each.alias or name for name, each in fields.items()}


def _complaint(error: pydantic_core.ErrorDetails) -> str:
    place = ".".join(map(str, error["loc"]))
    return f"{place}: {error['msg']}" if place else error["msg"]

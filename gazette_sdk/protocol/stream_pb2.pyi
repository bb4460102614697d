from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("zone", "suffix", "wire_version", "content_bytes_max", "message_bytes_max")
    ZONE_FIELD_NUMBER: _ClassVar[int]
    SUFFIX_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTENT_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    zone: str
    suffix: str
    wire_version: int
    content_bytes_max: int
    message_bytes_max: int
    def __init__(self, zone: _Optional[str] = ..., suffix: _Optional[str] = ..., wire_version: _Optional[int] = ..., content_bytes_max: _Optional[int] = ..., message_bytes_max: _Optional[int] = ...) -> None: ...

class CallHead(_message.Message):
    __slots__ = ("metadata", "timeout_ms", "after_success")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    METADATA_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    AFTER_SUCCESS_FIELD_NUMBER: _ClassVar[int]
    metadata: _containers.ScalarMap[str, str]
    timeout_ms: int
    after_success: bool
    def __init__(self, metadata: _Optional[_Mapping[str, str]] = ..., timeout_ms: _Optional[int] = ..., after_success: _Optional[bool] = ...) -> None: ...

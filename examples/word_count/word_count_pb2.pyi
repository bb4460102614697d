from gazette_sdk.protocol import broker_pb2 as _broker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NGramCount(_message.Message):
    __slots__ = ("uuid", "n_gram", "count")
    UUID_FIELD_NUMBER: _ClassVar[int]
    N_GRAM_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    uuid: bytes
    n_gram: str
    count: int
    def __init__(self, uuid: _Optional[bytes] = ..., n_gram: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class QueryRequest(_message.Message):
    __slots__ = ("header", "prefix", "shard")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    header: _broker_pb2.Header
    prefix: str
    shard: str
    def __init__(self, header: _Optional[_Union[_broker_pb2.Header, _Mapping]] = ..., prefix: _Optional[str] = ..., shard: _Optional[str] = ...) -> None: ...

class QueryResponse(_message.Message):
    __slots__ = ("grams",)
    GRAMS_FIELD_NUMBER: _ClassVar[int]
    grams: _containers.RepeatedCompositeFieldContainer[NGramCount]
    def __init__(self, grams: _Optional[_Iterable[_Union[NGramCount, _Mapping]]] = ...) -> None: ...

"""Protobuf classes for tests, generated without a compiler."""

from __future__ import annotations

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


def protobuf_class(name: str, *, uuid_type: int | None, is_traced: bool = False) -> type:
    """A generated class with a ``text`` and, perhaps, a ``uuid`` and a ``traceparent``."""
    file = descriptor_pb2.FileDescriptorProto(
        name=f"tests/{name}.proto", package="tests", syntax="proto3"
    )
    made = file.message_type.add(name=name)
    kinds = descriptor_pb2.FieldDescriptorProto
    if uuid_type is not None:
        made.field.add(name="uuid", number=1, type=uuid_type, label=kinds.LABEL_OPTIONAL)
    made.field.add(name="text", number=2, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    made.field.add(name="count", number=3, type=kinds.TYPE_UINT64, label=kinds.LABEL_OPTIONAL)
    if is_traced:
        of_text = {"type": kinds.TYPE_STRING, "label": kinds.LABEL_OPTIONAL}
        made.field.add(name="traceparent", number=4, **of_text)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tests.{name}"))


Gram = protobuf_class("Gram", uuid_type=descriptor_pb2.FieldDescriptorProto.TYPE_BYTES)
TracedGram = protobuf_class(
    "TracedGram", uuid_type=descriptor_pb2.FieldDescriptorProto.TYPE_BYTES, is_traced=True
)
NoUuid = protobuf_class("NoUuid", uuid_type=None)
TextUuid = protobuf_class("TextUuid", uuid_type=descriptor_pb2.FieldDescriptorProto.TYPE_STRING)

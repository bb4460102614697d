"""A class of messages that tasks of Spark cannot import, as if it were on the driver alone."""

from pyspark import TaskContext

from support.protobuf_messages import Gram

if TaskContext.get() is not None:
    raise ImportError(f"there is no module {__name__} on this executor")

__all__ = ["Gram"]

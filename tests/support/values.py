"""Messages of one JSON value each, for tests whose handlers get values."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

from gazette_sdk import JsonMessage, shard
from gazette_sdk.testing import Advance, run_handler


@dataclass
class Value(JsonMessage):
    value: Any


def value_handler(**declared):
    """As ``shard.handler``, of a function that gets the values of messages."""

    def decorate(function):
        @functools.wraps(function)
        def handle(txn, message):
            return function(txn, message.value)

        @functools.wraps(function)
        async def handle_later(txn, message):
            await function(txn, message.value)

        is_async = inspect.iscoroutinefunction(function)
        return shard.handler(message=Value, **declared)(handle_later if is_async else handle)

    return decorate


def run_values(application, given, **options):
    """As ``run_handler``, with a message for each value; of published ones, the values.

    A list of JSON is a tuple then.
    """
    messages = [each if isinstance(each, JsonMessage | Advance) else Value(each) for each in given]
    run = run_handler(application, messages, **options)
    return run._replace(published=list(map(_value_of, run.published)))


def _value_of(message):
    value = message.value if isinstance(message, Value) else message
    return tuple(value) if isinstance(value, list) else value

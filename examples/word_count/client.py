"""Client of the n-gram service: publish a text, or ask for counts.

python -m examples.word_count.client publish --file text.txt
python -m examples.word_count.client query --prefix "wood"
"""

import argparse
import json
import os
import sys
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from examples.word_count.word_count_pb2 import (
    PublishRequest,
    PublishResponse,
    QueryRequest,
    QueryResponse,
)

TIMEOUT_S = 30

RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": "word_count.NGram", "method": "Query"}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "1s",
                "maxBackoff": "5s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
"""Queries are tried again while a shard moves to another process. Publishing twice counts twice."""

R = TypeVar("R", bound=Message)


class NGramClient:
    """Client of any process of the application.

    Args:
        address: host and port of the process.
        token: bearer token, where the processes have keys.
    """

    def __init__(self, address: str, token: str = "") -> None:
        self._channel = grpc.insecure_channel(
            address, options=[("grpc.service_config", json.dumps(RETRIES))]
        )
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    def publish(self, text: str) -> None:
        self._call("Publish", PublishRequest(text=text), PublishResponse)

    def query(self, prefix: str, shard: str = "") -> dict[str, int]:
        found = self._call("Query", QueryRequest(prefix=prefix, shard=shard), QueryResponse)
        return {each.n_gram: each.count for each in found.grams}

    def close(self) -> None:
        self._channel.close()

    def _call(self, name: str, request: Message, response_type: type[R]) -> R:
        method = self._channel.unary_unary(
            f"/word_count.NGram/{name}", type(request).SerializeToString, response_type.FromString
        )
        response: R = method(
            request, metadata=self._metadata, timeout=TIMEOUT_S, wait_for_ready=True
        )
        return response


def main() -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(description="Client of the n-gram service.")
    parser.add_argument(
        "--address",
        default=os.environ.get("CONSUMER_ADDRESS", "http://localhost:8080"),
        help="address of a process of the application (CONSUMER_ADDRESS)",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    publish = commands.add_parser("publish", help="count the n-grams of a text")
    publish.add_argument("--file", type=argparse.FileType("r"), default="-", help="default: stdin")
    query = commands.add_parser("query", help="print counts")
    query.add_argument("--prefix", default="", help="of the n-grams")
    query.add_argument("--shard", default="", help="the shard to ask, by its id")
    given = parser.parse_args()

    client = NGramClient(given.address.removeprefix("http://"))
    try:
        if given.command == "publish":
            client.publish(given.file.read())
        else:
            for gram, count in client.query(given.prefix, given.shard).items():
                print(f"{count:>8}  {gram}")
    except grpc.RpcError as error:
        sys.exit(f"{given.address}: {error.code().name}: {error.details()}")
    finally:
        client.close()


if __name__ == "__main__":
    main()

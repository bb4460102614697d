"""An embedded cluster and a publisher in one process, which a test pauses.

Arguments: directory, journals' name, number of messages. It prints a line when it has begun to
publish, publishes until that many messages are acknowledged, reads all of them, and prints them.
"""

from __future__ import annotations

import sys
import time

from gazette_sdk import Publisher, Reader
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.message import mapping

SPEC = """
name: {name}
replication: 1
labels:
  - {{name: content-type, value: application/x-ndjson}}
  - {{name: topic, value: pauses}}
fragment: {{length: 65536, compression_codec: NONE, stores: ["file:///"], refresh_interval: 1s}}
"""


def main() -> None:
    data, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with EmbeddedCluster(data, lease_ttl_s=1, sync_etcd=False) as cluster:
        cluster.apply(SPEC.format(name=name))
        by_key = mapping.modulo("topic=pauses", key=lambda message: str(message["number"]))
        reader = Reader(dict, f"name={name}", transport=cluster.transport, block=True)
        with Publisher(mapping=by_key, transport=cluster.transport) as publisher:
            for number in range(count):
                publisher.publish({"number": number}).result()
                if number == 0:
                    print("publishing", flush=True)
                time.sleep(0.01)
        for envelope in reader:
            print(envelope.message["number"], flush=True)
            if envelope.message["number"] == count - 1:
                break
        reader.close()


if __name__ == "__main__":
    main()

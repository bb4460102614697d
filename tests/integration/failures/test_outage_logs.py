"""An outage of the brokers is one line in the log of a client, and one when it is over."""

import re
import time

from crash.dev_cluster import DevCluster
from gazette_sdk import Publisher, Reader, connect, mapping
from gazette_sdk.transport import loop as sdk_loop

SPEC = """
name: a/journal
replication: 1
labels:
  - {name: content-type, value: application/x-ndjson}
  - {name: topic, value: outages}
fragment: {length: 65536, compression_codec: NONE, stores: ["file:///"], refresh_interval: 1s}
"""
OUTAGE_S = 4.0


def lines_of(operation, caplog):
    """Return the lines of an operation's outages, and those of their ends."""
    lines = [text for text in caplog.messages if text.startswith(operation)]
    return lines, [text for text in lines if "works again" in text]


def are_watches_back(caplog):
    lines, ends = lines_of("watch of journals", caplog)
    return len(lines) == 2 * len(ends)


def test_a_client_logs_the_begin_and_the_duration_of_an_outage(tmp_path, caplog):
    with DevCluster(tmp_path / "data") as cluster:
        cluster.apply(SPEC)
        transport = connect(cluster.address)
        messages = iter(reader := Reader(dict, "topic=outages", transport=transport, block=True))
        by_key = mapping.modulo("topic=outages", key=lambda _: "")
        with Publisher(mapping=by_key, transport=transport) as publisher:
            publisher.publish({"n": 1}).result(30)
            assert next(messages).message["n"] == 1
            cluster.kill()
            receipt = publisher.publish({"n": 2})
            time.sleep(OUTAGE_S)  # many attempts fail
            cluster.start()
            receipt.result(30)
            assert next(messages).message["n"] == 2
            deadline = time.monotonic() + 30
            while not are_watches_back(caplog) and time.monotonic() < deadline:
                time.sleep(0.05)  # a watch begins again after its own pause
        reader.close()
        sdk_loop.run(transport.aclose())
    first, last = (text for text in caplog.messages if text.startswith("read of a/journal"))
    assert "failed, and is tried again until it succeeds" in first
    duration = re.search(r"works again after an outage of ([\d.]+) s \(\d+ failures?\)", last)
    assert duration is not None
    assert float(duration[1]) >= OUTAGE_S - 0.5
    for operation in ("append to a/journal", "watch of journals"):
        # Each has a begin and an end. Reader and publisher watch one listing each.
        lines, ends = lines_of(operation, caplog)
        assert len(lines) == 2 * len(ends) <= 4

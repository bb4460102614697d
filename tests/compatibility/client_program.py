"""Client of a cluster that is being upgraded: publishes numbered messages, and reads them.

Each acknowledged message must be read once, in the order of its partition, with its content. The
program runs with this tree and with that of an earlier release: it uses what both have.

It prints the number of acknowledged messages as it goes. When its standard input ends, it stops
publishing, reads what is left, and prints ``verified N``. Its arguments are addresses and a topic.
"""

from __future__ import annotations

import sys
import threading
import time

from gazette_sdk import Publisher, Reader, connect
from gazette_sdk.transport import loop as sdk_loop

PARTITIONS = 4
RATE = 100
TIMEOUT_S = 60.0


def text_of(number: int) -> str:
    return f"{number:07d}" * (1 + number % 50)


class Client:
    def __init__(self, address: str, topic: str) -> None:
        self.topic = topic
        self.acknowledged = 0
        self.read = 0
        self.stopping = threading.Event()
        self.transport = connect(address)
        self.reader = Reader(dict, f"topic={topic}", transport=self.transport, block=True)
        self.next = {f"{topic}/part-{number:03d}": number for number in range(PARTITIONS)}

    def publish(self) -> None:
        begun_s, number = time.monotonic(), 0
        publisher = Publisher(
            lambda message: f"{self.topic}/part-{message['n'] % PARTITIONS:03d}",
            transport=self.transport,
        )
        with publisher:
            while not self.stopping.wait(0.02):
                due = int((time.monotonic() - begun_s) * RATE)
                receipts = [
                    publisher.publish({"n": each, "text": text_of(each)})
                    for each in range(number, due)
                ]
                for receipt in receipts:
                    receipt.result(timeout=TIMEOUT_S)
                number = self.acknowledged = max(number, due)

    def follow(self) -> None:
        for envelope in self.reader:
            number = envelope.message["n"]
            wanted = self.next[envelope.journal]
            if number != wanted or envelope.message["text"] != text_of(number):
                raise AssertionError(
                    f"{envelope.journal} has message {number} at {envelope.begin}, not {wanted}"
                )
            self.next[envelope.journal] = wanted + PARTITIONS
            self.read += 1


def main(address: str, topic: str) -> None:
    client = Client(address, topic)
    failures: list[BaseException] = []

    def run(work) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - reported below
            failures.append(error)

    def wait(holds) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not holds() and not failures:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{client.acknowledged} acknowledged, {client.read} read")
            time.sleep(0.02)
        if failures:
            raise failures[0]

    publishing = threading.Thread(target=run, args=[client.publish])
    reading = threading.Thread(target=run, args=[client.follow], daemon=True)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    for thread in (publishing, reading):
        thread.start()
    while not ended.wait(0.1) and not failures:
        print("acknowledged", client.acknowledged, flush=True)
    client.stopping.set()
    publishing.join()
    wait(lambda: client.read >= client.acknowledged)
    print("verified", client.read, flush=True)
    client.reader.close()
    sdk_loop.run(client.transport.aclose(), TIMEOUT_S)


if __name__ == "__main__":
    main(*sys.argv[1:])

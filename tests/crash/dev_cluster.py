"""A cluster in a process of its own, which can be killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

from gazette_sdk.cluster.child_process import reserve_port

__all__ = ["DevCluster"]


class DevCluster:
    """A `gazette dev` process over one directory. ``with`` starts it, and kills it in the end."""

    def __init__(self, data: Path, *options: str) -> None:
        self.data = data
        self.options = options
        self.output: list[bytes] = []
        self.port = reserve_port()
        self.address = f"http://localhost:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "gazette_sdk.cli.gazette", "dev"),
                *("--data", str(self.data), "--port", str(self.port)),
                *self.options,
            ],
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        # It prints its address once it serves; whoever waits longer than the test may is killed.
        output = b""
        for line in self._process.stdout:
            output += line
            if self.address.encode() in line:
                break
        else:
            raise AssertionError(f"gazette dev did not start: {output.decode()}")
        self._drain = threading.Thread(
            target=lambda: self.output.extend(self._process.stdout), daemon=True
        )
        self._drain.start()

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._ended(10)

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to `gazette dev`, its brokers and its etcd."""
        os.killpg(self._process.pid, number)
        for lock in (self.data / "locks").glob("broker-*.lock"):
            os.kill(int(lock.read_text()), number)
        self.signal_etcd(number)

    def signal_etcd(self, number: signal.Signals) -> None:
        os.kill(int((self.data / "etcd" / "lock").read_text()), number)

    def signal_process(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def apply(self, specs: str) -> None:
        """Create journals."""
        subprocess.run(
            [sys.executable, "-m", "gazette_sdk.cli.gazctl", "journals", "apply"],
            input=specs.encode(),
            env={**os.environ, "GAZETTE_ADDRESS": self.address},
            check=True,
            timeout=60,
        )

    def stop(self) -> int:
        self._process.send_signal(signal.SIGINT)
        return self._ended(60)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self.kill()

    def _ended(self, timeout_s: float) -> int:
        status = self._process.wait(timeout_s)
        self._drain.join(timeout_s)
        self._process.stdout.close()
        return status

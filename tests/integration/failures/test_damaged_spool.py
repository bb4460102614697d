"""Spools that a killed process left, and which were damaged before the next start."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from crash.appends import take_apart
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.errors import OffsetNotYetAvailableError
from integration.failures.journals import append, read, wait_until_stored

KILLED = textwrap.dedent(
    """
    import json, os, signal, sys
    from gazette_sdk.embedded import EmbeddedCluster
    from integration.failures.journals import Writer, spec

    data, name = sys.argv[1:]
    cluster = EmbeddedCluster(data, sync_etcd=False).start()
    cluster.apply(spec(name, codec="GZIP"))
    writer = Writer(cluster.transport, name)
    for _ in range(20):
        writer.append(5000)
    acknowledged = writer.history.acknowledged
    print(json.dumps({begin: content.hex() for begin, content in acknowledged.items()}))
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    """
)


def left_behind(data, name):
    """Return the bytes that a killed process acknowledged, and its spool's content file."""
    tests = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLED, data, name],
        env={**os.environ, "PYTHONPATH": tests},
        stdout=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    told = json.loads(done.stdout)
    # The first append is a fragment of its own, and the others are the second one.
    *_, content = sorted((data / "spools").rglob("*.content"))
    return {int(begin): bytes.fromhex(piece) for begin, piece in told.items()}, content


def test_the_longest_good_beginning_of_a_damaged_spool_is_served(tmp_path, name, warnings_of):
    acknowledged, path = left_behind(tmp_path, name)
    begin = int(path.name.partition("-")[0], 16)
    damaged_at = path.stat().st_size // 2
    damaged = bytearray(path.read_bytes())
    damaged[damaged_at] ^= 1
    path.write_bytes(damaged)

    with EmbeddedCluster(tmp_path, sync_etcd=False) as cluster:
        content, error = read(cluster.transport, name)
        assert isinstance(error, OffsetNotYetAvailableError)
        good = {at: piece for at, piece in acknowledged.items() if at < len(content)}
        assert take_apart(content) == good
        assert len(content) <= begin + damaged_at
        (first_lost,) = sorted(set(acknowledged) - set(good))[:1]
        assert first_lost + len(acknowledged[first_lost]) > begin + damaged_at

        # The damaged file is kept aside, and the log says so.
        aside = path.with_name(path.name + ".damaged")
        assert aside.read_bytes() == damaged
        (told,) = warnings_of(f"{path} of {name} is damaged")
        assert f"its bytes from {len(content)} to {begin + len(damaged)}" in told
        assert f"kept as {aside.name}" in told

        # The journal goes on behind all that was ever acknowledged, at no offset twice.
        end = max(at + len(piece) for at, piece in acknowledged.items())
        assert append(cluster.transport, name, b"on").commit.begin == end
        wait_until_stored(cluster, name)
        assert read(cluster.transport, name, end)[0] == b"on"


@pytest.mark.parametrize("suffix", [".log", ".content"])
def test_a_spool_whose_files_are_lost_is_told(tmp_path, name, suffix, warnings_of):
    acknowledged, path = left_behind(tmp_path, name)
    path.with_suffix(suffix).write_bytes(b"")
    with EmbeddedCluster(tmp_path, sync_etcd=False) as cluster:
        content, _ = read(cluster.transport, name)
        for at, piece in take_apart(content).items():
            assert acknowledged[at] == piece
        assert any("damaged" in told for told in warnings_of(path.stem))

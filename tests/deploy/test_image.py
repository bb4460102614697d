"""The Dockerfile: what it says, and its steps in a root file system instead of a base image."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gazette_sdk import Journals, Publisher, Reader, __version__, connect, mapping
from gazette_sdk.cluster.child_process import reserve_port
from gazette_sdk.transport import loop as sdk_loop
from support.deployments import DEPLOY, ROOT, help_of
from support.etcd import etcd, etcd_server
from support.services import cache_directory, wait_until_it_serves

__all__ = ["etcd", "etcd_server"]

DOCKERFILE = DEPLOY / "Dockerfile"
UID = 10001
TIMEOUT_S = 60.0
STEP_TIMEOUT_S = 900.0

BASE_BYTES = 46_000_000
"""Compressed size of `python:3.11-slim`, which is not measured here."""

BROKER_BYTES_MAX = 100_000_000
CONSUMER_BYTES_MAX = 156_000_000

IN_A_CONSUMER = """
import importlib, importlib.util, io, os, pkgutil, sys
from pathlib import Path

assert os.getuid() == 10001
from gazette_sdk import contrib, shard
shard.RocksStore, shard.SqliteStore
import gazette_sdk.message.columns as columns
for each in pkgutil.iter_modules(columns.__path__):
    importlib.import_module(f"gazette_sdk.message.columns.{each.name}")

# Each library that was stripped can be loaded, and computes.
place = Path(importlib.util.find_spec("pyarrow").origin).parent
loaded = {each.name.partition(".")[0] for each in place.glob("*.cpython-*.so")}
assert loaded > {"lib", "_compute", "_csv", "_json", "_parquet", "_dataset", "_fs", "_orc"}
for each in sorted(loaded):
    importlib.import_module(f"pyarrow.{each}")
import pyarrow as pa
import pyarrow.compute, pyarrow.csv, pyarrow.dataset, pyarrow.feather, pyarrow.fs, pyarrow.ipc
import pyarrow.json, pyarrow.orc, pyarrow.parquet, pyarrow.substrait
table = pyarrow.json.read_json(io.BytesIO(b'{"cents": 3}\\n{"cents": 4}\\n'))
pyarrow.parquet.write_table(table, "/tmp/a.parquet", compression="zstd")
pyarrow.orc.write_table(table, "/tmp/a.orc")
sink = io.BytesIO()
with pa.ipc.new_stream(sink, table.schema) as stream:
    stream.write_table(table)
found = [
    pyarrow.parquet.read_table("/tmp/a.parquet"), pyarrow.orc.read_table("/tmp/a.orc"),
    pa.ipc.open_stream(sink.getvalue()).read_all(),
    pyarrow.dataset.dataset("/tmp/a.parquet").to_table(),
]
assert all(pyarrow.compute.sum(each["cents"]).as_py() == 7 for each in found)
pyarrow.fs.S3FileSystem, pyarrow.fs.GcsFileSystem, pyarrow.fs.AzureFileSystem
assert importlib.util.find_spec("pyarrow.flight") is None

import botocore.session, cryptography.fernet, numpy, numpy.testing, sqlalchemy, zstandard
assert "dynamodb" in botocore.session.get_session().get_available_services()
assert numpy.allclose(numpy.linalg.inv(numpy.eye(9) * 2), numpy.eye(9) / 2)
assert zstandard.decompress(zstandard.compress(b"a" * 1000)) == b"a" * 1000
key = cryptography.fernet.Fernet(cryptography.fernet.Fernet.generate_key())
assert key.decrypt(key.encrypt(b"a")) == b"a"
with sqlalchemy.create_engine("sqlite://").connect() as connection:
    assert connection.execute(sqlalchemy.text("select 7")).scalar() == 7
"""
"""Program of a consumer's image: what handlers may import works, also after symbols are removed."""


@dataclass
class Stage:
    """A stage of a Dockerfile.

    Attributes:
        base: image, or stage before.
        name: its name.
        steps: instructions and their arguments.
    """

    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def last(self, instruction: str) -> str:
        return [text for each, text in self.steps if each == instruction][-1]


def stages() -> dict[str, Stage]:
    """Return the stages of the Dockerfile, by name."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", "")
    found: dict[str, Stage] = {}
    stage = None
    for line in filter(None, text.splitlines()):
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            base, name = rest.split(" AS ")
            stage = found[name] = Stage(base, name)
        elif stage is not None:
            stage.steps.append((instruction, " ".join(rest.split())))
    return found


def test_extras_paths_and_commands_of_the_dockerfile_exist():
    known = stages()
    extras = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    )
    used = re.findall(r"gazette-sdk\[([\w,]+)\]", DOCKERFILE.read_text())
    assert [set(each.split(",")) for each in used] == [
        {"s3", "gcs", "azure"},
        {"s3", "gcs", "azure", "shards", "arrow"},
    ]
    assert {each for group in used for each in group.split(",")} <= extras
    admitted = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    for stage in known.values():
        for instruction, text in stage.steps:
            if instruction == "COPY":
                *sources, _ = text.split()
                if sources[0].startswith("--from="):
                    assert sources[0].removeprefix("--from=") in known
                else:
                    assert {f"!{source}" for source in sources} <= set(admitted)
    for name in ("broker", "consumer"):
        [command, *_] = shlex.split(known[name].last("CMD").strip("[]").replace(",", " "))
        assert help_of(command)
    base = known["base"]
    assert f'version="{__version__}"' in base.last("LABEL")
    assert (base.last("USER"), base.last("STOPSIGNAL")) == (f"{UID}:{UID}", "SIGTERM")


def test_each_pin_has_a_file_for_arm64():
    """`scripts/hash-constraints` fails if there is none; a wheel of one platform has two sums."""
    text = (ROOT / "constraints-hashed.txt").read_text()
    for name in ("numpy", "grpcio", "orjson", "pydantic_core", "zstandard", "cryptography"):
        [found] = re.findall(rf"^{name}==.*((?:\n    --hash=\S+.*)+)", text, re.MULTILINE)
        assert found.count("--hash=sha256:") == 2, name


# ------------------------------------------------------------- the steps themselves


def run(*command: object, **options) -> None:
    found = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=STEP_TIMEOUT_S,
        check=False,
        **options,
    )
    assert found.returncode == 0, f"{command}: {found.stdout[-500:]} {found.stderr[-2000:]}"


def bwrap(root: Path, *options: object) -> list[str]:
    """Return a command that runs others in a root file system, with the network of this one."""
    return [
        str(part)
        for part in (
            *("bwrap", "--die-with-parent", "--unshare-pid", "--unshare-ipc", "--unshare-uts"),
            *options,
            *("--proc", "/proc", "--dev", "/dev", "--ro-bind", "/etc/ssl", "/etc/ssl"),
            *("--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf"),
        )
    ]


class Builder:
    """Builds stages of the Dockerfile in directories, from a Debian with its Python.

    Args:
        directory: of the stages.
        debian: root file system that takes the place of the base image.
        context: directory of the files to copy.
    """

    def __init__(self, directory: Path, debian: Path, context: Path) -> None:
        self._directory = directory
        self._debian = debian
        self._context = context
        self._stages = stages()

    def build(self, name: str) -> Path:
        """Return the root of a stage."""
        built, stage = self._directory / name, self._stages[name]
        if built.exists():
            return built
        root = built.with_suffix(".partial")
        shutil.rmtree(root, ignore_errors=True)
        base = self._debian if stage.base == "${BASE}" else self.build(stage.base)
        run("cp", "--archive", base, root)
        work = "/"
        environ = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("PIP_", "SSL_")) and name != "PIP_FIND_LINKS"
        }
        for instruction, text in stage.steps:
            if instruction == "WORKDIR":
                work = text
                (root / text.lstrip("/")).mkdir(parents=True, exist_ok=True)
            elif instruction == "COPY":
                self._copy(root, work, *text.split())
            elif instruction == "RUN":
                command = bwrap(root, "--bind", root, "/", "--tmpfs", "/tmp", "--chdir", work)
                run(
                    *command,
                    "sh",
                    "-c",
                    text,
                    env={"PATH": "/usr/local/bin:/usr/bin:/bin", **environ},
                )
        return root.rename(built)

    def _copy(self, root: Path, work: str, *arguments: str) -> None:
        *sources, target = arguments
        source_root = self._context
        if sources[0].startswith("--from="):
            source_root = self.build(sources.pop(0).removeprefix("--from="))
        for source in sources:
            for path in source_root.glob(source.lstrip("/")):
                place = (
                    root / work.lstrip("/") / target if target == "." else root / target.lstrip("/")
                )
                if path.is_dir():
                    run("cp", "--archive", path, place)
                else:
                    place.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, place)


@pytest.fixture(scope="module")
def debian() -> Path:
    """A Debian 12 with Python 3.11, as the base image is one, and with `strip`."""
    target = cache_directory() / "debian-12-python-binutils"
    if not target.exists():
        made = target.with_name("debian-12-python-binutils.new")
        shutil.rmtree(made, ignore_errors=True)
        packages = "python3,python3-venv,ca-certificates,binutils"
        run(
            *("mmdebstrap", "--variant=minbase", f"--include={packages}", "bookworm", made),
            "http://deb.debian.org/debian",
        )
        run(*bwrap(made, "--bind", made, "/"), "python3", "-m", "venv", "/usr/local")  # with pip
        made.rename(target)
    return target


@pytest.fixture(scope="module")
def builder(debian, tmp_path_factory) -> Builder:
    directory = tmp_path_factory.mktemp("image")
    context = directory / "context"
    (context / "dist").mkdir(parents=True)
    shutil.copy(ROOT / "constraints-hashed.txt", context)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", context / "dist", ROOT)
    return Builder(directory, debian, context)


needs_tools = pytest.mark.skipif(
    not (shutil.which("bwrap") and shutil.which("mmdebstrap") and os.geteuid() == 0),
    reason="the steps of the image need root, bwrap and mmdebstrap: apt-get install both",
)


def packed_bytes(root: Path) -> int:
    """Return the compressed size of what a stage adds to its base."""
    packed = root.with_suffix(".tar.gz")
    with tarfile.open(packed, "w:gz", compresslevel=6) as archive:
        archive.add(root / "opt" / "gazette", "opt/gazette")
    return packed.stat().st_size


@needs_tools
@pytest.mark.long
@pytest.mark.timeout(3 * STEP_TIMEOUT_S)
def test_a_broker_of_the_image_serves_as_another_user_with_a_read_only_root(
    builder, etcd, tmp_path, record_property
):
    root = builder.build("broker")
    size = packed_bytes(root)
    record_property("broker environment bytes", size)
    print(f"the broker's environment has {size / 1e6:.1f} MB compressed")
    assert size + BASE_BYTES < BROKER_BYTES_MAX
    base = stages()["base"]
    environ = dict(part.split("=", 1) for part in shlex.split(base.last("ENV")))
    data, port = tmp_path / "data", reserve_port()
    (data / "fragments").mkdir(parents=True)
    for path in (data, data / "fragments"):
        os.chown(path, UID, UID)
    tmp_path.chmod(0o755)
    command = [
        *bwrap(root, "--ro-bind", root, "/", "--perms", "1777", "--tmpfs", "/tmp"),
        *("--as-pid-1", "--bind", str(data), "/var/lib/gazette", "--chdir", base.last("WORKDIR")),
        *("--", "setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"),
        *("--bounding-set=-all", "--no-new-privs"),
        *(base.last("ENTRYPOINT").strip('[]"'), "serve", f"--etcd.address={etcd.address}"),
        *(f"--broker.port={port}", "--broker.spool-dir=/var/lib/gazette/spools"),
        *("--broker.file-root=/var/lib/gazette/fragments", "--log.level=info"),
    ]
    log = tmp_path / "log"
    with log.open("wb") as output:
        begin = time.monotonic()
        process = subprocess.Popen(command, env=environ, stdout=output, stderr=output)
    try:
        wait_until_it_serves(process, port, log, "serving")
        print(f"it serves {time.monotonic() - begin:.2f} s after its start")
        transport = connect(f"http://localhost:{port}")
        Journals(transport=transport).create("an/example", replication=1)
        to_it = mapping.direct("an/example/part-000")
        with Publisher(mapping=to_it, transport=transport) as publisher:
            publisher.publish({"n": 1}).result(timeout=TIMEOUT_S)
        reader = Reader(dict, name="an/example/part-000", transport=transport, block=False)
        assert [envelope.message["n"] for envelope in reader] == [1]
        sdk_loop.run(transport.aclose(), TIMEOUT_S)
        spools = data / "spools"
        assert (spools.stat().st_uid, spools.stat().st_gid) == (UID, UID)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for child in children:  # of bwrap: the broker, which is process 1 of its namespace
            os.kill(int(child), signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert "goodbye" in log.read_text()


@needs_tools
@pytest.mark.long
@pytest.mark.timeout(3 * STEP_TIMEOUT_S)
def test_a_consumer_of_the_image_has_shards_and_arrow_as_another_user(builder, record_property):
    root = builder.build("consumer")
    size = packed_bytes(root)
    record_property("consumer environment bytes", size)
    print(f"the consumer's environment has {size / 1e6:.1f} MB compressed")
    assert size + BASE_BYTES < CONSUMER_BYTES_MAX
    run(
        *bwrap(root, "--ro-bind", root, "/", "--perms", "1777", "--tmpfs", "/tmp"),
        *("--", "setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"),
        *("--bounding-set=-all", "--no-new-privs"),
        *("/opt/gazette/bin/python", "-c", IN_A_CONSUMER),
    )

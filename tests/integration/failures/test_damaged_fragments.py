"""Stored fragments which are damaged, cut, removed, or not fragments at all."""

import asyncio
import contextlib
import json
import os
import time

import botocore.session
import pytest

from gazette_sdk import Reader, connect
from gazette_sdk.errors import (
    CorruptFragmentError,
    FragmentNotFoundError,
    OffsetNotYetAvailableError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import parse_content_path
from gazette_sdk.transport import loop as sdk_loop
from integration.failures.journals import (
    CODECS,
    append,
    files,
    fragments,
    read,
    read_on,
    run,
    spec,
    wait_until,
    wait_until_stored,
    within,
)
from integration.failures.reading import messages
from support.raw_http import exchange
from support.stores import create_s3_bucket

LINE_BYTES = 64


def lines(fragment: int, count: int) -> bytes:
    """JSON messages of equal length, of which each fragment has its own."""
    made = [
        json.dumps({"fragment": fragment, "number": number, "pad": ""}) for number in range(count)
    ]
    return b"".join(
        text[:-2].encode() + b"x" * (LINE_BYTES - len(text) - 1) + b'"}\n' for text in made
    )


class Stored:
    """A journal of three stored fragments, and what each holds."""

    def __init__(self, cluster, name, codec="NONE", count=100):
        self.cluster, self.name = cluster, name
        self.contents = [lines(number, count) for number in range(3)]
        cluster.apply(spec(name, codec=codec, length=1024, refresh="1s"))
        for content in self.contents:
            append(cluster.transport, name, content)
        append(cluster.transport, name, b"")  # closes the last fragment
        self.directory = cluster.fragments / name

    def wait(self):
        """Wait until the broker knows of the stored fragments, which takes a refresh."""
        wait_until(lambda: all(f.mod_time for f in self.fragments()), "fragments are stored")
        assert len(self.fragments()) == len(self.files()) == 3
        return self

    def fragments(self):
        return fragments(self.cluster, self.name)

    def files(self):
        return files(self.directory)

    @property
    def second(self):
        return parse_content_path(self.name, self.files()[1].name)

    def assert_tells(self, error):
        """The error names journal, offsets, file, store and remedy."""
        begin, end = self.second.begin, self.second.end
        for told in (
            self.name, f"[{begin}, {end})", self.files()[1].name, "store file:///",
            "put a good copy in its place",
        ):  # fmt: skip
            assert told in str(error)


@pytest.fixture(scope="module")
def all_stored(cluster):
    """A journal of each codec."""
    made = {codec: Stored(cluster, f"failures/{codec.lower()}", codec) for codec in CODECS}
    return {codec: stored.wait() for codec, stored in made.items()}


@pytest.fixture
def stored(all_stored, request):
    """A journal whose files a test may damage; they are mended behind it."""
    stored = all_stored[request.param]
    good = {path: path.read_bytes() for path in stored.files()}
    yield stored
    for path, content in good.items():
        path.write_bytes(content)


@contextlib.contextmanager
def temporary_times(path, time_s):
    """Give a file other times for a while."""
    found = path.stat()
    os.utime(path, (time_s, time_s))
    yield
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


each_codec = pytest.mark.parametrize("stored", CODECS, indirect=True)


def flipped(content, position):
    damaged = bytearray(content)
    damaged[position] ^= 0x40
    return bytes(damaged)


def flip(path, position):
    path.write_bytes(flipped(path.read_bytes(), position))


def numbered(reader):
    """The fragment and number of the messages which a reader gives, and how it ends."""
    found, error = messages(reader)
    return [(message["fragment"], message["number"]) for message in found], error


@each_codec
def test_a_flipped_byte_is_one_clear_error_however_it_is_read(cluster, stored):
    name, path = stored.name, stored.files()[1]
    flip(path, path.stat().st_size // 2)
    first, second, third = stored.contents
    grpc = connect(cluster.address)
    store = connect(f"file://{cluster.fragments}", content_type="application/x-ndjson")
    try:
        for transport in (cluster.transport, grpc, store):
            for reading in (read, read_on):
                with within(5):
                    content, error = reading(transport, name)
                assert type(error) is CorruptFragmentError
                assert error.journal == name
                assert content == first
                if transport is not store:
                    stored.assert_tells(error)
            with within(5), Reader(dict, name=name, transport=transport) as reader:
                found, error = numbered(reader)
            assert found == [(0, number) for number in range(100)]
            assert type(error) is CorruptFragmentError
            assert reader.offsets == {name: len(first)}
            # What stands behind it can be read, too.
            content, error = read(transport, name, len(first + second))
            assert content == third
            assert isinstance(error, OffsetNotYetAvailableError)
    finally:
        run(grpc.aclose())
        run(store.aclose())

    answer = asyncio.run(exchange(cluster.address, "GET", f"/{name}?offset=0"))
    assert (answer.status, answer.body) == (206, first)
    assert "\n" not in dict(answer.trailers)["X-Close-Error"]
    stored.assert_tells(dict(answer.trailers)["X-Close-Error"])


def test_damage_of_a_large_fragment_is_reported_although_some_of_it_was_read(cluster, name):
    """A reader which tried again from the middle would not notice it any more."""
    stored = Stored(cluster, name, count=10_000).wait()
    flip(stored.files()[1], 70)
    content, error = read_on(cluster.transport, name)
    assert isinstance(error, CorruptFragmentError)
    assert len(stored.contents[0]) <= len(content) < stored.second.end
    stored.assert_tells(error)


def test_a_flipped_byte_of_offloaded_compression_is_one_clear_error(
    cluster, name, s3_service, monkeypatch
):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    endpoint, bucket = f"http://{s3_service.address}", "offloaded"
    create_s3_bucket(endpoint, bucket)
    url = f"s3://{bucket}/?endpoint={endpoint}&region=us-east-1"
    cluster.apply(spec(name, url, codec="GZIP_OFFLOAD_DECOMPRESSION", length=1024))
    for number in range(2):
        append(cluster.transport, name, lines(number, 100))
    append(cluster.transport, name, b"")
    wait_until_stored(cluster, name)
    with contextlib.closing(
        botocore.session.Session().create_client("s3", "us-east-1", endpoint_url=endpoint)
    ) as client:
        _, key = (
            item["Key"] for item in client.list_objects(Bucket=bucket, Prefix=name)["Contents"]
        )
        found = client.get_object(Bucket=bucket, Key=key)
        assert found["ContentEncoding"] == "gzip"
        good = found["Body"].read()
        damaged = flipped(good, len(good) // 2)
        client.put_object(Bucket=bucket, Key=key, Body=damaged, ContentEncoding="gzip")
    content, error = read_on(cluster.transport, name)
    assert content.startswith(lines(0, 100))
    assert type(error) is CorruptFragmentError
    assert key.rpartition("/")[2] in str(error)
    assert bucket in str(error)


@each_codec
@pytest.mark.parametrize("kept", [0.5, 0.0])
def test_a_truncated_fragment_is_one_clear_error(cluster, stored, kept):
    path = stored.files()[1]
    os.truncate(path, int(path.stat().st_size * kept))
    content, error = read_on(cluster.transport, stored.name)
    assert content[: len(stored.contents[0])] == stored.contents[0]
    assert b"".join(stored.contents).startswith(content)
    assert type(error) is CorruptFragmentError
    stored.assert_tells(error)


@each_codec
def test_a_fragment_that_a_listing_shows_as_damaged_is_the_same_error(cluster, stored):
    """Also where what follows is so old that readers would pass over a removed fragment."""
    first, path = stored.contents[0], stored.files()[1]
    old = time.time() - 7 * 3600
    request = pb.FragmentsRequest(journal=stored.name, list_again=True)
    with temporary_times(stored.files()[2], old):
        os.truncate(path, 0)
        sdk_loop.run(cluster.transport.list_fragments(request), 20)
        assert len(stored.fragments()) == 2
        store = connect(f"file://{cluster.fragments}")
        for transport in (cluster.transport, store):
            content, error = read_on(transport, stored.name)
            assert content == first
            assert type(error) is CorruptFragmentError
            assert path.name in str(error)
        run(store.aclose())


@each_codec
def test_a_fragment_with_more_behind_it_is_one_clear_error(cluster, stored):
    with stored.files()[1].open("ab") as file:
        file.write(b"more")
    content, error = read_on(cluster.transport, stored.name)
    assert content == b"".join(stored.contents[:2])
    assert type(error) is CorruptFragmentError
    stored.assert_tells(error)


@each_codec
def test_a_good_copy_in_its_place_mends_it(cluster, stored):
    path = stored.files()[1]
    good = path.read_bytes()
    flip(path, len(good) // 2)
    _, error = read_on(cluster.transport, stored.name)
    assert isinstance(error, CorruptFragmentError)
    path.write_bytes(good)
    content, error = read_on(cluster.transport, stored.name)
    assert content == b"".join(stored.contents)
    assert isinstance(error, OffsetNotYetAvailableError)


def test_a_removed_fragment_is_reported_until_the_journal_is_read_behind_it(cluster, name):
    stored = Stored(cluster, name).wait()
    first, second, third = stored.contents
    path = stored.files()[1]
    content = path.read_bytes()
    path.unlink()
    found, error = read(cluster.transport, name)
    if not isinstance(error, OffsetNotYetAvailableError):  # before the next refresh
        assert isinstance(error, FragmentNotFoundError)
        assert path.name in str(error)
    assert found == first
    wait_until(lambda: len(stored.fragments()) == 2, "the refresh sees that it is gone")

    for url in (cluster.address, f"file://{cluster.fragments}"):
        options = {} if url == cluster.address else {"content_type": "application/x-ndjson"}
        transport = connect(url, **options)
        with within(5), Reader(dict, name=name, transport=transport) as reader:
            found, error = numbered(reader)
        assert found == [(0, number) for number in range(100)]
        assert isinstance(error, OffsetNotYetAvailableError)
        assert f"from offset {len(first)} on is in no store" in str(error)
        assert "give offsets= behind it" in str(error)
        behind = {name: len(first + second)}
        with Reader(dict, name=name, transport=transport, offsets=behind) as reader:
            found, error = numbered(reader)
        assert error is None
        assert found == [(2, number) for number in range(100)]
        run(transport.aclose())

    # A gap which is old will not be filled any more: it is passed over.
    old = time.time() - 7 * 3600
    os.utime(stored.files()[1], (old, old))
    wait_until(lambda: stored.fragments()[1].mod_time < old + 1, "the refresh sees the time")
    with within(5), Reader(dict, name=name, transport=cluster.transport) as reader:
        found, error = numbered(reader)
    assert error is None
    assert found == [(f, number) for f in (0, 2) for number in range(100)]

    path.write_bytes(content)
    wait_until(lambda: len(stored.fragments()) == 3, "the refresh sees that it is back")
    assert read(cluster.transport, name)[0] == first + second + third


def test_the_first_fragments_may_be_removed(cluster, name):
    stored = Stored(cluster, name).wait()
    stored.files()[0].unlink()
    wait_until(lambda: len(stored.fragments()) == 2, "the refresh sees that it is gone")
    with within(5), Reader(dict, name=name, transport=cluster.transport) as reader:
        found, error = numbered(reader)
    assert error is None
    assert found == [(f, number) for f in (1, 2) for number in range(100)]


def test_foreign_files_in_a_journals_directory_are_passed_over_and_told(cluster, name, warnings_of):
    stored = Stored(cluster, name).wait()
    whole = b"".join(stored.contents)
    begin, end = f"{len(whole):016x}", f"{len(whole) + 4:016x}"
    foreign = {
        "README.md": b"hello",
        f"{begin}-{end}-{'0' * 39}.raw": b"more",  # a sum that is none
        f"{end}-{begin}-{'0' * 40}.raw": b"more",  # it ends before it begins
        f"{begin}-{end}-{'0' * 40}.xz": b"more",  # a codec nobody knows
        "deep/er/notes.txt": b"more",
        f".partial-{begin}-{end}-{'0' * 40}.raw": b"more",  # an upload which broke off
    }
    for path, content in foreign.items():
        (stored.directory / path).parent.mkdir(parents=True, exist_ok=True)
        (stored.directory / path).write_bytes(content)
    (stored.directory / "dangling").symlink_to(stored.directory / "nowhere")
    wait_until(lambda: warnings_of("README.md"), "the refresh sees them")
    store = connect(f"file://{cluster.fragments}")
    for transport in (cluster.transport, store):
        content, error = read(transport, name)
        assert content == whole
        assert isinstance(error, OffsetNotYetAvailableError)
    run(store.aclose())
    assert append(cluster.transport, name, b"on\n").commit.begin == len(whole)

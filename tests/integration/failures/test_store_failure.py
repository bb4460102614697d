"""A store that fails: what is refused, what is kept, and what goes on."""

import threading
import time

import pytest

from gazette_sdk import Reader, connect
from gazette_sdk.errors import FragmentStoreUnhealthyError, StoreError
from gazette_sdk.message import fetcher
from integration.failures.journals import (
    Writer,
    append,
    delete,
    files,
    run,
    spec,
    wait_until,
    wait_until_stored,
    within,
)
from integration.failures.reading import messages

pytestmark = pytest.mark.serial


def append_until_refused(writer: Writer) -> FragmentStoreUnhealthyError:
    while True:
        try:
            writer.append()
        except FragmentStoreUnhealthyError as error:
            return error
        time.sleep(0.1)


def append_until_taken(writer: Writer) -> None:
    while True:
        try:
            writer.append()
        except FragmentStoreUnhealthyError:
            time.sleep(0.2)  # as a client does that tries again
        else:
            return


@pytest.mark.parametrize("way", ["refuse", "hang"])
def test_a_lost_s3_store_is_reported_within_five_seconds_and_so_is_its_return(
    cluster, losable_s3, name, way
):
    (cluster.fragments / "elsewhere").mkdir(exist_ok=True)
    lost, other = f"{name}/lost", f"{name}/other"
    cluster.apply(spec(lost, losable_s3.url(), length=2000))
    cluster.apply(spec(other, "file:///elsewhere/"))
    writer, bystander = Writer(cluster.transport, lost), Writer(cluster.transport, other)
    for _ in range(5):
        writer.append()
    bystander.append()

    getattr(losable_s3, way)()
    with within(5):
        error = append_until_refused(writer)
    assert losable_s3.bucket in str(error)
    assert lost in str(error)
    assert "mend the store" in str(error)
    with within(5), pytest.raises(FragmentStoreUnhealthyError):
        writer.append()
    with within(2):
        bystander.append()

    losable_s3.come_back()
    with within(5):
        append_until_taken(writer)
    wait_until_stored(cluster, lost)
    writer.check()
    bystander.check()
    delete(cluster, lost)


def test_a_file_store_that_vanishes_is_reported_and_its_content_is_there_when_it_is_back(
    cluster, name, warnings_of
):
    directory = cluster.fragments / "vanishing"
    directory.mkdir()
    cluster.apply(spec(name, "file:///vanishing/", length=2000))
    writer = Writer(cluster.transport, name)
    for _ in range(5):
        writer.append()

    directory.rename(directory.with_name("hidden"))
    with within(5):
        error = append_until_refused(writer)
    assert "file:///vanishing/" in str(error)
    assert "create it" in str(error)

    directory.with_name("hidden").rename(directory)
    with within(5):
        append_until_taken(writer)
    wait_until_stored(cluster, name)
    wait_until(lambda: len(files(directory)) >= 3, "fragments are files")
    writer.check()


def test_a_store_that_was_never_there_is_reported_within_five_seconds(cluster, name):
    url = "s3://bucket/?endpoint=http://127.0.0.1:1&region=us-east-1"
    cluster.apply(spec(name, url))
    writer = Writer(cluster.transport, name)
    with within(5), pytest.raises(FragmentStoreUnhealthyError, match="check the network") as caught:
        writer.append()
    assert url in str(caught.value)
    assert caught.value.journal == name


def test_a_second_store_that_cannot_be_listed_is_reported_within_five_seconds(cluster, name):
    """The head of a journal is not known before all of its stores were listed."""
    url = "s3://bucket/?endpoint=http://127.0.0.1:1&region=us-east-1"
    cluster.apply(spec(name, "file:///", url))
    writer = Writer(cluster.transport, name)
    with within(5), pytest.raises(FragmentStoreUnhealthyError, match="check the network") as caught:
        writer.append()
    assert url in str(caught.value)
    delete(cluster, name)


def test_a_reader_waits_for_a_lost_store_within_a_bound_and_continues_when_it_is_back(
    cluster, losable_s3, name, monkeypatch
):
    monkeypatch.setattr(fetcher, "FAILING_MAX_S", 0.5)
    cluster.apply(spec(name, losable_s3.url(), length=1024))
    for number in range(3):
        append(cluster.transport, name, b'{"number": %d, "pad": "%s"}\n' % (number, b"x" * 1100))
    wait_until_stored(cluster, name)
    transport = connect(cluster.address)
    losable_s3.refuse()
    with within(10), Reader(dict, name=name, transport=transport) as reader:
        found, error = messages(reader)
    assert found == []
    assert isinstance(error, StoreError)
    assert losable_s3.bucket in str(error)
    assert "check the network" in str(error)

    monkeypatch.setattr(fetcher, "FAILING_MAX_S", 20.0)
    back = threading.Timer(0.5, losable_s3.come_back)
    back.start()
    with within(15), Reader(dict, name=name, transport=transport) as reader:
        found, error = messages(reader)
    back.join()
    assert error is None
    assert [message["number"] for message in found] == [0, 1, 2]
    run(transport.aclose())
    delete(cluster, name)

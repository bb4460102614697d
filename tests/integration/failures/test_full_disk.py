"""Disks that are full: that of the spools, and that of a file store."""

import pytest

from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.errors import FragmentStoreUnhealthyError, GazetteError
from integration.failures.disks import LIMIT_BYTES
from integration.failures.journals import Writer, files, spec, wait_until, wait_until_stored, within

LARGE = 4 * LIMIT_BYTES


def test_a_full_disk_of_spools_refuses_appends_and_loses_nothing(disk, tmp_path, name):
    data = tmp_path / "data"
    data.mkdir()
    (data / "spools").symlink_to(disk.path)
    with EmbeddedCluster(data, sync_etcd=False) as cluster:
        cluster.apply(spec(name))
        writer = Writer(cluster.transport, name)
        writer.append(LARGE)
        writer.append()  # closes the first fragment, whose spool then makes room
        wait_until_stored(cluster, name)
        wait_until(lambda: len(list(disk.path.rglob("*.content"))) == 1, "its spool is removed")
        disk.fill()
        try:
            with within(10), pytest.raises(GazetteError) as caught:
                writer.append(LARGE)
            assert f"of {name} in {data / 'spools' / 'broker-0'}" in str(caught.value)
            assert "append again (nothing acknowledged is lost)" in str(caught.value)
            if disk.is_mounted:
                assert "free some space there" in str(caught.value)
            writer.check()
        finally:
            disk.make_room()
        writer.append(LARGE)
        writer.append()
        writer.check()
    with EmbeddedCluster(data, sync_etcd=False) as cluster:
        writer.check(cluster.transport)


def test_a_full_disk_of_a_store_keeps_fragments_local_until_there_is_room(
    disk, tmp_path, name, warnings_of
):
    data = tmp_path / "data"
    data.mkdir()
    (data / "fragments").symlink_to(disk.path)
    with EmbeddedCluster(data, sync_etcd=False) as cluster:
        cluster.apply(spec(name, length=2000))
        writer = Writer(cluster.transport, name)
        writer.append()
        writer.append(LARGE)  # is in a fragment which the next append closes
        wait_until_stored(cluster, name)

        def large_files():
            return [path for path in files(disk.path / name) if path.stat().st_size >= LARGE]

        disk.fill()
        try:
            for _ in range(10):
                # As long as the store's checks get through, appends go on; then they are refused.
                try:
                    writer.append()
                except FragmentStoreUnhealthyError as error:
                    assert "mend the store" in str(error)  # noqa: PT017 - it may be accepted, too
            wait_until(lambda: warnings_of("upload of fragments"), "an upload fails")
            writer.check()
            assert not large_files()
        finally:
            disk.make_room()
        wait_until_stored(cluster, name)
        wait_until(large_files, "the backlog is stored")
        writer.append()
        writer.check()
    assert not list(disk.path.rglob(".partial-*"))
    with EmbeddedCluster(data, sync_etcd=False) as cluster:
        writer.check(cluster.transport)

from __future__ import annotations

import asyncio
from contextlib import aclosing
from urllib.parse import urlsplit

import pytest

from gazette_sdk.cluster import etcd as module
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Compare, Delete, Get, Put, prefix_end
from gazette_sdk.cluster.etcd_server import EtcdServer
from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    EtcdCompactedError,
    EtcdError,
    EtcdUnavailableError,
    LeaseLostError,
)
from gazette_sdk.testing.tcp_proxy import TcpProxy
from support.etcd import run, within


def port_of(etcd):
    return urlsplit(etcd.address).port


def test_ranges_are_ordered_limited_and_read_at_a_revision(etcd):
    async def scenario():
        async with etcd.client() as client:
            for name in (b"/b", b"/a", b"/c"):
                revision = await client.put(name, b"1")
            await client.put(b"/a", b"2")
            await client.delete(b"/c")

            now = await client.range(b"/", prefix_end(b"/"))
            assert [(kv.key, kv.value) for kv in now.entries] == [(b"/a", b"2"), (b"/b", b"1")]
            assert now.entries[0].version == 2
            assert now.entries[0].create_revision < now.entries[0].mod_revision
            assert now.header.cluster_id
            assert now.header.raft_term

            then = await client.range(b"/", prefix_end(b"/"), revision=revision, limit=2)
            assert [(kv.key, kv.value) for kv in then.entries] == [(b"/a", b"1"), (b"/b", b"1")]
            assert then.has_more
            assert then.count == 3
            assert then.header.revision == revision + 2

    run(scenario())


def test_a_transaction_runs_the_branch_of_its_conditions(etcd):
    async def scenario():
        async with etcd.client() as client:
            absent = Compare.version(b"/k", 0)
            made = await client.txn([absent], [Put(b"/k", b"v")], [Get(b"/k")])
            assert made.succeeded
            assert made.responses == (None,)

            again = await client.txn([absent], [Put(b"/k", b"w")], [Get(b"/k")])
            assert not again.succeeded
            assert again.revision == made.revision
            (found,) = again.responses
            assert [kv.value for kv in found.entries] == [b"v"]

            same = Compare.mod_revision(b"/k", made.revision)
            created = Compare.create_revision(b"/k", made.revision)
            unleased = Compare.lease(b"/k", 0)
            gone = await client.txn([same, created, unleased], [Delete(b"/k")])
            assert gone.succeeded
            assert (await client.txn([Compare.mod_revision(b"/k", 0)], [])).succeeded

    run(scenario())


def test_a_put_that_ignores_the_lease_keeps_it(etcd):
    async def scenario():
        async with etcd.client() as client:
            lease = await client.grant(60)
            assert await client.leases() == [lease]
            await client.put(b"/k", b"1", lease=lease)
            await client.txn([], [Put(b"/k", b"2", ignore_lease=True)])
            (kv,) = (await client.range(b"/k")).entries
            assert (kv.value, kv.lease) == (b"2", lease)
            await client.revoke(lease)
            assert not (await client.range(b"/k")).entries
            with pytest.raises(LeaseLostError):
                await client.revoke(lease)
            with pytest.raises(LeaseLostError):
                await client.put(b"/k", b"3", lease=lease)

    run(scenario())


def test_refused_requests_are_plain_errors(etcd):
    async def scenario():
        async with etcd.client() as client:
            with pytest.raises(EtcdError, match="duplicate key"):
                await client.txn([], [Put(b"/k", b"1"), Put(b"/k", b"2")])
            with pytest.raises(EtcdError, match="too many operations"):
                await client.txn([], [Put(b"/%d" % n, b"") for n in range(129)])
            with pytest.raises(EtcdError, match="future revision"):
                await client.range(b"/k", revision=1 << 40)

    run(scenario())


def test_a_watch_delivers_changes_in_order_from_its_revision_on(etcd):
    async def scenario():
        async with etcd.client() as client:
            first = await client.put(b"/p/1", b"a")
            await client.put(b"/q", b"not of the prefix")
            async with aclosing(client.watch(b"/p/", first)) as batches:
                await client.txn([], [Put(b"/p/2", b"b"), Put(b"/p/3", b"c")])
                await client.delete(b"/p/1")
                events = []
                async for batch in batches:
                    assert batch.header.cluster_id
                    events += [(e.is_delete, e.kv.key, e.kv.mod_revision) for e in batch.events]
                    if len(events) == 4:
                        break
            assert events == [
                (False, b"/p/1", first),
                (False, b"/p/2", first + 2),
                (False, b"/p/3", first + 2),
                (True, b"/p/1", first + 3),
            ]

    run(scenario())


def test_a_watch_of_compacted_changes_says_so(etcd):
    async def scenario():
        async with etcd.client() as client:
            first = await client.put(b"/p", b"1")
            last = await client.put(b"/p", b"2")
            request = module.rpc.CompactionRequest(revision=last, physical=True)
            await client._call(client._kv.Compact, request)
            async with aclosing(client.watch(b"/p", first)) as batches:
                with pytest.raises(EtcdCompactedError, match="restart"):
                    await anext(batches)
            with pytest.raises(EtcdCompactedError):
                await client.range(b"/p", revision=first)

    run(scenario())


def test_a_broken_connection_ends_a_watch_and_the_client_reconnects(etcd):
    async def scenario():
        async with TcpProxy(port_of(etcd)) as proxy:
            client = await Etcd.connect(f"http://127.0.0.1:{proxy.port}")
            revision = await client.put(b"/p", b"1")
            async with aclosing(client.watch(b"/p", revision)) as batches:
                await anext(batches)
                proxy.reset()
                with pytest.raises(EtcdUnavailableError):
                    await anext(batches)
            assert (await client.range(b"/p")).count == 1
            await client.aclose()

    run(scenario())


def test_a_lease_is_kept_over_broken_connections(etcd):
    async def scenario():
        async with TcpProxy(port_of(etcd)) as proxy:
            client = await Etcd.connect(f"http://127.0.0.1:{proxy.port}")
            lease = await client.grant(1)
            await client.put(b"/k", b"", lease=lease)
            keeping = asyncio.create_task(client.keep_alive(lease, 1))
            for _ in range(3):
                proxy.reset()
                # The key outlives its lease's time to live only if the lease is renewed.
                with pytest.raises(TimeoutError):
                    await within(asyncio.shield(keeping), timeout_s=0.6)
            async with etcd.client() as observer:
                assert (await observer.range(b"/k")).count == 1
            keeping.cancel()
            await client.aclose()

    run(scenario())


def test_a_lease_that_runs_out_is_lost_within_its_time_to_live(etcd):
    async def scenario():
        loop = asyncio.get_running_loop()
        async with TcpProxy(port_of(etcd)) as proxy:
            client = await Etcd.connect(f"http://127.0.0.1:{proxy.port}")
            lease = await client.grant(1)
            proxy.refuse()
            started = loop.time()
            with pytest.raises(LeaseLostError, match="unable to keep the lease alive"):
                await client.keep_alive(lease, 1)
            assert 0.9 <= loop.time() - started < 2
            await client.aclose()

    run(scenario())


def test_a_stalled_connection_loses_the_lease_too(etcd):
    async def scenario():
        async with TcpProxy(port_of(etcd)) as proxy:
            client = await Etcd.connect(f"http://127.0.0.1:{proxy.port}")
            lease = await client.grant(1)
            proxy.cut()
            with pytest.raises(LeaseLostError):
                await within(client.keep_alive(lease, 1), timeout_s=3)
            await client.aclose()

    run(scenario())


def test_a_revoked_lease_is_lost_at_its_next_renewal(etcd):
    async def scenario():
        async with etcd.client() as client:
            lease = await client.grant(1)
            await client.revoke(lease)
            with pytest.raises(LeaseLostError, match="ran out or was revoked"):
                await client.keep_alive(lease, 1)

    run(scenario())


def test_an_unreachable_etcd_is_told_within_the_dial_timeout():
    async def scenario():
        with pytest.raises(
            EtcdUnavailableError, match=r"no Etcd answers at http://127\.0\.0\.1:1 \(.*refused"
        ):
            await within(Etcd.connect("http://127.0.0.1:1", dial_timeout_s=0.3), timeout_s=3)

    run(scenario())


class TlsServer(EtcdServer):
    """An etcd with a certificate that it made for itself."""

    def _command(self, binary, port):
        command = super()._command(binary, port)
        return [*(part.replace("http://", "https://") for part in command), "--auto-tls"]

    @property
    def certificate(self):
        return self.data_dir / "data/fixtures/client/cert.pem"


def test_the_error_names_why_a_dial_failed_where_a_later_one_takes_too_long():
    async def scenario():
        held = []

        async def serve(_reader, writer):
            if not held:
                writer.close()  # the first connection
            held.append(writer)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            with pytest.raises(EtcdUnavailableError) as failed:
                await Etcd.connect(f"http://127.0.0.1:{port}", dial_timeout_s=1)
        finally:
            server.close()
            for writer in held:
                writer.close()
        assert len(held) > 1
        assert "no answer in time" not in str(failed.value)

    run(scenario())


def test_https_with_a_trusted_authority_and_without(tmp_path):
    async def scenario():
        server = TlsServer(tmp_path, sync_writes=False)
        await server.start()
        address = server.endpoint.replace("http://", "https://")
        try:
            client = await Etcd.connect(address, trusted_ca_file=server.certificate)
            await client.put(b"/k", b"secret")
            assert (await client.range(b"/k")).entries[0].value == b"secret"
            await client.aclose()
            with pytest.raises(EtcdUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
                await Etcd.connect(address, dial_timeout_s=3)
            with pytest.raises(EtcdUnavailableError):
                await Etcd.connect(server.endpoint, dial_timeout_s=0.5)
        finally:
            await server.stop()

    run(scenario())


def test_a_server_that_is_too_old_is_refused(etcd, monkeypatch):
    monkeypatch.setattr(module, "MINIMUM_VERSION", (99, 1))

    async def scenario():
        with pytest.raises(EtcdError, match=r"is version 3\..*; upgrade it to 99\.1 or later"):
            await Etcd.connect(etcd.address)

    run(scenario())


@pytest.mark.parametrize(
    "address", ["localhost:2379", "ftp://x", "http://", "http://h:port", "unix:", ""]
)
def test_bad_addresses_are_refused(address):
    async def scenario():
        with pytest.raises(ConfigurationError, match="no Etcd address"):
            await Etcd.connect(address)

    run(scenario())


def test_a_missing_certificate_is_told():
    async def scenario():
        with pytest.raises(ConfigurationError, match=r"cannot be read.*/no/such\.pem"):
            await Etcd.connect("https://localhost", trusted_ca_file="/no/such.pem")

    run(scenario())


def test_calls_on_a_closed_client_are_refused_and_running_ones_end(etcd):
    async def scenario():
        client = await Etcd.connect(etcd.address)
        watch = client.watch(b"/", 1)
        waiting = asyncio.ensure_future(anext(watch))
        await client.range(b"/")
        await client.aclose()
        with pytest.raises((ClosedError, EtcdUnavailableError)):
            await within(waiting)
        with pytest.raises(ClosedError):
            await client.range(b"/")

    run(scenario())


def test_a_closed_client_ends_renewals_and_calls_that_wait_for_a_connection(etcd):
    async def scenario():
        async with TcpProxy(port_of(etcd)) as proxy:
            client = await Etcd.connect(f"http://127.0.0.1:{proxy.port}")
            keeping = asyncio.ensure_future(client.keep_alive(await client.grant(60), 60))
            proxy.refuse()
            proxy.reset()
            waiting = [asyncio.ensure_future(client.range(b"/")) for _ in range(3)]
            await asyncio.sleep(0.1)
            await client.aclose()
            for call in waiting:
                with pytest.raises(ClosedError):
                    await within(call)
            keeping.cancel()
            await asyncio.wait([keeping])

            other = await Etcd.connect(etcd.address)
            keeping = asyncio.ensure_future(other.keep_alive(await other.grant(1), 1))
            await asyncio.sleep(0.1)
            await other.aclose()
            with pytest.raises(ClosedError):
                await within(keeping, timeout_s=3)

    run(scenario())


@pytest.mark.parametrize(
    ("prefix", "end"),
    [(b"/a", b"/b"), (b"/gazette/cluster", b"/gazette/clustes"), (b"a\xff", b"b"), (b"", b"\0")],
)
def test_the_end_of_a_prefix(prefix, end):
    assert prefix_end(prefix) == end

"""`gazctl backup` and `gazctl restore` against clusters of real processes that lose their Etcd."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing, contextmanager, suppress

import pytest

from gazette_sdk import Publisher, Reader
from gazette_sdk.cli.backup import archive
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import prefix_end
from gazette_sdk.cluster.etcd_server import EtcdServer
from gazette_sdk.errors import ClosedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.testing import run_shards
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.append.append import append
from gazette_sdk.transport.journal_reader import read_metadata
from integration.cli.test_processes import serve, served_at
from support.certificates import Authority
from support.order_totals import BY_CUSTOMER, Order, totals

TIMEOUT_S = 90
KEY = base64.b64encode(b"a secret of this cluster, long enough").decode()

SPECS = """
name: kept/
replication: 2
labels: [{name: content-type, value: application/x-ndjson}]
fragment: {length: 1048576, compression_codec: NONE, stores: ["file:///"], refresh_interval: 1s}
children:
  - name: kept/stored
  - name: kept/suspended
    replication: 1
    fragment: {flush_interval: 24h}
  - name: kept/pruned
    suspend: {level: FULL, offset: 9}
  - name: kept/spooled
    replication: 1
    fragment: {flush_interval: 24h}
"""


def call(cluster, work):
    """Run a coroutine function of a transport."""

    async def run():
        async with aclosing(cluster.connect()) as transport:
            return await work(transport)

    return sdk_loop.run(run(), TIMEOUT_S)


def write(cluster, journal, content, **registers):
    """Append to a journal, and return the span."""
    request = pb.AppendRequest(journal=journal)
    for name, value in registers.items():
        request.union_registers.labels.add(name=name, value=value)

    async def source():
        yield content

    response = call(cluster, lambda transport: append(transport, request, [source]))
    return response.commit.begin, response.commit.end


def head(cluster, journal):
    return call(cluster, lambda transport: read_metadata(transport, journal, -1)).write_head


def wipe(cluster):
    """Kill all brokers, and begin with an empty Etcd."""
    for broker in cluster.brokers:
        broker.kill()
    kill_etcd(cluster)


def kill_etcd(cluster):
    cluster.kill_etcd(0)
    for member in list((cluster.data / "etcd").rglob("member")):
        shutil.rmtree(member)
    cluster.start_etcd(0)


def start_brokers(cluster, brokers=None):
    with ThreadPoolExecutor() as pool:
        list(pool.map(cluster.start_broker, cluster.brokers if brokers is None else brokers))


def keys(cluster, prefix=b"/"):
    async def read():
        async with aclosing(await Etcd.connect(cluster.etcd_endpoint)) as etcd:
            return {kv.key for kv in (await etcd.range(prefix, prefix_end(prefix))).entries}

    return asyncio.run(read())


@pytest.fixture
def tools(gazctl):
    """``gazctl`` with the addresses of a cluster."""

    def use(cluster):
        gazctl.environ["GAZETTE_ADDRESS"] = cluster.address
        gazctl.environ["ETCD_ADDRESS"] = cluster.etcd_endpoint
        return gazctl

    return use


def rows(outcome, name="journal"):
    found = map(json.loads, outcome.text.splitlines())
    return {row[name]: row for row in found if name in row}


def until(condition):
    ends_at = time.monotonic() + TIMEOUT_S
    while not (found := condition()):
        assert time.monotonic() < ends_at
        time.sleep(0.1)
    return found


def suspend(gazctl, journals, selector):
    """Suspend journals that have fragments: in part."""

    def are_suspended():
        gazctl.ok("journals", "suspend", "-l", selector, "--force")
        listed = json.loads(gazctl.ok("journals", "list", "-l", selector, "-o", "json").text)
        found = [each["spec"]["suspend"] for each in listed["journals"]]
        return len(found) == journals and all(each and each["level"] == "PARTIAL" for each in found)

    until(are_suspended)


def saved(gazctl, name):
    """Journals of a backup, by name."""
    return {each.name: each for each in archive.read(str(gazctl.directory / name)).journals}


def restore(gazctl, cluster, *arguments, file="b.tar.gz"):
    source = ("--from", file) if file else ()
    root = ("--file-root", str(cluster.fragments))
    return gazctl("restore", "cluster", *source, *root, "-o", "json", *arguments)


def test_a_cluster_without_etcd_continues_where_it_was(gazette_cluster, tools):
    cluster = gazette_cluster(3, zones=3)
    cluster.apply(SPECS)
    gazctl = tools(cluster)
    write(cluster, "kept/stored", b'{"n": 1}\n')
    write(cluster, "kept/suspended", b'{"n": 2}\n')
    write(cluster, "kept/spooled", b'{"n": 3}\n', owner="ada")
    suspend(gazctl, 1, "name=kept/suspended")

    assert "4 journals" in gazctl.ok("backup", "create", "b.tar.gz").text
    twice = gazctl("backup", "create", "b.tar.gz")
    assert twice.status == 1
    assert "exists" in twice.stderr
    write(cluster, "kept/spooled", b"after the backup\n")
    end = head(cluster, "kept/spooled")
    shown = gazctl.ok("backup", "show", "b.tar.gz").text
    assert "owner=ada" in shown
    assert "partial at 9" in shown
    assert "full at 9" in shown
    resumed = write(cluster, "kept/suspended", b"and after the backup\n")[1]
    over = restore(gazctl, cluster)
    assert over.status == 1
    assert "Etcd is not empty" in over.stderr

    wipe(cluster)
    early = restore(gazctl, cluster)
    assert early.status == 1
    assert "start all brokers" in early.stderr
    cluster.start_broker(cluster.brokers[0])
    partial = restore(gazctl, cluster)
    assert "brokers of the backup are absent: b/broker-1, c/broker-2" in partial.stderr
    start_brokers(cluster, cluster.brokers[1:])
    before = keys(cluster)
    dry = restore(gazctl, cluster, "--dry-run")
    assert keys(cluster) == before
    assert rows(dry)["kept/spooled"]["claimed_by"]
    outcome = restore(gazctl, cluster)
    assert outcome.status == 0, outcome.stderr
    restored = rows(outcome)
    assert restored["kept/spooled"]["head"] == end
    assert not any(row["skips"] for row in restored.values())
    assert not keys(cluster, b"/gazette_sdk/restore")
    assert write(cluster, "kept/spooled", b"more\n")[0] == end
    assert restored["kept/pruned"]["suspended"] == "FULL"
    assert write(cluster, "kept/pruned", b"more\n")[0] == 9
    assert write(cluster, "kept/suspended", b"more\n")[0] == resumed
    gazctl.ok("backup", "create", "c.tar.gz")
    assert saved(gazctl, "c.tar.gz")["kept/spooled"].registers == (("owner", "ada"),)
    again = restore(gazctl, cluster)
    assert "Etcd is not empty" in again.stderr


def test_a_publisher_and_a_reader_that_run_meanwhile_continue(gazette_cluster, tools):
    cluster = gazette_cluster(3, zones=3)
    cluster.wait_until_ready()
    gazctl = tools(cluster)
    gazctl.ok("journals", "create", "orders", "--partitions", "2", "--replication", "2")
    acknowledged, seen = [], []
    is_ending = threading.Event()

    transports = [cluster.connect() for _ in range(2)]

    def publish():
        with Publisher(mapping=BY_CUSTOMER, transport=transports[0]) as publisher:
            while not is_ending.is_set():
                number = len(acknowledged)
                publisher.publish(Order(f"customer-{number % 7}", number)).result(TIMEOUT_S)
                acknowledged.append(number)

    def read():
        with (
            suppress(ClosedError),
            Reader(Order, "topic=orders", transport=transports[1], block=True) as reader,
        ):
            seen.extend(envelope.message.cents for envelope in reader)

    threads = [threading.Thread(target=work, daemon=True) for work in (publish, read)]
    for thread in threads:
        thread.start()
    until(lambda: len(seen) > 50)
    gazctl.ok("backup", "create", "b.tar.gz")
    count = len(seen)
    until(lambda: len(seen) > count + 50)
    wipe(cluster)
    start_brokers(cluster)
    gazctl = tools(cluster)
    outcome = restore(gazctl, cluster)
    assert outcome.status == 0, outcome.stderr
    count = len(seen)
    until(lambda: len(seen) > count + 50)
    is_ending.set()
    threads[0].join(TIMEOUT_S)
    until(lambda: len(seen) >= len(acknowledged))
    for transport in transports:
        sdk_loop.run(transport.aclose(), TIMEOUT_S)
    threads[1].join(TIMEOUT_S)
    assert sorted(seen) == acknowledged, "each message once"


def test_offsets_that_a_lost_disk_may_have_given_are_not_given_again(gazette_cluster, tools):
    cluster = gazette_cluster(3, zones=3)
    cluster.apply(SPECS)
    gazctl = tools(cluster)
    write(cluster, "kept/stored", b"first\n")
    write(cluster, "kept/spooled", b"first\n")
    write(cluster, "kept/spooled", b"and lost\n")
    until(lambda: list(cluster.fragments.glob("kept/spooled/*-*")))
    gazctl.ok("backup", "create", "b.tar.gz")
    given = write(cluster, "kept/spooled", b"acknowledged after the backup\n")[1]
    [holder] = saved(gazctl, "b.tar.gz")["kept/spooled"].brokers
    wipe(cluster)
    lost = cluster.broker(holder.split("/")[1])
    start_brokers(cluster, [each for each in cluster.brokers if each is not lost])
    assert "are absent" in restore(gazctl, cluster).stderr
    outcome = restore(gazctl, cluster, "--lost", holder)
    assert outcome.status == 0, outcome.stderr
    restored = rows(outcome)
    assert restored["kept/spooled"]["skips"]
    assert not restored["kept/stored"]["skips"]
    assert write(cluster, "kept/stored", b"second\n")[0] == 6
    begin, _ = write(cluster, "kept/spooled", b"second\n")
    assert begin >= 1 << 40 > given
    content = tools(cluster).ok("journals", "read", "kept/spooled").stdout
    assert content == b"first\nsecond\n", "readers pass over the gap at once"
    listed = gazctl.ok("journals", "list", "-l", "name=kept/spooled", "-o", "yaml").text
    gazctl.ok("journals", "apply", stdin=listed.encode())
    assert gazctl.ok("journals", "read", "kept/spooled").stdout == content


def test_the_old_cluster_must_not_answer_and_consumers_must_not_run(gazette_cluster, tools):
    old = gazette_cluster(1, zones=1)
    old.apply(SPECS.replace("replication: 2", "replication: 1"))
    gazctl = tools(old)
    gazctl.ok("backup", "create", "b.tar.gz")
    new = gazette_cluster(1, zones=1)
    tools(new)
    refused = restore(gazctl, new)
    assert refused.status == 1
    assert "of the old cluster answers" in refused.stderr
    assert not keys(new, b"/gazette/cluster/items/")
    with run_shards(totals, cluster=new):
        until(lambda: any(b"/members/" in key for key in keys(new, b"/gazette/consumers/")))
        running = restore(gazctl, new)
    assert "processes of applications run" in running.stderr


def test_a_backup_names_content_that_no_store_has(gazette_cluster, tools):
    cluster = gazette_cluster(1, zones=1)
    cluster.apply(SPECS.replace("replication: 2", "replication: 1"))
    gazctl = tools(cluster)
    write(cluster, "kept/stored", b"first\n")
    write(cluster, "kept/spooled", b"first\n")
    write(cluster, "kept/spooled", b"second\n")
    gazctl.ok("backup", "create", "memory.tar.gz")
    root = ("--file-root", str(cluster.fragments))
    until(lambda: head(cluster, "kept/stored") and list(cluster.fragments.glob("kept/stored/*-*")))
    outcome = gazctl("backup", "verify", "memory.tar.gz", *root, "-o", "json")
    missing = {name: row["missing"] for name, row in rows(outcome).items()}
    assert missing["kept/stored"] == []
    assert missing["kept/spooled"][-1][1] == 13
    assert outcome.status == 1
    assert "are in no store" in outcome.stderr
    path = gazctl.directory / "memory.tar.gz"
    path.write_bytes(path.read_bytes()[:-40])
    assert "not a whole backup" in gazctl("backup", "show", "memory.tar.gz").stderr


MIRRORED = """
name: kept/
replication: 2
fragment: {length: 1048576, compression_codec: GZIP, stores: ["file:///"], refresh_interval: 1s}
children:
  - name: kept/spooled
    labels: [{name: content-type, value: application/x-ndjson}]
  - name: kept/suspended
    labels: [{name: content-type, value: application/x-ndjson}]
    suspend: {level: FULL, offset: 9}
  - name: kept/given-up
"""


def mirrors(cluster, pattern):
    return list((cluster.fragments / ".gazette").glob(f"*/{pattern}"))


def test_a_cluster_is_rebuilt_from_the_mirrors_in_its_stores(gazette_cluster, tools):
    cluster = gazette_cluster(3, zones=3, arguments=["--broker.mirror-specs"])
    cluster.apply(MIRRORED)
    gazctl = tools(cluster)
    gazctl.ok("journals", "create", "orders", "--partitions", "2", "--replication", "2")
    gazctl.ok("journals", "create", "totals", "--partitions", "2", "--replication", "2")
    write(cluster, "kept/spooled", b'{"n": 1}\n')
    expected = {f"customer-{number}": 0 for number in range(8)}

    def publish(count):
        with Publisher(mapping=BY_CUSTOMER, transport=cluster.connect()) as publisher:
            for number in range(count):
                name = f"customer-{number % len(expected)}"
                publisher.publish(Order(name, number))
                expected[name] += number

    with run_shards(totals, cluster=cluster) as running:
        publish(50)
        running.wait_caught_up(TIMEOUT_S)
        until(lambda: len(mirrors(cluster, "shards/**/@shard.json")) == 2)
        until(lambda: mirrors(cluster, "journals/kept/given-up/@spec.json"))
        gazctl.ok("journals", "delete", "kept/given-up", "--yes")
        until(lambda: not mirrors(cluster, "journals/kept/given-up/@spec.json"))
        write(cluster, "kept/spooled", b'{"n": 2}\n')
        publish(50)
        running.wait_caught_up(TIMEOUT_S)
        running.crash(0)
    names = {each for each in gazctl.ok("journals", "list").text.split() if "/" in each}
    before = {name: head(cluster, name) for name in names - {"kept/suspended"}}
    wipe(cluster)
    start_brokers(cluster)
    gazctl = tools(cluster)
    source = ("--from-stores", "file:///")
    dry = restore(gazctl, cluster, *source, "--dry-run", file="")
    assert dry.status == 0, dry.stderr
    outcome = restore(gazctl, cluster, *source, file="")
    assert outcome.status == 0, outcome.stderr
    restored = rows(outcome)
    assert restored.keys() == names
    assert {name: restored[name]["head"] for name in before} == before
    assert restored["kept/suspended"]["suspended"] == "FULL"
    assert not any(row["guessed"] or row["skips"] for row in restored.values())
    with run_shards(totals, cluster=cluster) as running:
        publish(50)
        running.wait_caught_up(TIMEOUT_S)
        stores = [running.store(f"orders/part-{number:03d}") for number in range(2)]
        found = {key: store[key] for store in stores for key in expected if key in store}
    assert found == expected
    until(lambda: len(list((cluster.fragments / ".gazette").iterdir())) == 2)


def test_names_and_heads_are_found_without_mirrors_and_guesses_are_marked(gazette_cluster, tools):
    cluster = gazette_cluster(2, zones=2)
    cluster.apply(MIRRORED)
    gazctl = tools(cluster)
    for name, text in {"kept/spooled": b'{"n": 1}\n', "kept/given-up": b"a,b\n1,2\n"}.items():
        write(cluster, name, text)
        write(cluster, name, text)
    for broker in cluster.brokers:
        broker.drain(timeout_s=None)
        broker.stop(20.0)
    kill_etcd(cluster)
    for broker in cluster.brokers:
        cluster.start_broker(broker, empty_disk=True)
    gazctl = tools(cluster)
    outcome = restore(gazctl, cluster, "--from-stores", "file:///", file="")
    assert outcome.status == 0, outcome.stderr
    restored = rows(outcome)
    assert "content-type application/x-ndjson" in restored["kept/spooled"]["guessed"]
    assert "content-type text/csv" in restored["kept/given-up"]["guessed"]
    assert all(row["skips"] for row in restored.values())
    begin, _ = write(cluster, "kept/spooled", b'{"n": 2}\n')
    assert begin == (1 << 40) + 18
    assert gazctl.ok("journals", "read", "kept/spooled").stdout.count(b"\n") == 3


def test_a_cluster_with_keys_and_tls_is_restored(tmp_path, gazctl):
    certificates = Authority(tmp_path)
    issued = certificates.issue()
    shared = (
        *("--broker.auth-keys", KEY, "--broker.file-root", str(tmp_path)),
        *("--broker.server-cert-file", str(issued.cert_file)),
        *("--broker.server-cert-key-file", str(issued.key_file)),
        *("--broker.peer-ca-file", str(certificates.ca_file)),
    )
    etcd = EtcdServer(tmp_path / "etcd", sync_writes=False)
    trusted = ("--broker.trusted-ca-file", str(certificates.ca_file))

    @contextmanager
    def brokers():
        """Two brokers over their spool directories, killed in the end."""
        with ExitStack() as stack:
            processes = [
                stack.enter_context(
                    serve(
                        tmp_path,
                        *("--etcd.address", etcd.endpoint, *shared, "--broker.zone", zone),
                        *("--broker.id", "broker", "--broker.spool-dir", zone),
                    )
                )
                for zone in ("a", "b")
            ]
            for process in processes:
                stack.callback(process.kill)
            yield [served_at(process)[0] for process in processes]

    def keyed(*words, keys=("--broker.auth-keys", KEY), stdin=b""):
        return gazctl(*words, *trusted, *keys, stdin=stdin)

    def restored(*more, keys=("--broker.auth-keys", KEY)):
        root = ("--file-root", str(tmp_path))
        return keyed("restore", "cluster", "--from", "b.tar.gz", *root, *more, keys=keys)

    etcd.start_blocking()
    try:
        gazctl.environ["ETCD_ADDRESS"] = etcd.endpoint
        with brokers() as endpoints:
            gazctl.environ["GAZETTE_ADDRESS"] = endpoints[0]
            made = keyed("journals", "create", "kept", "--replication", "2")
            assert made.status == 0, made.stderr
            first = keyed("journals", "append", "-l", "name=kept/part-000", stdin=b"first\n")
            assert first.status == 0, first.stderr
            made = keyed("backup", "create", "b.tar.gz")
            assert made.status == 0, made.stderr
            keyed("journals", "append", "-l", "name=kept/part-000", stdin=b"after the backup\n")
        etcd.kill()
        shutil.rmtree(etcd.data_dir / "data")
        etcd.start_blocking()
        gazctl.environ["ETCD_ADDRESS"] = etcd.endpoint
        with brokers() as endpoints:
            gazctl.environ["GAZETTE_ADDRESS"] = endpoints[0]
            refused = restored(keys=("--broker.auth-keys", base64.b64encode(b"another").decode()))
            assert refused.status == 1
            assert "give the keys of the brokers with --broker.auth-keys" in refused.stderr
            outcome = restored("-o", "json")
            assert outcome.status == 0, outcome.stderr
            assert rows(outcome)["kept/part-000"]["head"] == len(b"first\nafter the backup\n")
            read = keyed("journals", "read", "kept/part-000")
            assert read.stdout == b"first\nafter the backup\n"
    finally:
        etcd.kill()


@pytest.mark.long
@pytest.mark.serial
def test_a_large_cluster_is_restored_with_its_shards_though_the_restore_is_killed(
    gazette_cluster, tools, monkeypatch
):
    """The whole: 200 journals, 20 shards with state, a restore that is killed, no offset twice."""
    cluster = gazette_cluster(3, zones=3)
    gazctl = tools(cluster)
    plain = [f"plain/part-{number:03d}" for number in range(146)]
    cluster.apply(
        "name: plain/\nreplication: 2\n"
        "labels: [{name: content-type, value: application/x-ndjson}]\n"
        "fragment: {length: 1048576, compression_codec: NONE, stores: ['file:///'],"
        " refresh_interval: 1m}\nchildren:\n"
        + "".join(
            f"  - name: {name}\n    labels: [{{name: kind, value: {kind_of(number)}}}]\n"
            for number, name in enumerate(plain)
        )
    )
    gazctl.ok("journals", "create", "orders", "--partitions", "20", "--replication", "2")
    gazctl.ok("journals", "create", "totals", "--partitions", "14", "--replication", "2")
    expected = {f"customer-{number}": 0 for number in range(60)}

    def publish(count):
        with Publisher(mapping=BY_CUSTOMER, transport=cluster.connect()) as publisher:
            for number in range(count):
                name = f"customer-{number % len(expected)}"
                publisher.publish(Order(name, number))
                expected[name] += number

    written = {}

    def append_all(journals, text):
        async def work(transport):
            async def one(journal):
                async def source():
                    yield text

                request = pb.AppendRequest(journal=journal)
                if journal.endswith("0"):
                    request.union_registers.labels.add(name="owner", value=journal[-3:])
                response = await append(transport, request, [source])
                spans = written.setdefault(journal, [])
                assert not spans or response.commit.begin == spans[-1][1], "an offset given twice"
                spans.append((response.commit.begin, response.commit.end, text))

            await asyncio.gather(*map(one, journals))

        call(cluster, work)

    append_all(plain, b"before the backup\n")
    with run_shards(totals, processes=2, cluster=cluster) as running:
        publish(2000)
        running.wait_caught_up(TIMEOUT_S)
        suspend(gazctl, 10, "kind=suspended")
        gazctl.ok("backup", "create", "b.tar.gz")
        awake = [name for number, name in enumerate(plain) if kind_of(number) != "suspended"]
        append_all(awake[:60], b"after the backup\n")
        publish(500)
        running.wait_caught_up(TIMEOUT_S)
        running.crash(0)
        running.crash(1)
    backup = archive.read(str(gazctl.directory / "b.tar.gz"))
    assert (len(backup.journals), len(backup.shards)) == (200, 20)
    assert all(shard.hints for shard in backup.shards)
    heads = {name: head(cluster, name) for name in awake}
    heads |= {name: written[name][-1][1] for name in awake}
    wipe(cluster)
    start_brokers(cluster)
    begun = time.monotonic()
    command = [sys.executable, "-m", "gazette_sdk.cli.gazctl", "restore", "cluster"]
    command += ["--from", str(gazctl.directory / "b.tar.gz")]
    command += ["--file-root", str(cluster.fragments)]
    command += ["--broker.address", cluster.address, "--etcd.address", cluster.etcd_endpoint]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as killed:
        until(lambda: keys(cluster, b"/gazette/cluster/items/"))
        killed.kill()
    assert keys(cluster, b"/gazette_sdk/restore")
    another = restore(gazctl, cluster, file=other_backup(gazctl, backup))
    assert "another backup was begun" in another.stderr
    outcome = restore(gazctl, cluster)
    elapsed_s = time.monotonic() - begun
    assert outcome.status == 0, outcome.stderr
    assert elapsed_s < 120
    restored = rows(outcome)
    for name, before in saved(gazctl, "b.tar.gz").items():
        row = restored[name]
        assert not row["skips"]
        level = pb.JournalSpec.Suspend.Level.Name(before.spec.suspend.level)
        assert row["suspended"] == level
        assert level != "NONE" or row["head"] >= before.head
    assert {name: restored[name]["head"] for name in awake} == heads
    hints = {key for shard in backup.shards for key in shard.hints}
    assert {key.decode() for key in keys(cluster)} >= hints

    append_all(plain, b"after the restore\n")
    gazctl.ok("backup", "create", "c.tar.gz")
    again = archive.read(str(gazctl.directory / "c.tar.gz"))
    assert {each.name: each.registers for each in again.journals if each.registers} == {
        each.name: each.registers for each in backup.journals if each.registers
    }
    for name, spans in written.items():
        content = gazctl.ok("journals", "read", name).stdout
        assert content == b"".join(text for _, _, text in spans)
    with run_shards(totals, processes=2, cluster=cluster) as running:
        publish(500)
        running.wait_caught_up(TIMEOUT_S)
        found = {}
        for number in range(20):
            store = running.store(f"orders/part-{number:03d}")
            found.update((key, store.get(key, 0)) for key in expected if key in store)
    assert found == expected
    print(f"restored in {elapsed_s:.1f} s")


def kind_of(number):
    return "suspended" if number < 10 else "awake"


def other_backup(gazctl, backup):
    path = gazctl.directory / "other.tar.gz"
    archive.write(str(path), dataclasses.replace(backup, created_s=1.0))
    return str(path)

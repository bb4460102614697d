"""Recorded calls of ``gazctl``, a cluster that is as theirs was, and their replay."""

from __future__ import annotations

import hashlib
import json
import os

import pytest

from support.golden_gazctl import our_output, plain_cells, recorded_output
from support.vectors import golden

CASES = {case["name"]: case for case in golden("broker/gazctl.json")}

PATTERN = "".join(f"{number:07}\n" for number in range(1000)).encode()

MENDED = {
    "edit, no match": 1,
    "prune, no match": 1,
    "fragments json, a fully suspended journal matches": 0,
    "prune dry run, a fully suspended journal matches": 0,
    "prune, file store (the tool has no file root)": 0,
    "list, broker unreachable": 1,
    "read, with cache, stored fragment without file root": 1,
    "edit, revision is stale (RPC fails)": 0,
    "append lines, direct": 0,
    "apply again (revision 0 means create)": 0,
}
"""Exit statuses where the recorded tool had a defect."""

OUTCOMES = {
    "apply": ["made/one created", "made/two created", "made/x/three created"],
    "apply again (revision 0 means create)": [
        "made/one unchanged",
        "made/two unchanged",
        "made/x/three unchanged",
    ],
    "apply, revision ignored": ["made/one updated"],
    "prune dry run": ["prune/aged 2", "TOTAL 2"],
    "prune dry run, retention 0": ["prune/keep 2", "TOTAL 2"],
    "prune dry run, a fully suspended journal matches": ["prune/aged 2", "TOTAL 2"],
    "prune, file store (the tool has no file root)": ["prune/aged 2", "TOTAL 2"],
    "apply deletes with max-txn-size": [
        "made/one deleted",
        "made/two deleted",
        "made/x/three updated",
    ],
}
"""Output of ``apply`` and ``prune`` for each journal. The recorded tool wrote nothing."""

SPECS = """
replication: 1
fragment: {length: 1048576, compression_codec: SNAPPY, refresh_interval: 1s}
children:
- name: frag/list
  fragment: {compression_codec: NONE, stores: ["file:///"]}
- name: http/data
- name: http/stored
  fragment: {compression_codec: NONE, stores: ["file:///"]}
- name: lines/
  children: [CHILDREN]
- name: orders/
  labels:
  - {name: app.gazette.dev/message-type, value: Order}
  - {name: content-type, value: application/x-ndjson}
  - {name: topic, value: orders}
  fragment: {length: 4096, stores: ["file:///"]}
  children:
  - {name: orders/part-000, labels: [{name: part, value: "000"}]}
  - {name: orders/part-001, labels: [{name: part, value: "001"}]}
  - {name: orders/part-002, labels: [{name: part, value: "002"}]}
  - {name: orders/part-003, labels: [{name: part, value: "003"}]}
- name: other/a-1
  labels: [{name: region, value: eu-west}, {name: topic, value: clicks}]
- name: other/a-2
  labels: [{name: region, value: eu-east}, {name: topic, value: clicks}]
- name: other/a-3
  labels: [{name: region, value: us-west}, {name: topic, value: views}]
- name: other/multi
  labels: [{name: empty, value: ""}, {name: tag1, value: x}, {name: tag1, value: "y"}]
- name: prune/aged
  fragment: {compression_codec: NONE, retention: 1h, stores: ["file:///"]}
- name: prune/keep
  fragment: {compression_codec: NONE, stores: ["file:///"]}
- {name: read/big, fragment: {stores: ["file:///"]}}
- {name: read/broken, fragment: {stores: ["file:///"]}}
- name: read/holes
  fragment: {compression_codec: NONE, stores: ["file:///"]}
- name: read/local
- name: read/new
- name: reset/
  fragment: {compression_codec: NONE, stores: ["file:///"]}
  children: [{name: reset/ahead}, {name: reset/empty}, {name: reset/fine}]
- {name: suspend/data, fragment: {compression_codec: NONE, stores: ["file:///"]}, \
suspend: {offset: 26}}
- {name: suspend/data2, fragment: {compression_codec: NONE, stores: ["file:///"]}, \
suspend: {offset: 13}}
- {name: suspend/empty, suspend: {}}
- {name: suspend/http, suspend: {level: FULL}}
""".replace(
    "CHILDREN",
    ", ".join(
        f"{{name: lines/{name}/part-{part:03}, labels: [{{name: mapping, value: {label}}}]}}"
        for name, label in sorted(
            (kind, kind) for kind in ("b64", "direct", "fixed", "modulo", "rendezvous", "rnd")
        )
        for part in range(4)
    ),
)


def store(root, journal, begin, content, mod_time):
    """Place a stored fragment, as a broker would have stored it."""
    digest = hashlib.sha1(content).hexdigest()
    path = root / journal / f"{begin:016x}-{begin + len(content):016x}-{digest}.raw"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (mod_time, mod_time))


@pytest.fixture(scope="module")
def state(cluster):
    """Return the content that was stored before, made once for all tests."""
    root = cluster.file_root
    for index in range(4):
        begin = 1100 * index
        store(root, "frag/list", begin, PATTERN[begin : begin + 1100], 1700000000 + 100 * index)
    store(root, "http/stored", 0, b"stored line\n", 1700000000)
    for begin in (0, 1100):
        store(root, "prune/aged", begin, PATTERN[:1100], 1700000000)
        store(root, "prune/keep", begin, PATTERN[:1100], 1700000000)
    store(root, "read/holes", 0, PATTERN[:1100], 1700000000)
    store(root, "read/holes", 4400, PATTERN[4400:5500], 1700000000)
    (root / "health").mkdir()
    return {"applied": False}


@pytest.fixture
def golden_tool(gazctl, cluster, state):
    """``gazctl`` beside a cluster with journals; state is made by the first test that runs."""
    gazctl.environ["BROKER_ADDRESS"] = cluster.address
    if not state["applied"]:
        gazctl.ok("journals", "apply", stdin=SPECS.encode())
        append(gazctl, "http/data", b"first line\nsecond line\n")
        gazctl.ok("journals", "reset-head", "-l", "name=frag/list")  # behind what is stored
        append(gazctl, "frag/list", b"local")
        state["applied"] = True
    return gazctl


def append(tool, journal, content):
    tool.ok("journals", "append", "-l", f"name={journal}", stdin=content)


def replay(tool, cluster, name, **changes):
    """Call the tool as a case did, and compare exit status, output and files."""
    case = CASES[name]
    work = tool.directory

    def local(text):
        return text.replace("WORK/", f"{work}/").replace("FILE_ROOT", str(cluster.file_root))

    stdin = case.get("stdin") or ""
    environ = {
        key: local(value).replace("SCRIPT", f"sh {work}/script")
        for key, value in case.get("env", {}).items()
    }
    encoding = "latin-1" if "fixed" in name else "utf-8"
    outcome = tool(
        *(local(argument) for argument in case["args"]),
        stdin=stdin.encode(encoding),
        environ=environ | changes.get("environ", {}),
    )
    expected = MENDED.get(name, case["exit"])
    assert outcome.status == expected, (name, outcome.stderr)
    assert "Traceback" not in outcome.stderr
    if expected:
        assert outcome.stderr.strip(), name
    if name in OUTCOMES:
        assert [" ".join(row[:2]) for row in plain_cells(outcome.text)[1:]] == OUTCOMES[name]
    elif name not in MENDED:
        wanted = recorded_output(case["args"], case["stdout"])
        assert our_output(case["args"], outcome.text) == wanted, name
        for file, content in case.get("files", {}).items():
            if file.endswith(".json"):
                assert json.loads((work / file).read_text()) == json.loads(content), (name, file)
    return outcome

from __future__ import annotations

import sys

import pytest

from gazette_sdk.cli.run_consumer import configuration_of, import_application, transport_of
from gazette_sdk.cli.settings import ConsumerBrokerSettings, ConsumerEtcdSettings, ConsumerSettings
from gazette_sdk.errors import ConfigurationError

MODULE = """
from gazette_sdk import shard

@shard.handler(message=dict, store=shard.JsonStore[dict], sources="topic=orders")
def counts(txn, message):
    pass

class Sums(shard.Application):
    message, store, name = dict, shard.JsonStore[dict], "sums"

    def consume(self, txn, message):
        pass

class Failing(Sums):
    def __init__(self):
        super().__init__()
        self.limits = {}["limits"]

number = 7
"""

MISUSED = """
import json
import dataclasses
from gazette_sdk import shard

def declare(**options):
    return shard.handler(message=dict, **options)(print)

{}
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "made_for_a_test.py").write_text(MODULE)
    (tmp_path / "broken_for_a_test.py").write_text("\nimport nothing_of_this_name")
    (tmp_path / "malformed_for_a_test.py").write_text("\ndef (")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "made_for_a_test"
    sys.modules.pop("made_for_a_test", None)


def test_an_application_is_a_decorated_function_or_a_class(module):
    assert import_application(f"{module}:counts").full_name == "made_for_a_test.counts"
    assert import_application(f"{module}:Sums").full_name == "sums"


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("made_for_a_test", "write MODULE:APPLICATION"),
        (":counts", "write MODULE:APPLICATION"),
        ("made_for_a_test:", "write MODULE:APPLICATION"),
        ("made_for_a_test:number", "is no application"),
        ("made_for_a_test:missing", "is no application; .* such as counts$"),
        ("made_for_a_test:counts.missing", "is no application"),
        ("missing_module:counts", "No module named 'missing_module'"),
        ("broken_for_a_test:counts", "No module named 'nothing_of_this_name'"),
        ("broken_for_a_test:counts", r"/broken_for_a_test.py, line 2\)$"),
        ("malformed_for_a_test:counts", r"invalid syntax \(malformed_for_a_test.py, line 2\)$"),
        ("made_for_a_test.py:counts", "as in made_for_a_test:APPLICATION, and not its file$"),
    ],
)
def test_what_is_no_application_is_refused(module, place, text):
    with pytest.raises(ConfigurationError, match=text):
        import_application(place)


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("@shard.handler(message=dict, store=None)\ndef f(t, m): pass", "f declares no .* line 9"),
        ("@shard.handler(message=dict)\ndef f(txn, m): pass", r"TypeError: .*'store'.* line 9"),
        ("declare(store=shard.JsonStore, sources='a b c')", "'a b c'.* line 7"),
        ("declare(store=shard.JsonStore, on_error='drop')", "use 'fail'.* line 7"),
        ("dataclasses.dataclass(5)", r"AttributeError: .* line 9"),
        ("json.loads('[')", r"JSONDecodeError: .* line 9"),
    ],
)
def test_the_line_of_a_failed_import_is_the_users(module, tmp_path, statement, text):
    (tmp_path / "misused_for_a_test.py").write_text(MISUSED.format(statement))
    with pytest.raises(ConfigurationError, match=text) as caught:
        import_application("misused_for_a_test:f")
    assert str(caught.value).count("misused_for_a_test.py") == 1


def test_the_line_of_an_application_that_cannot_be_made_is_the_users(module):
    text = r"KeyError: 'limits' \(.*made_for_a_test.py, line 17\)$"
    with pytest.raises(ConfigurationError, match=text):
        import_application("made_for_a_test:Failing")


def test_options_become_a_configuration():
    settings = ConsumerSettings(id="one-consumer", limit=7, directory="/shards", workers=3)
    etcd = ConsumerEtcdSettings(address="http://etcd:2379", lease_s=2.5)
    config = configuration_of(settings, etcd, "http://host:1")
    assert (config.suffix, config.endpoint, config.shard_limit) == (
        "one-consumer",
        "http://host:1",
        7,
    )
    assert (config.etcd.endpoint, config.etcd.lease_ttl_s) == ("http://etcd:2379", 3)
    assert (str(config.directory), config.workers, config.etcd_prefix) == ("/shards", 3, "")


def test_stored_fragments_are_read_below_the_file_root(tmp_path):
    def root_of(path):
        options = ConsumerBrokerSettings(file_root=str(path))
        return transport_of(options, "http://localhost:1", "here").file_root

    assert root_of(tmp_path) == tmp_path
    assert root_of("") is None
    with pytest.raises(ConfigurationError, match=r"--broker\.file-root: .*missing is no directory"):
        root_of(tmp_path / "missing")


def test_malformed_keys_are_refused():
    with pytest.raises(ValueError, match="key"):
        ConsumerSettings(auth_keys="AA")


def test_certificates_without_effect_are_refused():
    with pytest.raises(ValueError, match=r"--consumer\.server-ca-file has no effect"):
        ConsumerSettings(server_ca_file="ca.pem")

import pytest

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.server.options import Sources, load
from gazette_sdk.server.settings import BROKER, ETCD
from gazette_sdk.server.tls import with_secrets

KEY = "YSBzZWNyZXQgb2YgdGhlIGNsdXN0ZXI="


def test_a_secret_comes_from_its_file_named_by_any_source(tmp_path):
    path = tmp_path / "keys"
    path.write_text(KEY + "\n")
    for sources in (
        Sources({"broker.auth-keys-file": [str(path)]}),
        Sources(environ={"BROKER_AUTH_KEYS_FILE": str(path)}),
    ):
        assert with_secrets(BROKER, load(BROKER, sources)).auth_keys == KEY
    settings = load(ETCD, Sources(environ={"ETCD_PASSWORD_FILE": str(path), "ETCD_USER": "me"}))
    assert with_secrets(ETCD, settings).password == KEY
    assert KEY not in repr(with_secrets(ETCD, settings))


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff\xfe"])
def test_a_file_without_a_secret_is_refused_with_its_option(tmp_path, content):
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    settings = load(BROKER, Sources({"broker.auth-keys-file": [str(path)]}))
    with pytest.raises(ConfigurationError, match=r"--broker\.auth-keys-file: .*keys"):
        with_secrets(BROKER, settings)


def test_a_secret_given_twice_is_refused(tmp_path):
    settings = load(BROKER, Sources({"broker.auth-keys-file": ["/x"], "broker.auth-keys": [KEY]}))
    with pytest.raises(ConfigurationError, match="are both given; leave one out"):
        with_secrets(BROKER, settings)


def test_settings_without_files_stay_as_they_are():
    settings = load(BROKER, Sources())
    assert with_secrets(BROKER, settings) is settings

import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.server.options import Sources, load
from gazette_sdk.server.settings import BROKER, ETCD
from gazette_sdk.server.tls import check_files, server_context
from support.certificates import Authority


def test_a_certificate_and_its_key_make_a_context(tmp_path):
    authority = Authority(tmp_path)
    issued = authority.issue()
    context = server_context(str(issued.cert_file), str(issued.key_file))
    assert context.verify_mode == ssl.CERT_NONE
    context = server_context(str(issued.cert_file), str(issued.key_file), str(authority.ca_file))
    assert context.verify_mode == ssl.CERT_REQUIRED


def test_a_missing_file_is_named(tmp_path):
    issued = Authority(tmp_path).issue()
    files = (str(issued.cert_file), str(issued.key_file), str(tmp_path / "missing"))
    for names in ((files[2], files[1], ""), (files[0], files[2], ""), files):
        with pytest.raises(ConfigurationError, match=r"missing cannot be read .*check its path"):
            server_context(*names)


@pytest.mark.parametrize(
    ("group", "options", "named"),
    [
        (
            BROKER,
            {"broker.server-cert-file": "none"},
            "--broker.server-cert-file: none cannot be read",
        ),
        (
            BROKER,
            {"broker.server-cert-file": "cert", "broker.server-cert-key-file": "bad"},
            "--broker.server-cert-file and --broker.server-cert-key-file: .* cannot be used",
        ),
        (BROKER, {"broker.peer-ca-file": "bad"}, "--broker.peer-ca-file: bad holds no usable PEM"),
        (
            ETCD,
            {"etcd.address": "https://localhost:1", "etcd.trusted-ca-file": "none"},
            "--etcd.trusted-ca-file: none cannot be read",
        ),
    ],
)
def test_the_option_of_a_file_is_named(tmp_path, monkeypatch, group, options, named):
    monkeypatch.chdir(tmp_path)
    Path("bad").write_text("nothing")
    Path("cert").write_bytes(Authority(tmp_path).issue().cert_file.read_bytes())
    settings = load(group, Sources({name: [value] for name, value in options.items()}))
    with pytest.raises(ConfigurationError, match=named):
        check_files(group, settings)


def test_a_key_with_a_password_is_refused_without_asking_for_it(tmp_path):
    issued = Authority(tmp_path).issue()
    key = load_pem_private_key(issued.key_file.read_bytes(), None)
    issued.key_file.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password"))
    )
    with pytest.raises(ConfigurationError, match="the key without a password"):
        server_context(str(issued.cert_file), str(issued.key_file))


def test_a_key_of_another_certificate_is_refused(tmp_path):
    authority = Authority(tmp_path)
    one, two = authority.issue("one"), authority.issue("two")
    with pytest.raises(ConfigurationError, match="cannot be used together"):
        server_context(str(one.cert_file), str(two.key_file))


def test_files_that_are_no_certificates_are_refused(tmp_path):
    issued = Authority(tmp_path).issue()
    nothing = tmp_path / "nothing"
    nothing.write_text("nothing")
    with pytest.raises(ConfigurationError, match="cannot be used together"):
        server_context(str(nothing), "")
    with pytest.raises(ConfigurationError, match="no usable PEM certificates"):
        server_context(str(issued.cert_file), str(issued.key_file), str(nothing))

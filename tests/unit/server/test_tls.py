import ssl

import pytest

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.server.tls import server_context
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
    for names, flag in (
        ((files[2], files[1], ""), "server-cert-file"),
        ((files[0], files[2], ""), "server-cert-key-file"),
        (files, "server-ca-file"),
    ):
        with pytest.raises(ConfigurationError, match=f"{flag}: there is no file .*missing"):
            server_context(*names)


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

import os

import pytest

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.transport.stream.blocking import TlsContext
from gazette_sdk.transport.wire import Tls
from support.certificates import Authority

ENDPOINT = "https://localhost:1"


def test_changed_certificates_are_read_again_and_bad_ones_are_not_used(tmp_path, caplog):
    authority = Authority(tmp_path)
    issued = authority.issue()
    context = TlsContext(Tls(str(authority.ca_file), str(issued.cert_file), str(issued.key_file)))
    first = context.of(ENDPOINT)
    assert context.of(ENDPOINT) is first
    assert context.of("http://localhost:1") is None

    authority.issue()  # into the same files
    os.utime(issued.cert_file, (1, 1))
    second = context.of(ENDPOINT)
    assert second is not first

    issued.cert_file.write_text("no certificate")
    assert context.of(ENDPOINT) is second
    assert context.of(ENDPOINT) is second
    assert [text for text in caplog.messages if "earlier certificates stay in use" in text]
    assert len(caplog.messages) == 1


def test_certificates_that_were_never_usable_are_an_error(tmp_path):
    with pytest.raises(ConfigurationError):
        TlsContext(Tls(cert_file=str(tmp_path / "missing"))).of(ENDPOINT)

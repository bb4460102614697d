"""A certificate authority for one test."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = dt.timedelta(days=1)


@dataclass(frozen=True)
class Certificate:
    """Files of a certificate and its key."""

    cert_file: Path
    key_file: Path


class Authority:
    """Signs certificates; its own is ``ca_file``."""

    def __init__(self, directory: Path, name: str = "test CA") -> None:
        self._directory = directory
        self._name = _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca_file = directory / f"{name.replace(' ', '-')}.pem"
        self.ca_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str = "localhost", *, days: float = 1.0) -> Certificate:
        """A certificate for a name and for the loopback addresses, which ends in some days."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName(
            [
                x509.DNSName(name),
                x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
                x509.IPAddress(ipaddress.ip_address("::1")),
            ]
        )
        certificate = (
            self._builder(_name(name), key.public_key(), days)
            .add_extension(names, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        files = Certificate(self._directory / f"{name}.pem", self._directory / f"{name}.key.pem")
        files.cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        files.key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return files

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, days: float = 1.0
    ) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + days * _DAY)
        )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

"""Certificates of a local broker: an authority of its own, the node's and clients' certificates. No openssl command."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftloop.pipeline.errors import LocalBrokerError
from draftloop.pipeline.stream.private_files import write_private

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

AUTHORITY_DAYS = 3650
LEAF_DAYS = 397  # what TLS stacks still take for a server
RENEW_DAYS = 30
CLOCK_SLACK = datetime.timedelta(hours=1)  # a container's or a client's clock may be behind


@dataclass(frozen=True)
class Authority:
    """A certificate authority that lives in two files. Whoever holds the key file can be anyone."""

    certificate_file: Path
    key_file: Path

    @classmethod
    def at(cls, folder: Path) -> Authority:
        """The authority in `folder`, made where there is none, half of one or an old one. Raises LocalBrokerError."""
        authority = cls(folder / "ca.pem", folder / "ca.key")
        if days_left(authority.certificate_file) < RENEW_DAYS or not authority.key_file.exists():
            key = _new_key()
            certificate = _signed("draftloop local CA", key, issuer=None, days=AUTHORITY_DAYS, authority=True)
            write_private(authority.key_file, _key_pem(key))
            write_private(authority.certificate_file, _pem(certificate))
        return authority

    def node(self, common_name: str, *, hosts: Sequence[str], days: float = LEAF_DAYS) -> tuple[bytes, bytes]:
        """A certificate that serves and calls, and its key, in PEM. Raises LocalBrokerError."""
        return self._issue(common_name, hosts, days, server=True)

    def client(self, common_name: str, *, days: float = LEAF_DAYS) -> tuple[bytes, bytes]:
        """A certificate that only calls, and its key, in PEM. Raises LocalBrokerError."""
        return self._issue(common_name, (), days, server=False)

    def vouches_for(self, file: Path) -> bool:
        """Whether the certificate in `file` is of this authority and good for a while. Raises LocalBrokerError."""
        from cryptography import x509
        from cryptography.exceptions import InvalidSignature

        if days_left(file) < RENEW_DAYS:
            return False
        issuer, _ = self._own()
        try:
            x509.load_pem_x509_certificate(file.read_bytes()).verify_directly_issued_by(issuer)
        except (InvalidSignature, ValueError, TypeError):
            return False
        return True

    def _own(self) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            issuer = x509.load_pem_x509_certificate(self.certificate_file.read_bytes())
            key = load_pem_private_key(self.key_file.read_bytes(), password=None)
            if not isinstance(key, EllipticCurvePrivateKey) or key.public_key() != issuer.public_key():
                raise ValueError("certificate and key are not a pair")
        except (OSError, ValueError) as error:
            raise LocalBrokerError(
                f"{self.certificate_file} and {self.key_file} are not a CA: {type(error).__name__}",
                mend="delete the tls folder; the next `draftloop broker up` makes a new one",
            ) from error
        return issuer, key

    def _issue(self, common_name: str, hosts: Sequence[str], days: float, *, server: bool) -> tuple[bytes, bytes]:
        key = _new_key()
        certificate = _signed(common_name, key, issuer=self._own(), days=days, hosts=hosts, server=server)
        return _pem(certificate), _key_pem(key)


def self_signed(common_name: str, *, hosts: Sequence[str], days: float = LEAF_DAYS) -> tuple[bytes, bytes]:
    """A certificate nobody vouches for, and its key, in PEM: who trusts it trusts the holder of this key alone."""
    key = _new_key()
    return _pem(_signed(common_name, key, issuer=None, days=days, hosts=hosts, server=True)), _key_pem(key)


def days_left(file: Path) -> float:
    """Days until the first certificate in `file` expires; 0 where there is none. Raises LocalBrokerError."""
    try:
        from cryptography import x509
    except ImportError as error:
        raise LocalBrokerError(
            "certificates need the package cryptography", mend="pip install 'draftloop[kafka]'"
        ) from error
    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError):
        return 0.0
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    return max(0.0, left.total_seconds() / 86400)


def common_name(file: Path) -> str | None:
    """Whom the first certificate in `file` names; None where there is none."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    try:
        names = x509.load_pem_x509_certificate(file.read_bytes()).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except (OSError, ValueError):
        return None
    return str(names[0].value) if names else None


def _signed(
    common_name: str,
    key: EllipticCurvePrivateKey,
    *,
    issuer: tuple[x509.Certificate, EllipticCurvePrivateKey] | None,
    days: float,
    hosts: Sequence[str] = (),
    server: bool = False,
    authority: bool = False,
) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID as Usage
    from cryptography.x509.oid import NameOID

    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer[0].subject if issuer else name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SLACK + min(datetime.timedelta(), datetime.timedelta(days=days)))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
    )
    signer = issuer[1] if issuer else key
    signer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = builder.add_extension(signer_id, False).add_extension(_key_usage(authority=authority), True)
    if not authority:
        usages = [Usage.CLIENT_AUTH, *([Usage.SERVER_AUTH] if server else [])]
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), False)
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), False)
    return builder.sign(signer, hashes.SHA256())


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _key_pem(key: EllipticCurvePrivateKey) -> bytes:
    # Java reads PKCS#8 without a password only.
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

"""TCP and TLS to a broker, one blocking connection at a time, each failure told apart. Kafka clients make one of all.

Knows nothing of Kafka's protocol.
"""

from __future__ import annotations

import socket
import ssl
import time
from datetime import UTC, datetime
from pathlib import Path

from draftloop.pipeline.errors import (
    BrokerUnreachableError,
    CertificateExpiredError,
    ClientCertificateError,
    ConfigError,
    DraftloopError,
    TlsError,
    UnknownCaError,
)
from draftloop.pipeline.stream.kafka_config import KafkaSecurity

# OpenSSL's verification codes (X509_V_ERR_*) that do not mean "not from this CA".
_NOT_YET_VALID = 9
_EXPIRED = 10
_WRONG_HOST = (62, 63, 64)


class _TidySocket(ssl.SSLSocket):
    """Closed with its last reference: a Kafka client that is closed during a handshake forgets the socket."""

    def __del__(self) -> None:
        self.close()


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`; an IPv6 host loses its brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def tls_context(security: KafkaSecurity) -> ssl.SSLContext:
    """TLS 1.2 or newer, `ca_file` the only root. Raises ConfigError for files that are absent or not PEM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # verifies; trusts nothing until told
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = security.check_hostname
    context.sslsocket_class = _TidySocket
    try:
        context.load_verify_locations(cafile=security.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"security.ca_file {security.ca_file} cannot be used: {_short(error)}",
            mend="give the PEM file of the CA that signed the broker's certificate",
        ) from error
    if security.cert_file is not None:
        # Without a password OpenSSL would ask for one on the terminal: an empty one makes it fail instead.
        password = security.key_password() or ""
        try:
            context.load_cert_chain(security.cert_file, security.key_file, password=password)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"security.cert_file {security.cert_file} with key_file {security.key_file} cannot be used:"
                f" {_short(error)}",
                mend="give a certificate and its own key, both PEM; an encrypted key needs key_password_file",
            ) from error
    return context


def require_valid_certificate(security: KafkaSecurity) -> None:
    """Our own certificate's dates. Raises CertificateExpiredError; says nothing where `cryptography` is missing."""
    if security.cert_file is None:
        return
    try:
        from cryptography import x509
    except ImportError:  # then the broker's refusal is what we see
        return
    try:
        certificate = x509.load_pem_x509_certificate(Path(security.cert_file).read_bytes())
    except (OSError, ValueError):  # tls_context names what is wrong with the file
        return
    now = datetime.now(UTC)
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not start <= now <= end:
        when = (
            f"expired on {end:%Y-%m-%d %H:%M} UTC" if now > end else f"is not valid before {start:%Y-%m-%d %H:%M} UTC"
        )
        raise CertificateExpiredError(
            f"our own certificate {security.cert_file} {when}", mend="renew it, and check this machine's clock"
        )


def connect(address: str, *, timeout_s: float) -> socket.socket:
    """A TCP connection. Raises BrokerUnreachableError: refused, no answer, unknown name."""
    host, port = split_address(address)
    try:
        return socket.create_connection((host, port), timeout=timeout_s)
    except socket.gaierror as error:
        raise BrokerUnreachableError(
            f"the name {host!r} of broker {address} is not known here", mend="correct bootstrap, or DNS"
        ) from error
    except TimeoutError as error:
        raise BrokerUnreachableError(
            f"no answer from {address} within {timeout_s:g} s",
            mend="check address and firewall: nothing even refused the connection",
        ) from error
    except OSError as error:
        raise BrokerUnreachableError(
            f"nothing listens at {address}: {_short(error)}",
            mend="start the broker, or correct bootstrap; one on this machine: `draftloop broker status --home DIR`",
        ) from error


def wrap(stream: socket.socket, address: str, security: KafkaSecurity) -> ssl.SSLSocket:
    """The TLS handshake; the socket is closed where it fails. Raises what `explain` returns, ConfigError."""
    try:
        context = tls_context(security)
        require_valid_certificate(security)
        return context.wrap_socket(stream, server_hostname=split_address(address)[0])
    except DraftloopError:
        stream.close()
        raise
    except OSError as error:
        stream.close()
        raise explain(error, address, security) from error


def explain(error: OSError, address: str, security: KafkaSecurity) -> DraftloopError:
    """A failure in or right after a handshake: TLS 1.3 tells a refused client certificate on the first read only."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _explain_verification(error, address, security)
    reason = getattr(error, "reason", None) or ""
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        return _explain_refusal(reason, address, security)
    if isinstance(error, TimeoutError):
        return BrokerUnreachableError(
            f"{address} takes connections and then says nothing", mend="is the broker frozen, or the port another's?"
        )
    return TlsError(
        f"{address} broke the TLS handshake off: {_short(error)}",
        mend="is the port a TLS port? A listener that requires client certificates wants security.cert_file",
    )


def speaks_tls(address: str, *, timeout_s: float) -> bool:
    """Does the port answer a TLS hello, whatever its certificate?"""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing but the hello is sent
    try:
        with connect(address, timeout_s=timeout_s) as stream, context.wrap_socket(stream):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # it refuses us, in TLS
    except (OSError, BrokerUnreachableError):
        return False


def _explain_verification(error: ssl.SSLCertVerificationError, address: str, security: KafkaSecurity) -> DraftloopError:
    if error.verify_code in (_EXPIRED, _NOT_YET_VALID):
        what = "has expired" if error.verify_code == _EXPIRED else "is not valid yet"
        return CertificateExpiredError(
            f"the certificate of {address} (or its CA's) {what}",
            mend="renew the broker's certificate and restart it; check this machine's clock",
        )
    if error.verify_code in _WRONG_HOST:
        return TlsError(
            f"the certificate of {address} is for another host: {error.verify_message}",
            mend="connect by a name in the certificate, or make one that names this host (subjectAltName)",
        )
    return UnknownCaError(
        f"the certificate of {address} is not from the CA in {security.ca_file}: {error.verify_message}",
        mend="set security.ca_file to the CA that signed it; do not go on if you did not expect another one",
    )


def _explain_refusal(reason: str, address: str, security: KafkaSecurity) -> DraftloopError:
    if security.cert_file is None:
        return ClientCertificateError(
            f"{address} wants a client certificate and security.cert_file is not set",
            mend="set cert_file and key_file, or use the broker's SASL_SSL listener",
        )
    if "EXPIRED" in reason:
        return CertificateExpiredError(
            f"{address} says that our certificate {security.cert_file} has expired", mend="renew it"
        )
    return ClientCertificateError(
        f"{address} refuses our certificate {security.cert_file}: {reason}",
        mend="use one signed by a CA that the broker trusts (its ssl.truststore), within its dates",
    )


def deadline_left(deadline: float) -> float:
    """Seconds until a monotonic deadline, never less than a moment: a zero would make a socket non-blocking."""
    return max(0.001, deadline - time.monotonic())


def _short(error: BaseException) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None)
    return str(reason or type(error).__name__)

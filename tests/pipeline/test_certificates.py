"""Certificates of the local broker: who signs whom, for how long, and who can read them."""

from __future__ import annotations

import datetime
import resource
import signal
import ssl
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from draftloop.pipeline.errors import LocalBrokerError
from draftloop.pipeline.stream.broker_home import certify
from draftloop.pipeline.stream.broker_settings import NODE_NAME
from draftloop.pipeline.stream.certificates import Authority, days_left, self_signed
from draftloop.pipeline.stream.private_files import write_private

HOSTS = ("localhost", "127.0.0.1")


def common_name(pem: bytes) -> str:
    (name,) = x509.load_pem_x509_certificate(pem).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(name.value)


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, host: str = "127.0.0.1") -> str:
    """Both ends in memory; the client's CN as the server sees it. Raises what the failing end raises."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        server.wrap_bio(to_server, to_client, server_side=True),
        client.wrap_bio(to_client, to_server, server_hostname=host),
    ]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    subject = (ends[0].getpeercert() or {}).get("subject", ())
    return "".join(value for rdn in subject for _, value in rdn)  # type: ignore[misc]


def contexts(folder: Path, *, node: tuple[bytes, bytes], client: tuple[bytes, bytes]) -> tuple[ssl.SSLContext, ...]:
    """A server that demands a client's certificate, and a client; both trust the folder's CA alone."""
    made = []
    for kind, (certificate, key) in ((ssl.PROTOCOL_TLS_SERVER, node), (ssl.PROTOCOL_TLS_CLIENT, client)):
        context = ssl.SSLContext(kind)
        context.load_verify_locations(folder / "ca.pem")
        write_private(folder / "pair.pem", key + certificate)
        context.load_cert_chain(folder / "pair.pem")
        made.append(context)
    made[0].verify_mode = ssl.CERT_REQUIRED
    return tuple(made)


def test_node_and_client_know_each_other_by_the_authority(tmp_path: Path) -> None:
    ca = Authority.at(tmp_path)
    server, client = contexts(tmp_path, node=ca.node("broker", hosts=HOSTS), client=ca.client("draftloop-hook"))
    assert handshake(server, client) == "draftloop-hook"
    assert handshake(server, client, "localhost") == "draftloop-hook"
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, client, "example.org")


def test_a_certificate_of_another_authority_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    ca, other = Authority.at(tmp_path), Authority.at(tmp_path / "other")
    server, client = contexts(tmp_path, node=ca.node("broker", hosts=HOSTS), client=other.client("draftloop-hook"))
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, client)


def test_a_clients_certificate_cannot_serve_and_an_expired_one_cannot_call(tmp_path: Path) -> None:
    ca = Authority.at(tmp_path)
    server, client = contexts(tmp_path, node=ca.client("broker"), client=ca.client("draftloop-hook"))
    client.check_hostname = False
    with pytest.raises(ssl.SSLCertVerificationError, match=r"unsuitable certificate purpose|unsupported certificate"):
        handshake(server, client)
    node = ca.node("broker", hosts=HOSTS)
    server, client = contexts(tmp_path, node=node, client=ca.client("draftloop-hook", days=-1))
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        handshake(server, client)


def test_each_certificate_says_what_it_is_for(tmp_path: Path) -> None:
    ca = Authority.at(tmp_path)
    authority = x509.load_pem_x509_certificate(ca.certificate_file.read_bytes())
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value == x509.BasicConstraints(True, 0)
    for (pem, _), usages in (
        (ca.node("broker", hosts=HOSTS), [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]),
        (ca.client("admin"), [ExtendedKeyUsageOID.CLIENT_AUTH]),
    ):
        found = x509.load_pem_x509_certificate(pem).extensions
        assert found.get_extension_for_class(x509.BasicConstraints).value == x509.BasicConstraints(False, None)
        assert list(found.get_extension_for_class(x509.ExtendedKeyUsage).value) == usages


def test_the_self_signed_one_vouches_for_nobody_else(tmp_path: Path) -> None:
    pem, key_pem = self_signed("broker", hosts=HOSTS)
    certificate, key = x509.load_pem_x509_certificate(pem), load_pem_private_key(key_pem, None)
    assert certificate.issuer == certificate.subject
    assert certificate.public_key() == key.public_key()
    assert certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False


def test_validity_is_told_in_days(tmp_path: Path) -> None:
    ca = Authority.at(tmp_path)
    file = tmp_path / "c.pem"
    for days, left in ((397, 397.0), (0.5, 0.5), (-3, 0.0)):
        file.write_bytes(ca.client("x", days=days)[0])
        assert days_left(file) == pytest.approx(left, abs=0.01)
    assert days_left(tmp_path / "none.pem") == 0.0
    file.write_text("not a certificate")
    assert days_left(file) == 0.0


def test_half_an_authority_is_made_anew_and_a_whole_one_kept(tmp_path: Path) -> None:
    first = Authority.at(tmp_path).certificate_file.read_bytes()
    assert Authority.at(tmp_path).certificate_file.read_bytes() == first
    (tmp_path / "ca.key").unlink()
    assert Authority.at(tmp_path).certificate_file.read_bytes() != first


def test_a_damaged_authority_is_told_with_the_mend(tmp_path: Path) -> None:
    ca = Authority.at(tmp_path)
    ca.key_file.write_text("not a key")
    with pytest.raises(LocalBrokerError, match=r"(?s)are not a CA.*mend: delete the tls folder"):
        ca.client("x")


def test_a_home_keeps_its_certificates_and_renews_them_before_they_run_out(tmp_path: Path) -> None:
    certify(tmp_path)
    files = ("ca.pem", "node.pem", "controller.pem", "controller-only.pem")
    first = [(tmp_path / "tls" / name).read_bytes() for name in files]
    certify(tmp_path)
    assert [(tmp_path / "tls" / name).read_bytes() for name in files] == first
    assert [common_name(pem) for pem in first] == ["draftloop local CA", NODE_NAME, NODE_NAME, NODE_NAME]
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in (tmp_path / "tls").iterdir())

    ca = Authority.at(tmp_path / "tls")
    certificate, key = ca.node("broker", hosts=HOSTS, days=20)
    write_private(tmp_path / "tls" / "node.pem", key + certificate)
    certify(tmp_path)
    assert days_left(tmp_path / "tls" / "node.pem") > 390
    assert common_name((tmp_path / "tls" / "node.pem").read_bytes()) == NODE_NAME
    assert (tmp_path / "tls" / "ca.pem").read_bytes() == first[0]


def test_a_node_of_another_name_is_named_anew(tmp_path: Path) -> None:
    certify(tmp_path)
    tls = tmp_path / "tls"
    certificate, key = Authority.at(tls).node("broker", hosts=HOSTS)
    write_private(tls / "node.pem", key + certificate)
    certificate, key = self_signed("broker", hosts=HOSTS)
    write_private(tls / "controller.pem", key + certificate)
    certify(tmp_path)
    assert common_name((tls / "node.pem").read_bytes()) == NODE_NAME
    assert common_name((tls / "controller.pem").read_bytes()) == NODE_NAME


def test_a_new_authority_signs_the_node_anew(tmp_path: Path) -> None:
    certify(tmp_path)
    (tmp_path / "tls" / "ca.key").unlink()
    certify(tmp_path)
    node = x509.load_pem_x509_certificate((tmp_path / "tls" / "node.pem").read_bytes())
    node.verify_directly_issued_by(x509.load_pem_x509_certificate((tmp_path / "tls" / "ca.pem").read_bytes()))


def test_a_private_file_is_never_seen_half_or_by_others(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"old" * 100_000)
    file.chmod(0o644)
    seen: set[bytes] = set()
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            seen.add(file.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(50):
        write_private(file, b"new" * 100_000)
    over.set()
    reader.join()
    assert seen <= {b"old" * 100_000, b"new" * 100_000}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [name.name for name in tmp_path.iterdir()] == ["secret"]


def test_what_a_kill_left_of_a_private_file_is_taken_up_and_a_left_over_with_other_rights_is_not(
    tmp_path: Path,
) -> None:
    file, draft = tmp_path / "secret", tmp_path / ".secret.draft"
    draft.write_bytes(b"half" * 1000)
    draft.chmod(0o666)
    with draft.open("r+b") as held:
        write_private(file, b"whole")
        held.write(b"theirs")
    assert file.read_bytes() == b"whole"
    draft.write_bytes(b"half" * 1000)
    draft.chmod(0o600)
    write_private(file, b"whole again")
    assert file.read_bytes() == b"whole again"
    assert [name.name for name in tmp_path.iterdir()] == ["secret"]


def test_many_writers_of_one_private_file_leave_one_of_theirs_whole(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    contents = [bytes([65 + number]) * 50_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            list(pool.map(lambda content: write_private(file, content), contents))
            assert file.read_bytes() in contents
    assert [name.name for name in tmp_path.iterdir()] == ["secret"]


def test_a_write_that_fails_keeps_the_old_file_and_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    write_private(file, b"old")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_private(file, b"new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert file.read_bytes() == b"old"
    assert [name.name for name in tmp_path.iterdir()] == ["secret"]


def test_a_clock_an_hour_behind_still_takes_a_new_certificate(tmp_path: Path) -> None:
    certificate = x509.load_pem_x509_certificate(Authority.at(tmp_path).client("x")[0])
    assert datetime.datetime.now(datetime.UTC) - certificate.not_valid_before_utc > datetime.timedelta(minutes=59)

"""What the daemon refuses to start with: open doors, and keys and certificates that cannot be used."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import trustme

from appliance.api_keys import KeyFile, KeyFileError
from appliance.daemon.exposure import check
from appliance.daemon.listener import PortTakenError, bind
from appliance.settings import Settings, SettingsError


def issue(tmp_path: Path, **dates: datetime) -> dict[str, Path]:
    issued = trustme.CA().issue_cert("localhost", **dates)
    paths = {"ssl_certfile": tmp_path / "cert.pem", "ssl_keyfile": tmp_path / "key.pem"}
    issued.cert_chain_pems[0].write_to_path(paths["ssl_certfile"])
    issued.private_key_pem.write_to_path(paths["ssl_keyfile"])
    return paths


@pytest.fixture
def certificate(tmp_path: Path) -> dict[str, Path]:
    return issue(tmp_path)


def refused(tmp_path: Path, **given: Any) -> str:
    with pytest.raises(SettingsError) as error:
        check(Settings(config_dir=tmp_path, **given))
    return str(error.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "box.lan"])
def test_a_public_address_needs_a_key(host: str, tmp_path: Path) -> None:
    assert refused(tmp_path, host=host).startswith(f"host is {host}, which other machines can reach")
    check(Settings(config_dir=tmp_path, host=host, api_key=("secret",)))
    KeyFile(tmp_path / "api_keys").new()
    check(Settings(config_dir=tmp_path, host=host))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_loopback_needs_none(host: str, tmp_path: Path) -> None:
    check(Settings(config_dir=tmp_path, host=host))


def test_it_listens_where_host_and_port_say() -> None:
    with bind(Settings(host="127.0.0.2", port=0)) as listener:
        address, port = listener.getsockname()
        assert address == "127.0.0.2"
        listener.listen()
        with pytest.raises(PortTakenError, match=f"port {port} on 127.0.0.2 is taken"):
            bind(Settings(host="127.0.0.2", port=port))
    with bind(Settings(host="127.0.0.2", port=port)) as again:
        assert again.getsockname() == ("127.0.0.2", port)


def test_all_pages_need_a_key(tmp_path: Path) -> None:
    assert "every web page that you visit" in refused(tmp_path, allowed_origins="*")
    check(Settings(config_dir=tmp_path, allowed_origins="*", api_key="secret"))
    check(Settings(config_dir=tmp_path, allowed_origins="https://chat.lan"))


def test_a_file_of_keys_that_is_named_must_be_there(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    assert f"{path} does not exist" in refused(tmp_path, api_keys_file=path)
    path.write_text("damaged\n")
    with pytest.raises(KeyFileError, match="line 1"):
        check(Settings(config_dir=tmp_path, api_keys_file=path))


def test_a_certificate_with_its_key_is_taken(
    certificate: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check(Settings(config_dir=tmp_path, **certificate))
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("first", "last", "complaint"),
    [(2019, 2020, "certificate has expired"), (2998, 2999, "certificate is not yet valid")],
)
def test_a_certificate_of_other_days_is_said_to_be_one(
    first: int, last: int, complaint: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dates = {"not_before": datetime(first, 1, 1), "not_after": datetime(last, 1, 1)}
    files = issue(tmp_path, **dates)
    check(Settings(config_dir=tmp_path, **files))
    wanted = f"ssl_certfile {files['ssl_certfile']}: {complaint}; clients will refuse it, set one that is valid now"
    assert [record.getMessage() for record in caplog.records] == [wanted]


def test_certificates_that_cannot_be_used_are_said_to_be(
    certificate: dict[str, Path], tmp_path: Path
) -> None:
    absent = {**certificate, "ssl_keyfile": tmp_path / "none.pem"}
    assert refused(tmp_path, **absent) == (
        f"cannot read ssl_keyfile {tmp_path / 'none.pem'}: No such file or directory"
    )
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    assert f"ssl_certfile {text}" in refused(tmp_path, **{**certificate, "ssl_certfile": text})
    other = tmp_path / "other.pem"
    trustme.CA().issue_cert("localhost").private_key_pem.write_to_path(other)
    assert "key values mismatch" in refused(tmp_path, **{**certificate, "ssl_keyfile": other})


def test_a_passphrase_is_refused_and_not_asked_for(certificate: dict[str, Path], tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(certificate["ssl_keyfile"].read_bytes(), password=None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"open sesame"),
        )
    )
    assert "the private key has a passphrase" in refused(tmp_path, **{**certificate, "ssl_keyfile": locked})

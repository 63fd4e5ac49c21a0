"""Signed artifacts: by whom, over what, and what an attacker who can change every byte achieves."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
import two_layers
from forge import Files, edit_json, rehash, write_archive, write_folder

import tune_model
from tune_model.package.format.manifest import Manifest, encode_manifest, seal
from tune_model.package.format.wire import ArtifactError, decode
from tune_model.package.merge import merge_artifacts
from tune_model.package.output import check_output
from tune_model.package.read import open_artifact, open_parts
from tune_model.package.signature import SignatureError, SigningKeyError, read_signing_key, read_verify_key
from tune_model.package.verify import verify
from tune_model.package.write import write_artifact
from tune_model.pipeline.cli import run

pytest.importorskip("cryptography", reason="an optional extra; `make test` installs it")
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

SIGNATURE = "signature.json"


class Keys:
    """A pair of key files, as OpenSSL writes them."""

    def __init__(self, folder: Path, name: str) -> None:
        key = ed25519.Ed25519PrivateKey.generate()
        self.private, self.public = folder / f"{name}.pem", folder / f"{name}.pub"
        encoding, none = serialization.Encoding.PEM, serialization.NoEncryption()
        self.private.write_bytes(key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, none))
        public = key.public_key().public_bytes(encoding, serialization.PublicFormat.SubjectPublicKeyInfo)
        self.public.write_bytes(public)

    def sign(self, path: Path) -> Path:
        return write_artifact(path, two_layers.contents(), signer=read_signing_key(self.private))


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"), "maker")


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("other"), "other")


@pytest.fixture(scope="session")
def signed(tmp_path_factory: pytest.TempPathFactory, keys: Keys) -> Path:
    return keys.sign(tmp_path_factory.mktemp("signed") / "a.tuned")


@pytest.fixture(scope="session")
def signed_files(signed: Path) -> Files:
    """Every file, the signature among them."""
    from tune_model.package.read import _read_file

    return {name: bytes(data) for name, data in _read_file(signed).items()}


def test_what_is_signed_loads_with_the_key_and_without(signed: Path, keys: Keys):
    artifact = open_artifact(signed, verify_key=read_verify_key(keys.public))
    assert artifact.signature is not None
    assert artifact.signature.public_key == read_verify_key(keys.public).text
    assert open_artifact(signed).programs == artifact.programs
    tuned = tune_model.load(signed, two_layers.weights(), verify_key=keys.public)
    x = torch.randn(3, two_layers.WIDTH)
    torch.testing.assert_close(tuned(x), two_layers.reference(x).float())


def test_the_same_key_and_contents_give_the_same_bytes(signed: Path, keys: Keys, tmp_path: Path):
    assert keys.sign(tmp_path / "b.tuned").read_bytes() == signed.read_bytes()
    folder = keys.sign(tmp_path / "folder.tuned/")
    check_output(tmp_path / "b.tuned")
    assert folder.exists()


def test_a_signed_folder_may_be_replaced(keys: Keys, tmp_path: Path):
    for _ in range(2):
        signer = read_signing_key(keys.private)
        write_artifact(f"{tmp_path}/a.tuned/", two_layers.contents(), signer=signer)
    assert open_artifact(tmp_path / "a.tuned", verify_key=read_verify_key(keys.public)).signature is not None


def test_what_is_not_signed_is_refused(artifact_file: Path, keys: Keys):
    with pytest.raises(SignatureError, match="is not signed; expected a signature by"):
        tune_model.load(artifact_file, {}, verify_key=keys.public)


def test_another_signer_is_refused(signed: Path, other: Keys):
    with pytest.raises(SignatureError, match=r"is signed by .*; expected a signature by"):
        tune_model.load(signed, {}, verify_key=other.public)


def swap_kernel(files: Files) -> Files:
    """Put other machine code in, under its own hash, as somebody would who wants it to run."""
    name = next(name for name in files if name.startswith("kernels/"))
    other = two_layers.compiled(two_layers.SOURCE.replace("sum > 0 ? sum : 0", "1"))
    import hashlib

    digest = hashlib.sha256(other).hexdigest()
    text = files["replay.json"].replace(name[8:72].encode(), digest.encode())
    rest = {n: d for n, d in files.items() if n not in {name, SIGNATURE}}
    changed = rehash({**rest, f"kernels/{digest}.so": other, "replay.json": text})
    return {**changed, SIGNATURE: files[SIGNATURE]}


def change_program(files: Files) -> Files:
    rest = {name: data for name, data in files.items() if name != SIGNATURE}
    changed = edit_json(rest, "programs/forward.json", lambda d: d["symbols"][0].update(maximum=32))
    return {**changed, SIGNATURE: files[SIGNATURE]}


def flip(place: int) -> Callable[[Files], Files]:
    def change(files: Files) -> Files:
        document = json.loads(files[SIGNATURE])
        text = document["signature"]
        document["signature"] = text[:place] + ("0" if text[place] != "0" else "1") + text[place + 1 :]
        return {**files, SIGNATURE: json.dumps(document).encode()}

    return change


def claim(key: str) -> Callable[[Files], Files]:
    def change(files: Files) -> Files:
        return {**files, SIGNATURE: json.dumps({**json.loads(files[SIGNATURE]), "public_key": key}).encode()}

    return change


FORGED = {
    "other machine code, all hashes right": swap_kernel,
    "another program, all hashes right": change_program,
    "the first digit of the signature": flip(0),
    "the last digit of the signature": flip(127),
    "another spelling of the manifest": lambda f: {**f, "manifest.json": f["manifest.json"] + b"\n"},
    "another name for the signer": claim("0" * 64),
}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
@pytest.mark.parametrize("put", [write_folder, write_archive])
def test_what_was_changed_is_refused(
    tmp_path: Path,
    signed_files: Files,
    keys: Keys,
    put: Callable[[Path, Files], Path],
    change: Callable[[Files], Files],
):
    place = put(tmp_path / "a.tuned", change(signed_files))
    with pytest.raises(SignatureError):
        open_artifact(place, verify_key=read_verify_key(keys.public))


def test_without_a_key_a_forged_artifact_loads(tmp_path: Path, signed_files: Files):
    """Hashes guard against damage only; docs/security.md says so."""
    assert open_artifact(write_archive(tmp_path / "a.tuned", swap_kernel(signed_files))).code


NO_SIGNATURES = {
    "garbage": b"\x00\xff",
    "an empty object": b"{}",
    "another algorithm": b'{"schema":1,"algorithm":"none","public_key":"'
    + b"0" * 64
    + b'","signature":"'
    + b"0" * 128
    + b'"}',
    "digits missing": b'{"schema":1,"algorithm":"ed25519","public_key":"00","signature":""}',
    "an unknown field": b'{"schema":1,"algorithm":"ed25519","x":1,"public_key":"'
    + b"0" * 64
    + b'","signature":"'
    + b"0" * 128
    + b'"}',
    "much too long": b" " * 5000,
}


@pytest.mark.parametrize("text", NO_SIGNATURES.values(), ids=NO_SIGNATURES)
def test_a_signature_that_is_none_is_damage(tmp_path: Path, signed_files: Files, text: bytes):
    with pytest.raises(ArtifactError, match=r"signature\.json"):
        open_artifact(write_folder(tmp_path / "a", {**signed_files, SIGNATURE: text}))


def test_a_manifest_may_not_list_a_signature(tmp_path: Path, signed_files: Files):
    with pytest.raises(ArtifactError, match=r"signature\.json"):
        open_artifact(write_folder(tmp_path / "a", rehash(signed_files)))


def test_a_signature_of_one_document_is_none_of_another(keys: Keys):
    signer, key = read_signing_key(keys.private), read_verify_key(keys.public)
    from tune_model.package.signature import read_signature

    made = read_signature(memoryview(signer.sign("manifest.json", b"{}")), "here")
    assert made is not None
    assert key.is_right(made, "manifest.json", b"{}")
    assert not key.is_right(made, "bundle.json", b"{}")
    assert not key.is_right(made, "manifest.json", b"{} ")


def machines(signed: Path, tmp_path: Path) -> list[Path]:
    """The artifact and one for another machine."""
    from forge import files_of

    files = files_of(signed)
    manifest = decode(files["manifest.json"], Manifest, "manifest.json")
    optimal = msgspec.structs.replace(manifest.must_match_to_stay_optimal, name="Another CPU")
    target = msgspec.structs.replace(manifest.target, name="Another CPU")
    moved = seal(msgspec.structs.replace(manifest, must_match_to_stay_optimal=optimal, target=target))
    return [signed, write_archive(tmp_path / "other.tuned", {**files, "manifest.json": encode_manifest(moved)})]


def test_a_bundle_is_signed_as_a_whole(tmp_path: Path, signed: Path, keys: Keys, other: Keys):
    paths = machines(signed, tmp_path)
    merge_artifacts(paths, tmp_path / "unsigned.tuned")
    key = read_verify_key(keys.public)
    with pytest.raises(SignatureError, match="is not signed"):
        open_parts(tmp_path / "unsigned.tuned", key)
    merge_artifacts(paths, tmp_path / "signed.tuned", signer=read_signing_key(keys.private))
    parts = open_parts(tmp_path / "signed.tuned", key)
    assert [part.signature for part in parts] == [parts[0].signature] * 2 != [None] * 2
    with pytest.raises(SignatureError):
        open_parts(tmp_path / "signed.tuned", read_verify_key(other.public))


def test_verifying_says_who_signed(signed: Path, artifact_file: Path, keys: Keys):
    checks = verify(signed, verify_key=read_verify_key(keys.public)).checks
    assert (checks[0].name, checks[0].outcome) == ("signature", "passed")
    (check,) = verify(artifact_file, verify_key=read_verify_key(keys.public)).checks
    assert (check.name, check.outcome) == ("signature", "failed")


# ----------------------------------------------------------------------------------------------------------- commands


def test_the_commands_refuse_what_is_not_signed(
    signed: Path, artifact_file: Path, keys: Keys, other: Keys, capsys: pytest.CaptureFixture[str]
):
    assert run(["inspect", str(signed), "--verify-key", str(keys.public)]) == 0
    assert f"signedby{read_verify_key(keys.public).text}" in "".join(capsys.readouterr().out.split())
    assert run(["inspect", str(artifact_file), "--verify-key", str(keys.public)]) == 4
    assert "is not signed; expected a signature by" in capsys.readouterr().err
    assert run(["inspect", str(signed), "--verify-key", str(other.public)]) == 4
    assert run(["bench", str(signed), "--verify-key", str(other.public)]) == 4
    assert "is signed by" in capsys.readouterr().err
    assert run(["verify", str(artifact_file), "--verify-key", str(keys.public)]) == 4
    assert "failed  signature" in capsys.readouterr().out


def test_merge_signs(tmp_path: Path, signed: Path, keys: Keys, capsys: pytest.CaptureFixture[str]):
    paths = [str(path) for path in machines(signed, tmp_path)]
    output = str(tmp_path / "both.tuned")
    assert run(["merge", *paths, "-o", output, "--sign", str(keys.private)]) == 0
    assert run(["inspect", output, "--verify-key", str(keys.public)]) == 0


# --------------------------------------------------------------------------------------------------------------- keys


def test_keys_of_openssl_are_read(tmp_path: Path):
    private, public = tmp_path / "key.pem", tmp_path / "key.pub"
    if subprocess.run(["openssl", "version"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no openssl here")
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
    place = write_artifact(tmp_path / "a.tuned", two_layers.contents(), signer=read_signing_key(private))
    assert open_artifact(place, verify_key=read_verify_key(public)).signature is not None


def test_keys_that_are_none(tmp_path: Path, keys: Keys, capsys: pytest.CaptureFixture[str]):
    curve = ec.generate_private_key(ec.SECP256R1())
    encoding = serialization.Encoding.PEM
    wrong = tmp_path / "wrong.pem"
    wrong.write_bytes(curve.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    locked = tmp_path / "locked.pem"
    password = serialization.BestAvailableEncryption(b"secret")
    own = ed25519.Ed25519PrivateKey.generate()
    locked.write_bytes(own.private_bytes(encoding, serialization.PrivateFormat.PKCS8, password))
    large = tmp_path / "large.pem"
    large.write_bytes(b"x" * 100_000)
    for path in (wrong, locked, large, keys.public, tmp_path / "missing.pem", tmp_path):
        with pytest.raises(SigningKeyError, match="expected an ed25519 private key in PEM"):
            read_signing_key(path)
    for path in (keys.private, wrong, large, tmp_path / "missing.pub"):
        with pytest.raises(SigningKeyError, match="expected an ed25519 public key in PEM"):
            read_verify_key(path)
    assert run(["tune", "quickstart.yaml", "--sign", str(keys.public)]) == 2
    assert "expected an ed25519 private key in PEM" in capsys.readouterr().err


def test_without_the_package_only_signatures_are_missing(signed: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert open_artifact(signed).signature is not None
    with pytest.raises(SigningKeyError, match=r"pip install 'tune-model\[sign\]'"):
        tune_model.load(signed, {}, verify_key=keys.public)

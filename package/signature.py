"""Signatures: who made an artifact, checked before anything in it is believed.

A signature is one more file, `signature.json`: ed25519 over the bytes of the document that all others hang on by their
hashes, `manifest.json` of an artifact or `bundle.json` of a bundle. Keys are PEM files as OpenSSL makes them:

    openssl genpkey -algorithm ed25519 -out key.pem
    openssl pkey -in key.pem -pubout -out key.pub

The cryptography is the package of that name, an optional extra (`tune-model[sign]`) that is imported only here.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from tune_model.package.format.members import BUNDLE, MANIFEST, SIGNATURE, SIGNATURE_BYTES_AT_MOST, stored_limit_of
from tune_model.package.format.wire import ArtifactError, decode, encode
from tune_model.runtime.errors import TuneModelError

__all__ = [
    "Signature",
    "SignatureError",
    "Signer",
    "SigningKeyError",
    "VerifyKey",
    "check_signature",
    "read_signature",
    "read_signing_key",
    "read_verify_key",
]

_CONTEXT: Final = b"tune-model.signature.1\n"
"""Precedes what is signed, so that a signature made for something else is never one of an artifact."""

_KEY_BYTES_AT_MOST: Final = 64 << 10
_PRIVATE: Final = "an ed25519 private key in PEM, not encrypted (openssl genpkey -algorithm ed25519 -out key.pem)"
_PUBLIC: Final = "an ed25519 public key in PEM (openssl pkey -in key.pem -pubout -out key.pub)"


class SignatureError(TuneModelError):
    """An artifact is not signed by the key that was asked for, or was changed afterwards; nothing of it was loaded."""

    exit_code = 4


class SigningKeyError(TuneModelError):
    """A key cannot be read or is of another kind, or the package that computes with it is not installed."""


class Signature(msgspec.Struct, frozen=True):
    """What `signature.json` holds.

    Attributes:
        schema: Version of this document.
        algorithm: How it was made.
        public_key: Of the signer, 32 bytes in hexadecimal. It says who claims to have signed; only a key that came
            another way says whether to believe it.
        signature: 64 bytes in hexadecimal.
    """

    schema: Literal[1]
    algorithm: Literal["ed25519"]
    public_key: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
    signature: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{128}$")]


class Signer:
    """Signs documents with a private key."""

    def __init__(self, key: Any) -> None:
        self._key = key

    def sign(self, name: str, document: bytes) -> bytes:
        """Return the content of `signature.json`.

        Args:
            name: Of the document: `manifest.json` or `bundle.json`.
            document: Its bytes, as they are stored.
        """
        made = self._key.sign(_message(name, document))
        public = self._key.public_key().public_bytes_raw()
        return encode(Signature(1, "ed25519", public.hex(), made.hex()), readable=True)


class VerifyKey:
    """Checks documents with a public key.

    Attributes:
        text: The key's 32 bytes in hexadecimal.
    """

    def __init__(self, key: Any) -> None:
        self._key = key
        self.text: str = key.public_bytes_raw().hex()

    def is_right(self, signature: Signature, name: str, document: bytes) -> bool:
        """Say whether this key made a signature of a document."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(bytes.fromhex(signature.signature), _message(name, document))
        except InvalidSignature:
            return False
        return True


def read_signing_key(path: str | os.PathLike[str]) -> Signer:
    """Read a private key.

    Raises:
        SigningKeyError: There is none, or it is of another kind or encrypted.
    """
    serialization, ed25519 = _cryptography("sign")
    data = _read(path, _PRIVATE)
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except Exception as error:
        raise SigningKeyError(f"{os.fspath(path)}: {_first_line(error)}; expected {_PRIVATE}") from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise SigningKeyError(f"{os.fspath(path)}: is a {type(key).__name__}; expected {_PRIVATE}")
    return Signer(key)


def read_verify_key(path: str | os.PathLike[str]) -> VerifyKey:
    """Read a public key.

    Raises:
        SigningKeyError: There is none, or it is of another kind.
    """
    serialization, ed25519 = _cryptography("check signatures")
    data = _read(path, _PUBLIC)
    try:
        key = serialization.load_pem_public_key(data)
    except Exception as error:
        raise SigningKeyError(f"{os.fspath(path)}: {_first_line(error)}; expected {_PUBLIC}") from error
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise SigningKeyError(f"{os.fspath(path)}: is a {type(key).__name__}; expected {_PUBLIC}")
    return VerifyKey(key)


def read_signature(data: memoryview | None, place: str) -> Signature | None:
    """Read `signature.json`, without believing it.

    Args:
        data: Its content; `None` if there is none.
        place: The artifact, for error messages.

    Raises:
        ArtifactError: It is no signature.
    """
    if data is None:
        return None
    file = f"{place}: {SIGNATURE}"
    if len(data) > SIGNATURE_BYTES_AT_MOST:
        raise ArtifactError(file, "the size", f"at most {SIGNATURE_BYTES_AT_MOST} bytes", str(len(data)))
    return decode(bytes(data), Signature, file)


def check_signature(signature: Signature | None, files: Mapping[str, memoryview], key: VerifyKey, place: str) -> None:
    """Make sure that a key signed exactly these files.

    The document that was signed holds the hashes of all the others; reading them checks those.

    Args:
        signature: From `read_signature`.
        files: Of the artifact or bundle.
        key: Whose signature it must be.
        place: The artifact, for error messages.

    Raises:
        SignatureError: It is not signed, by another key, or was changed.
    """
    if signature is None:
        raise SignatureError(f"{place}: is not signed; expected a signature by {key.text}")
    if signature.public_key != key.text:
        raise SignatureError(f"{place}: is signed by {signature.public_key}; expected a signature by {key.text}")
    name = BUNDLE if BUNDLE in files else MANIFEST
    document = files.get(name, memoryview(b""))
    is_too_long = len(document) > (stored_limit_of(name) or 0)
    if not document or is_too_long or not key.is_right(signature, name, bytes(document)):
        raise SignatureError(
            f"{place}: {name} is not what was signed by {key.text}; expected it unchanged: get the artifact again from "
            "its maker"
        )


def _message(name: str, document: bytes) -> bytes:
    return _CONTEXT + name.encode("ascii") + b"\n" + document


def _cryptography(purpose: str) -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        msg = f"to {purpose} takes the package cryptography, which is not installed; pip install 'tune-model[sign]'"
        raise SigningKeyError(msg) from error
    return serialization, ed25519


def _read(path: str | os.PathLike[str], expected: str) -> bytes:
    place = Path(path)
    try:
        with place.open("rb") as file:
            data = file.read(_KEY_BYTES_AT_MOST + 1)
    except OSError as error:
        raise SigningKeyError(f"{place}: cannot be read ({error.strerror}); expected {expected}") from error
    if len(data) > _KEY_BYTES_AT_MOST:
        raise SigningKeyError(f"{place}: is larger than {_KEY_BYTES_AT_MOST} bytes; expected {expected}")
    return data


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"is no such key ({lines[0][:120] if lines else type(error).__name__})"

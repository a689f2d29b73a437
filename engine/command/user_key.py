"""The key of this user: a random number in a file that nobody else can read, and digests that need it.

Whoever has a digest cannot guess the value from it, and only this user can make the digest of a value.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Annotated

from engine.utils.codec import FileRecord, Meta, encode, find_user_record, write_record
from engine.utils.files import exclusive_lock, make_user_folder, state_folder

KEY_FILE, KEY_LOCK = "digest_key.json", "digest_key.lock"
KEY_BYTES = 32
DIGEST_DIGITS = 64


class DigestKey(FileRecord, frozen=True, kw_only=True):
    """Content of `digest_key.json` in the user's state folder."""

    key: Annotated[str, Meta(pattern=rf"^[0-9a-f]{{{2 * KEY_BYTES}}}\Z")]
    """Random bytes in hexadecimal digits."""


def keyed_digest(value: object) -> str:
    """Return the digest of a value of JSON, with a key that the first use creates.

    Raises OSError if the key cannot be written.
    """
    folder = state_folder()
    stored = _find_key()
    if stored is None:
        with exclusive_lock(make_user_folder(folder) / KEY_LOCK, private=True):
            stored = _find_key()
            if stored is None:
                stored = DigestKey(key=secrets.token_hex(KEY_BYTES))
                write_record(folder / KEY_FILE, stored, private=True)
    return _digest(stored, value)


def is_digest_of(digest: str, value: object, *, num_digits: int = DIGEST_DIGITS) -> bool:
    """Whether `keyed_digest` of this user has returned a digest for a value, or one that begins with these digits."""
    stored = _find_key()
    if stored is None:
        return False
    return hmac.compare_digest(digest.encode(), _digest(stored, value)[:num_digits].encode())


def _find_key() -> DigestKey | None:
    return find_user_record(state_folder(), KEY_FILE, DigestKey)


def _digest(key: DigestKey, value: object) -> str:
    return hmac.new(bytes.fromhex(key.key), encode(value), hashlib.sha256).hexdigest()

"""A keyed digest of the variables that are typed with `--env`, by which a finished run with the same ones is found.

The values may be secrets, so a finished run keeps none of them, and a plain digest of `0.1` or of a password is soon
guessed. The key is a random number of this user on this host, in a file that nobody else can read.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from typing import Annotated

from engine.utils.codec import FileRecord, Meta, encode, find_user_record, write_record
from engine.utils.files import exclusive_lock, make_user_folder, state_folder

KEY_FILE, KEY_LOCK = "digest_key.json", "digest_key.lock"
KEY_BYTES = 32


class DigestKey(FileRecord, frozen=True, kw_only=True):
    """Content of `digest_key.json` in the user's state folder."""

    key: Annotated[str, Meta(pattern=rf"^[0-9a-f]{{{2 * KEY_BYTES}}}\Z")]
    """Random bytes in hexadecimal digits."""


def variables_digest(values: Mapping[str, str]) -> str:
    """Return the digest of names and values of variables, "" for none. Raises OSError if the key cannot be written."""
    if not values:
        return ""
    return hmac.new(_read_key(), encode(sorted(values.items())), hashlib.sha256).hexdigest()


def _read_key() -> bytes:
    """Return the key of this user, which the first use creates. Raises OSError."""
    folder = state_folder()
    stored = find_user_record(folder, KEY_FILE, DigestKey)
    if stored is None:
        with exclusive_lock(make_user_folder(folder) / KEY_LOCK, private=True):
            stored = find_user_record(folder, KEY_FILE, DigestKey)
            if stored is None:
                stored = DigestKey(key=secrets.token_hex(KEY_BYTES))
                write_record(folder / KEY_FILE, stored, private=True)
    return bytes.fromhex(stored.key)

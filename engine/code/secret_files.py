"""Which files probably hold keys, tokens or passwords, by their names and first bytes. They are never recorded."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import PurePath

from engine.utils.redaction import SECRET_WORDS, is_secret

# Case does not count.
SECRET_NAMES = (
    ".env*", "*.env", "*.pem", "*.key", "*.p8", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk", "*.gpg",
    "*.asc", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", ".netrc", "_netrc", ".npmrc", ".pypirc", ".pgpass",
    ".git-credentials", ".htpasswd", ".dockercfg", ".dockerconfigjson", ".my.cnf", "credentials*", "*credentials",
    "kubeconfig*", "service-account*.json", "service_account*.json",
)  # fmt: skip
SECRET_FOLDERS = frozenset({".ssh", ".aws", ".azure", ".gnupg", ".kube", ".docker", ".secrets"})
# `token.py` and `keys.h` are programs; `secrets.py` is one with passwords in it.
PROGRAM_ENDINGS = frozenset({
    ".py", ".pyi", ".pyx", ".pxd", ".ipynb", ".c", ".cc", ".cpp", ".cxx", ".cu", ".cuh", ".h", ".hh", ".hpp", ".rs",
    ".go", ".jl", ".r", ".m", ".lua", ".pl", ".rb", ".js", ".ts", ".java", ".scala", ".kt", ".swift", ".sh", ".bash",
    ".zsh", ".mk", ".cmake",
})  # fmt: skip
NAME_WORD = re.compile("[a-z]+")
# RFC 7468 and RFC 4716.
_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY|---- BEGIN SSH2 .*PRIVATE KEY")


def is_secret_file(path: str) -> bool:
    """Whether the name of a file, relative to its repository, says that it holds secrets."""
    parts = PurePath(path.casefold()).parts
    if not SECRET_FOLDERS.isdisjoint(parts[:-1]):
        return True
    name = PurePath(path).name
    if any(fnmatchcase(parts[-1], pattern) for pattern in SECRET_NAMES):
        return True
    if PurePath(parts[-1]).suffix in PROGRAM_ENDINGS:
        words = {word.upper() for word in NAME_WORD.findall(parts[-1])}
        return not words.isdisjoint(SECRET_WORDS | {"CREDENTIALS"})
    return is_secret(name)


def has_private_key(content: bytes) -> bool:
    """Whether a file contains a private key."""
    return _PRIVATE_KEY.search(content) is not None

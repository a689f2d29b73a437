"""Text without secrets: values of variables and options whose names say so, passwords in URLs, and tokens whose
beginning says so.

For everything that shows a command or its environment: list, journal, alerts, report, sync and screens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

HIDDEN = "***"
# Shorter values, such as 1, stand in text for other reasons.
MIN_VALUE_LENGTH = 6
# One part of a name in capitals: WANDB_API_KEY, --hf-token, dbPassword. KEYBOARD and TOKENIZERS are other words.
KEY_WORDS = frozenset({
    "KEY", "TOKEN", "APIKEY", "AUTHKEY", "ACCESSKEY", "AUTHTOKEN", "ACCESSTOKEN", "CREDENTIAL", "CREDENTIALS", "PAT",
    "PASS",
})  # fmt: skip
SECRET_WORDS = frozenset({"SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "PASSCODE", "PWD"})
WORKING_FOLDERS = frozenset({"PWD", "OLDPWD"})
# Of a model rather than a secret: --pad-token-id 0, --key-dim 64, use_auth_token=true. A name that ends in a key word,
# such as --api-key, may have a number as its secret.
_NUMBER = re.compile(r"[+-]?\d{1,6}(\.\d+)?")
_SWITCH = re.compile(r"true|false|none|null|", re.IGNORECASE)
# curl and wget: -u NAME:PASSWORD. Two numbers are the IDs of a user and a group.
USER_OPTIONS = frozenset({"-u", "--user", "-U", "--proxy-user"})
_LOGIN = re.compile(r"(?!\d+:\d+$)([^\s:'\"/]+):[^\s'\"]+")
_USER_OPTION = re.compile(rf"((?<!\S)(?:-[uU]|--user|--proxy-user)(?:\s+|=)?['\"]?){_LOGIN.pattern}")
# The password follows -p without a blank.
PASSWORD_PROGRAMS = frozenset({"mysql", "mysqldump", "mysqladmin", "mariadb", "mariadb-dump", "sshpass"})
_PASSWORD_OPTION = re.compile(
    rf"((?:{'|'.join(sorted(PASSWORD_PROGRAMS))})(?=\s)[^\n;|&]{{0,200}}?\s-p)(?:(?<=sshpass -p)\s+)?[^\s-][^\s]*"
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_NAME = r"[A-Za-z_][\w.\-]*"
_SETTING = re.compile(rf"[-+]*({_NAME})=(.*)", re.DOTALL)
_SHELL_OPTION = re.compile(r"-[a-z]*c")  # the next word is a command line: sh -c, bash -lc
_ASSIGNMENT = re.compile(rf"((?<![\w.\-]){_NAME})['\"]?\s*[=:]\s*")
_OPTION = re.compile(rf"((?<!\S)--?{_NAME})\s+(?!-)")
_VALUE = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'|[\"']?(?:[^\s'\",;)}\]&]|[,;](?=[^\s'\"]))+")
_AUTHORIZATION = re.compile(r"\b(?P<name>Bearer|Basic)\s+(?P<value>[^\s'\"]+)", re.IGNORECASE)
_SCHEME = r"(?<![\w+.\-])[A-Za-z][A-Za-z0-9+.\-]*://"
_URL_PASSWORD = re.compile(rf"({_SCHEME}[^\s/:@'\"]*):[^\s/'\"]+@")
# A user name of this length is a token: https://ghp_…@github.com
_URL_TOKEN = re.compile(rf"({_SCHEME})[^\s/:@'\"]{{20,}}@")
# The beginnings that Hugging Face, GitHub, GitLab, OpenAI and Anthropic, Slack, and AWS give their tokens, by which
# secret scanners find them (gitleaks). What follows is random: hf_transfer is another word.
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:(?:hf|gh[opsru])_[A-Za-z0-9]{16,}|github_pat_\w{16,}|(?:glpat|sk|xox[abeprs])-[\w\-]{16,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9]))"
)


def is_secret(name: str) -> bool:
    """Whether the name of a variable, an option or a key says that its value is secret."""
    words = set(_words(name))
    return bool(words & KEY_WORDS or (words & SECRET_WORDS and name not in WORKING_FOLDERS))


def redact(name: str, value: str) -> str:
    """Return the value of a variable or an option, or `***` in its place if it is secret."""
    words = _words(name)
    if SECRET_WORDS.intersection(words) and name not in WORKING_FOLDERS:
        return HIDDEN
    if KEY_WORDS.intersection(words) and not _SWITCH.fullmatch(value):
        return value if _NUMBER.fullmatch(value) and words[-1] not in KEY_WORDS else HIDDEN
    return redact_text(value)


def redact_text(text: str) -> str:
    """Return a text without the secrets in it: `--api-key X`, `TOKEN=X`, `"password": "X"`, passwords in URLs, and
    `hf_…`."""
    text = _URL_PASSWORD.sub(rf"\1:{HIDDEN}@", text)
    text = _URL_TOKEN.sub(rf"\1{HIDDEN}@", text)
    text = _TOKEN.sub(HIDDEN, text)
    text = _AUTHORIZATION.sub(rf"\g<name> {HIDDEN}", text)
    text = _USER_OPTION.sub(rf"\1\2:{HIDDEN}", text)
    text = _PASSWORD_OPTION.sub(rf"\1{HIDDEN}", text)
    return _without_values(_OPTION, _without_values(_ASSIGNMENT, text))


def redact_argv(argv: Sequence[str]) -> list[str]:
    """Return the arguments of a command without the secrets in them."""
    shown: list[str] = []
    takes_password = False
    for before, word in zip(("", *argv), argv, strict=False):
        takes_password = takes_password or before.rpartition("/")[2] in PASSWORD_PROGRAMS
        is_value = before.startswith("-") and "=" not in before
        is_value = is_value and (not word.startswith("-") or bool(SECRET_WORDS.intersection(_words(before))))
        setting = None if _SHELL_OPTION.fullmatch(before) else _SETTING.fullmatch(word)
        if is_value and is_secret(before):
            shown.append(redact(before, word))
        elif setting and is_secret(setting[1]):
            shown.append(word[: setting.start(2)] + redact(setting[1], setting[2]))
        elif before in USER_OPTIONS and (login := _LOGIN.fullmatch(word)):
            shown.append(f"{login[1]}:{HIDDEN}")
        elif takes_password and (before == "-p" or re.match("-p.", word)) and not word.startswith("--"):
            shown.append(HIDDEN if before == "-p" else f"-p{HIDDEN}")
        else:
            shown.append(redact_text(word))
    return shown


def redact_values(text: str, environment: Mapping[str, str]) -> str:
    """Return a text without the values of the secret variables of an environment."""
    for name, value in environment.items():
        if len(value) >= MIN_VALUE_LENGTH and value in text and redact(name, value) == HIDDEN:
            text = text.replace(value, HIDDEN)
    return text


def _words(name: str) -> list[str]:
    # What follows a KeyError is the reason why a program failed.
    if name.endswith(("Error", "Exception")):
        return []
    return [word.upper() for word in _WORD.findall(name)]


def _without_values(name: re.Pattern[str], text: str) -> str:
    """Return the text without the values behind secret names. `name` matches a name and what stands before a value."""
    parts, position = [], 0
    for match in name.finditer(text):
        if match.end() < position or not is_secret(match[1]) or not (value := _VALUE.match(text, match.end())):
            continue
        quote = value[0][0] if value[0][0] in "\"'" else ""
        parts.append(f"{text[position : match.end()]}{quote}{redact(match[1], value[0].strip(quote or None))}{quote}")
        position = value.end()
    return "".join(parts) + text[position:]

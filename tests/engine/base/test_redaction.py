"""Secrets in names and values, arguments, URLs and free text."""

from __future__ import annotations

import pytest

from engine.base.redaction import HIDDEN, is_secret, redact, redact_argv, redact_text, redact_values


@pytest.mark.parametrize(
    "name",
    ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD", "--api-key", "apiKey", "DB_PWD",
     "dbPassword", "wandb.api_key", "GITHUB_PAT", "APIKEY", "--authkey"],
)  # fmt: skip
def test_is_secret_knows_words_of_names(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["KEYBOARD", "MONKEY", "TOKENIZERS_PARALLELISM", "PATH", "PWD", "OLDPWD", "max_tokens", "secretary", "LR"]
)
def test_is_secret_knows_no_parts_of_words(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("HF_TOKEN", "hf_abc", HIDDEN),
        ("PASSWORD", "1234", HIDDEN),
        ("API_TOKEN", "123456", HIDDEN),
        ("--api-key", "42", HIDDEN),
        ("pad_token_id", "0", "0"),
        ("key_dim", "64", "64"),
        ("use_auth_token", "true", "true"),
        ("PROXY", "http://ann:pw@proxy:80/", f"http://ann:{HIDDEN}@proxy:80/"),
    ],
)
def test_redact_hides_value_by_name(name: str, value: str, shown: str) -> None:
    assert redact(name, value) == shown


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("train.py --api-key s3cr3t --lr 0.1", "train.py --api-key *** --lr 0.1"),
        ("train.py --token=s3cr3t", "train.py --token=***"),
        ("train.py +wandb.api_key=s3cr3t model=key", "train.py +wandb.api_key=*** model=key"),
        ("train.py --use-token --lr 0.1", "train.py --use-token --lr 0.1"),
        ("curl https://ann:s3cr3t@host/path?token=s3cr3t&x=1", "curl https://ann:***@host/path?token=***&x=1"),
        ("git clone https://ghp_0123456789abcdefghij@github.com/a/b", "git clone https://***@github.com/a/b"),
        ("git clone ssh://git@github.com/a/b", "git clone ssh://git@github.com/a/b"),
        ("curl -u ann:s3cr3t https://host", "curl -u ann:*** https://host"),
        ("curl --user=ann:s3cr3t -uann:s3cr3t", "curl --user=ann:*** -uann:***"),
        ("docker run -u 1000:1000 image", "docker run -u 1000:1000 image"),
        ("/usr/bin/mysql -u root -ps3cr3t db", "/usr/bin/mysql -u root -p*** db"),
        ("sshpass -p s3cr3t ssh host", "sshpass -p *** ssh host"),
        ("ssh -p22 host", "ssh -p22 host"),
    ],
)
def test_redact_argv_hides_values_of_options_and_passwords(typed: str, shown: str) -> None:
    assert redact_argv(typed.split()) == shown.split()


def test_redact_argv_hides_secrets_inside_shell_command() -> None:
    words = ["sh", "-c", "WANDB_API_KEY=s3cr3t python t.py --password 's3 cr3t' -H 'Authorization: Bearer s3cr3t'"]
    shown = "WANDB_API_KEY=*** python t.py --password '***' -H 'Authorization: Bearer ***'"
    assert redact_argv(words) == ["sh", "-c", shown]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('{"api_key": "s3cr3t", "lr": 0.1}', '{"api_key": "***", "lr": 0.1}'),
        ("config: token=s3cr3t", "config: token=***"),
        ("login(token=s3cr3t, user=ann)", "login(token=***, user=ann)"),
        ('--password "it\'s" --lr 1', '--password "***" --lr 1'),
        ("PASSWORD=a,b;c x", "PASSWORD=*** x"),
        ("{'loss': 0.5, 'epoch': 1}", "{'loss': 0.5, 'epoch': 1}"),
        ("curl -u ann:s3cr3t host; curl -u 'ann:s3cr3t'", "curl -u ann:*** host; curl -u 'ann:***'"),
        ("mysqldump -u root -ps3cr3t db > x", "mysqldump -u root -p*** db > x"),
        ("sshpass -p s3cr3t ssh host", "sshpass -p*** ssh host"),
        ("python -u train.py: step 1:2", "python -u train.py: step 1:2"),
        ("HTTPError at http://ann:p%40ss@h:8080", "HTTPError at http://ann:***@h:8080"),
    ],
)
def test_redact_text_hides_secrets_in_free_text(text: str, shown: str) -> None:
    assert redact_text(text) == shown


@pytest.mark.parametrize(
    "token",
    ["hf_" + "aB" * 17, "ghp_" + "a1B2" * 9, "github_pat_" + "a1_B" * 9, "glpat-" + "a-B_" * 5, "sk-proj-" + "aB1_" * 9,
     "xoxb-1234567890-" + "aB" * 12, "AKIA" + "A1B2" * 4],
)  # fmt: skip
def test_token_with_a_known_beginning_is_hidden_wherever_it_stands(token: str) -> None:
    assert redact_argv(["push", token, f"--login={token}", "--gh", token]) == [
        "push",
        "***",
        "--login=***",
        "--gh",
        "***",
    ]
    assert redact_text(f"[{token}] {token}, 1") == "[***] ***, 1"


@pytest.mark.parametrize("word", ["hf_transfer", "task-" + "ab1" * 9, "sk-learn", "HF_HUB_ENABLE_HF_TRANSFER", "AKIA"])
def test_word_that_only_resembles_a_token_is_shown(word: str) -> None:
    assert redact_argv([word]) == [word]


@pytest.mark.parametrize(
    "part",
    ["sk-", "hf_", "a", "a.", "key ", "a://", "key=", "--key ", "a:b@", " ", '"', "-u ", "-u a", "mysql ", "mysql -p "],
)
def test_redact_text_takes_linear_time(part: str) -> None:
    assert redact_text(part * (1 << 16))


@pytest.mark.parametrize("text", ["KeyError: 'labels'", "module.TokenError: bad input", "KeyException: x"])
def test_exception_is_no_secret(text: str) -> None:
    assert redact_text(text) == text


def test_values_of_secret_variables_are_hidden_wherever_they_stand() -> None:
    environment = {"MY_TOKEN": "abc-123-def", "SHORT_KEY": "1", "HOME": "/home/ana"}
    text = "login with abc-123-def failed in /home/ana at step 1"
    assert redact_values(text, environment) == "login with *** failed in /home/ana at step 1"


def test_password_may_have_any_characters() -> None:
    assert redact_text("https://user:p@ss@host/path") == "https://user:***@host/path"
    assert redact_argv(["--password", "-abc"]) == ["--password", "***"]

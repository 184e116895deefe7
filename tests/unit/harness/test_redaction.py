"""Secrets in texts are hidden, wherever they stand; words that only resemble them stay."""

import json

import pytest

from training_harness.journal import EventLog, Identity
from training_harness.redaction import redact, redact_text, redact_values

KEY = "A1b2" * 10

SECRETS = {
    "password in a URL": ("connect to postgresql://me:hunter2secret@db/runs failed", "hunter2secret"),
    "signed URL": (f"GET https://b.s3.amazonaws.com/x?X-Amz-Signature={KEY}&a=1: 403", KEY),
    "keyword argument": ("login(user='me', password='pass phrase', retries=3)", "pass phrase"),
    "JSON": ('{"api_key": "qwertyuiop", "model": "x"}', "qwertyuiop"),
    "environment": ("WANDB_API_KEY=0123456789abcdef0123 python train.py", "0123456789abcdef0123"),
    "header": (f"headers: Authorization: Bearer {KEY}", KEY),
    "GitHub": (f"clone with ghp_{KEY} failed", KEY),
    "Hugging Face": ("401 for hf_abcdefghijklmnopqrstuvwxyz", "abcdefghijklmnopqrstuvwxyz"),
    "AWS": ("The key AKIAIOSFODNN7EXAMPLE does not exist", "AKIAIOSFODNN7EXAMPLE"),
    "AWS secret": ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG", "wJalrXUtnFEMI/K7MDENG"),
    "JWT": ("token eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.SflKxwRJSMeKKF2Q rejected", "SflKxwRJSMeKKF2Q"),
    "long token": (f"invalid token: {KEY}", KEY),
    "private key": (
        "key -----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY----- bad",
        "MIIEow",
    ),
    "Azure": ("AccountName=a;AccountKey=abcd1234efgh5678==;EndpointSuffix=x", "abcd1234efgh"),
    "npm": (f"401 for npm_{KEY}", KEY),
    "cookie": (f"headers {{'Cookie': 'session={KEY}'}}", KEY),
    "cookie behind another": (f"Cookie: theme=dark1; session={KEY}", KEY),
    "cookie behind a short one": (f"GET /runs\nCookie: a=1; session={KEY}\nHost: x", KEY),
    "cookie in quotes behind another": (f"headers {{'Cookie': 'lang=en; session={KEY}'}}", KEY),
    "cookie behind a value in quotes": (f'Set-Cookie: lang="en"; session={KEY}', KEY),
    "cookie for curl": (f'curl -H "Cookie: a=1; session={KEY}" https://x', KEY),
    "command that failed": ("Command '['mysql', '--password', 'hunter2x', '-e']' returned 1", "hunter2x"),
    "option": ("run --hf-token q1w2e3r4 --lr 0.1", "q1w2e3r4"),
    "option of several": ("run --auth-tokens q1w2e3r4 --lr 0.1", "q1w2e3r4"),
    "option of several with =": ("run --api-tokens=q1w2e3r4 --lr 0.1", "q1w2e3r4"),
    "several as a keyword": ("login(hf_tokens='q1w2e3r4')", "q1w2e3r4"),
    "password of letters": ("run --password hunter --lr 0.1", "hunter"),
    "password of a tokenizer": ("run --tokenizer-password hunter", "hunter"),
    "private key cut off": ("-----BEGIN PRIVATE KEY-----\nMIIEow", "MIIEow"),
}


@pytest.mark.parametrize("place", SECRETS)
def test_a_secret_is_hidden_and_the_words_before_it_stay(place):
    text, secret = SECRETS[place]
    shown = redact_text(text)
    assert secret not in shown
    assert "***" in shown
    assert shown.split()[0].split("=")[0].split("***")[0] in text


@pytest.mark.parametrize(
    "text",
    [
        "unexpected token: bar_baz at position 12",
        "max_tokens=4096, pad_token=[PAD], tokenizer=bert-base-uncased",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x4 and 5x1)",
        'File "/home/me/secret_project/train.py", line 3, in <module>',
        "KeyError: 'password'",
        "Command '['train.py', '--tokenizer', 'bert-base-2', '--max-tokens', '4096']' returned 1",
        "give --api-key before the first request",
        "run --token-limit 4096 --token-dropout 0.12345 --max-new-tokens 1e4 --num_tokens=8192",
        "commit 5a4fcf1d0c4c4f0d8b1f8f3f6b8a5a0a1b2c3d4e",
        "DataLoader worker (pid 4711) is killed by signal: Killed.",
    ],
)
def test_an_ordinary_message_stays_as_it_is(text):
    assert redact_text(text) == text


def test_a_long_hostile_message_is_redacted_in_linear_time():
    text = "password" * 20_000 + "=" * 20_000 + "token: " * 20_000 + "--token" * 20_000 + "Cookie: " * 20_000
    text += 'Cookie: a="' * 20_000 + "--max-" * 20_000 + "Cookie: 'a=" * 20_000
    assert len(redact_text(text)) > 100_000


def test_words_of_a_command_line_are_hidden_behind_their_options_and_by_their_form():
    command = ["train.py", "--hf-token", "abc", "--password=x", f"ghp_{KEY}", "--lr", "0.1"]
    assert redact(command) == ["train.py", "--hf-token", "***", "--password=***", "***", "--lr", "0.1"]


def test_tokens_of_a_language_model_are_no_secrets():
    command = ["train.py", "--tokenizer", "bert", "--max-tokens=512", "--num_tokens", "8", "--token-limit", "4096"]
    assert redact(command) == command
    settings = {"max_tokens": 512, "tokenizer": "bert", "token_dropout": 0.1, "max_new_tokens": "auto"}
    assert redact_values(settings) == settings


def test_several_tokens_that_give_access_are_hidden_as_one_is():
    command = ["train.py", "--auth-tokens", "abc", "--api-tokens=abc", "--even_auth_tokens", "abc"]
    assert redact(command) == ["train.py", "--auth-tokens", "***", "--api-tokens=***", "--even_auth_tokens", "***"]
    assert redact_values({"hf_tokens": ["abc"], "password": 1234}) == {"hf_tokens": "***", "password": "***"}


def test_no_event_stores_a_secret_however_deep_it_lies(tmp_path):
    log = EventLog(tmp_path, Identity.of_this_process())
    log.append("exception", message="password='x1y2z3'", nested=[{"error": f"Bearer {KEY}"}], count=3)
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    assert "x1y2z3" not in text
    assert KEY not in text
    assert json.loads(text)["count"] == 3

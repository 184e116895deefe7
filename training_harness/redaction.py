"""Removal of secrets from what is recorded: passwords, tokens and keys in command lines, messages and tracebacks.

Two kinds are recognised: what stands behind a name such as `password=`, and keys whose own form gives them away. A
secret without a name and without a known form cannot be recognised. The forms are those that the services document:
GitHub (about authentication, token formats), Hugging Face, OpenAI, Slack, GitLab, AWS (unique identifiers), Google,
npm, PyPI, Databricks, NVIDIA, Groq, JSON Web Tokens (RFC 7519) and PEM (RFC 7468).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"
#: Parts of the names of options. Values behind the first three need not look like a key.
_SURE_NAME = re.compile(r"secret|passw|credential", re.IGNORECASE)
_SECRET_NAME = re.compile(rf"{_SURE_NAME.pattern}|token|(?:api|access|private)[-_]?key", re.IGNORECASE)
#: Parts of names that are about the tokens of a language model.
_TEXT_TOKENS = re.compile(r"(?<![a-z])(?:max|min|num|n|new|total)[-_][\w-]{0,40}?tokens|tokeni[sz]", re.IGNORECASE)
_NUMBER = re.compile(r"[\"']?[+-]?[\d._]{1,40}(?:e[+-]?\d{1,3})?[\"']?", re.IGNORECASE)
#: User and password in a URL.
_URL_CREDENTIALS = re.compile(r"://[^/\s@]+@")
#: Values in the query of a URL that sign it or give access.
_URL_QUERY = re.compile(
    r"([?&](?:sig|signature|token|key|code|X-Amz-(?:Signature|Credential|Security-Token))=)[^&\s\"']{4,2000}",
    re.IGNORECASE,
)
#: A name, and behind `=`, `:` or `=>` its value, in quotes or up to the next blank, comma or bracket. A "token" is
#: also a part of a text, so that word alone is no such name.
_NAMED_VALUE = re.compile(
    r"(?P<name>(?:passw(?:or)?d|passphrase|credentials?|(?:api|access|account|private|secret)[-_]?key(?:[-_]?id)?|secret"
    r"|(?:auth|access|api|refresh|bearer|session|security|hf|hub|github|gitlab|wandb|slack|bot)[-_]?tokens?)"
    r"[\"']?\s{0,3}(?:=>|[=:])\s{0,3})"
    r"(?P<value>\"[^\"\n]{1,2000}\"|'[^'\n]{1,2000}'|[^\s\"',;&)\]}]{4,2000})",
    re.IGNORECASE,
)
#: A long value with letters and digits behind the word "token".
_TOKEN = re.compile(r"(\btoken[\"']?\s{0,3}[=:]\s{0,3}[\"']?)(?=[\w.-]{0,200}\d)[\w.-]{16,2000}", re.IGNORECASE)
#: An option of a command line and its value: the next word, in quotes where a list of words is shown.
_OPTION_VALUE = re.compile(
    rf"(?<![\w-])(?P<name>--?(?=[\w-]{{0,40}}(?:{_SECRET_NAME.pattern}))[\w-]{{1,100}})(?P<between>[\"']?[=,\s]\s{{0,3}})"
    r"(?P<value>\"[^\"\n]{1,2000}\"|'[^'\n]{1,2000}'|[^\s\"',;&)\]}-][^\s\"',;&)\]}]{3,2000})",
    re.IGNORECASE,
)
#: All pairs of a cookie's header: up to the closing quote, or to the end of the line.
_COOKIE = re.compile(
    r"\b(Cookie[\"']?\s{0,3}[:=,]\s{0,3}b?(?P<quote>[\"'])?)(?=[^\s\"'=;(){}]{1,200}=)"
    r"(?(quote)(?:(?!(?P=quote)).)*|(?:=\"[^\"\n]*\"|[^\"'\n])*)",
    re.IGNORECASE,
)
_AUTHORIZATION = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{8,2000}", re.IGNORECASE)
_KEY_FORMS = re.compile(
    r"\b(?:gh[pousr]_\w{20,}|github_pat_\w{20,}|hf_[A-Za-z0-9]{20,}|sk-[\w-]{16,}|xox[abpors]-[\w-]{10,}"
    r"|npm_\w{30,}|pypi-[\w-]{30,}|dapi[0-9a-f]{32}|nvapi-[\w-]{30,}|gsk_\w{30,}|ya29\.[\w-]{20,}"
    r"|glpat-[\w-]{16,}|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{35}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})"
)
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----.{0,20000}?(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)", re.DOTALL
)


def redact_text(text: str) -> str:
    """Return a text without the secrets that can be recognised; the words around them stay."""
    text = _URL_CREDENTIALS.sub(f"://{HIDDEN}@", text)
    text = _PRIVATE_KEY.sub(HIDDEN, text)
    text = _AUTHORIZATION.sub(rf"\1 {HIDDEN}", text)
    text = _KEY_FORMS.sub(HIDDEN, text)
    text = _COOKIE.sub(rf"\1{HIDDEN}", text)
    text = _OPTION_VALUE.sub(_without_value, text)
    text = _URL_QUERY.sub(rf"\1{HIDDEN}", text)
    text = _TOKEN.sub(rf"\1{HIDDEN}", text)
    return _NAMED_VALUE.sub(rf"\g<name>{HIDDEN}", text)


def _without_value(option: re.Match[str]) -> str:
    name, between, value = option["name"], option["between"], option["value"]
    # A word behind the name of a key may be one of a sentence.
    is_likely = _SURE_NAME.search(name) or "=" in between or value[0] in "\"'" or re.search(r"\d", value)
    return f"{name}{between}{HIDDEN}" if is_likely and _is_secret(name, value) else option[0]


def _is_secret(name: str, value: object) -> bool:
    """Return whether a value behind a name is a secret; a number behind a name such as `token_limit` is none."""
    if _SURE_NAME.search(name):
        return True
    return bool(_SECRET_NAME.search(_TEXT_TOKENS.sub("", name))) and not _NUMBER.fullmatch(str(value))


def redact_fields(value: Any) -> Any:
    """Return a value for JSON with every text in it redacted."""
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Mapping):
        return {name: redact_fields(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_fields(item) for item in value]
    return value


def redact(argv: Sequence[str]) -> list[str]:
    """Return a command line without secrets, also where the value of an option is the next word."""
    words: list[str] = []
    name_before = ""
    for word in argv:
        option, equals, value = word.partition("=")
        is_name = option.startswith("-") or (bool(equals) and option.isidentifier())
        if name_before and _is_secret(name_before, word):
            words.append(HIDDEN)
        elif is_name and equals and _is_secret(option, value):
            words.append(f"{option}={HIDDEN}")
        else:
            words.append(redact_text(word))
        name_before = option if is_name and not equals else ""
    return words


def redact_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the values that are named like secrets."""
    return {name: HIDDEN if _is_secret(str(name), value) else value for name, value in values.items()}

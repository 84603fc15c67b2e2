"""Redact secrets in text and arguments before a run or a submission writes them anywhere.

All redaction is here, so that a file of a run, a warning and a record of a submission hide the same. Standard library
only: scripts/submit.py imports it on login nodes. docs/run.md says what is covered.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"
# Names of environment variables whose value is a secret.
SECRET_NAME = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
# Names of flags whose value is one. Narrower: prompt_key and a cost per_token are none.
SECRET_FLAG = re.compile(
    r"^token$|(^|_)((api|auth|access|hf)_?token|(api|access|private|secret)_?key|secret|password|passwd|credentials?|"
    r"auth|authorization|headers?)$",
    re.IGNORECASE,
)
SHORTEST = 8  # characters of a variable's value: a shorter one may be a word of any text
# Of URLs in which people write passwords; not docker, whose @ begins a digest, nor ssh, whose user is git.
SCHEMES = r"https?|wss?|ftp|(?:postgres(?:ql)?|mysql|mariadb|mssql|oracle|mongodb)(?:\+\w+)?|rediss?|amqps?"
# What a secret looks like, wherever it stands: (what it is, the part that stays, the secret).
FORMS = (
    ("a URL with a user or password", re.compile(rf"(\b(?:{SCHEMES})://)[^/\s'\"]+(?=@)")),
    (
        "a URL with a key",
        re.compile(r"([?&](?:api_?key|(?:access_?)?token|secret|password|signature)=)[^&\s'\"]+", re.I),
    ),
    (
        "an authorization header",
        re.compile(r"(\b(?:authorization|x-api-key|api-key)['\"]?\s*[:=]\s*['\"]?)(?:\w+ )?[^\s'\",}]+", re.I),
    ),
    ("a bearer token", re.compile(r"(\bbearer\s+)[\w.~+/=-]{8,}", re.I)),
    ("a token", re.compile(r"()\b(?:hf_\w{20,}|sk-[\w-]{20,}|gh[opsu]_\w{20,}|github_pat_\w{20,}|AKIA[0-9A-Z]{16})")),
)


def secret_values() -> dict[str, str]:
    """Return a dict name -> value of the environment variables that hold a secret, the longest value first."""
    found = {name: value for name, value in os.environ.items() if SECRET_NAME.search(name) and len(value) >= SHORTEST}
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def redact(text: str, secrets: Mapping[str, str] | None = None) -> str:
    """Replace every secret in a text by ``HIDDEN``: values of variables found by name, other secrets by their form.

    secrets: what ``secret_values`` has found a moment ago, for many texts in a row: it reads the whole environment.
    """
    for value in (secret_values() if secrets is None else secrets).values():
        text = text.replace(value, HIDDEN)
    for _, form in FORMS:
        text = form.sub(rf"\g<1>{HIDDEN}", text)
    return text


def redact_values(value: Any, secrets: Mapping[str, str] | None = None) -> Any:
    """Redact every string in lists, tuples and dicts; hide a dict's value completely if its key names a secret."""
    secrets = secret_values() if secrets is None else secrets
    if isinstance(value, str):
        return redact(value, secrets)
    if isinstance(value, Mapping):
        return {k: HIDDEN if v and names_secret(k) else redact_values(v, secrets) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(redact_values(v, secrets) for v in value)
    return value


def names_secret(flag: object) -> bool:
    """Return True if a flag or field of this name holds a secret."""
    return isinstance(flag, str) and bool(SECRET_FLAG.search(flag.lstrip("-").replace("-", "_")))


def redact_words(words: Sequence[str]) -> list[str]:
    """Redact the words of a command line, where a flag may name the secret that follows."""
    hidden = []
    secret_next = False
    for word in words:
        flag, equals, _ = word.partition("=")
        is_flag = word.startswith("--")
        if secret_next and not is_flag:
            hidden.append(HIDDEN)
        elif is_flag and equals and names_secret(flag):
            hidden.append(f"{flag}={HIDDEN}")
        else:
            hidden.append(redact(word))
        secret_next = is_flag and not equals and names_secret(flag)
    return hidden

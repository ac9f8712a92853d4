"""Texts for a terminal: user names, passwords and tokens masked, control characters escaped."""

from __future__ import annotations

import os
import re

MASK = "***"
# Texts are long and foreign. Each pattern therefore starts at a rare mark, or cannot run past the
# next possible start, so its time is linear in the text.
# "user:password@" of a URL up to the path
_LOGIN = re.compile(r"(?<=[a-zA-Z0-9+.\-])://[^/?#\s\"'<>]*@")
# ... with a slash in the password, which `_LOGIN` takes for the path
_LOGIN_WITH_SLASH = re.compile(r"(?<=[a-zA-Z0-9+.\-])(://[^/?#\s:@\"'<>]*):(?!\d+(?:[/?#\s]|$))[^\s\"'<>]*@")
_WORD = re.compile(r"[^\s\"'<>]+")
_QUERY = re.compile(r"([?&;][^=&;?\s\"'<>]*=)[^&;\s\"'<>#]+")
_SENSITIVE = re.compile(r"passw|pwd|secret|token|key|sig|auth|credential", re.IGNORECASE)
_REST = (
    (re.compile(r"\b((?:password|passwd|pwd|secret|token|api_?key)=)[^&;,\s\"'<>*]+", re.IGNORECASE), rf"\g<1>{MASK}"),
    (re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=\-]{8,}"), rf"\g<1> {MASK}"))
_VARIABLES = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "RAY_AUTH_TOKEN")
# A shorter password occurs in too many words.
_SHORTEST = 6
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
# control characters: C0 but for newline and tab, DEL, C1, marks that reorder text, line separators,
# half characters
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_known: set[str] = set()


def masked(text: str, *, known: bool = True) -> str:
    """Mask user names and passwords in URLs, and tokens, passwords and keys in query strings.

    With `known` also all passwords that this process has seen or that its environment contains. Use
    False for settings that are read again, in which a short password may be a part of a path.
    """
    if "://" in text and "@" in text:
        text = _WORD.sub(_without_login, text)
    text = _QUERY.sub(lambda found: found[1] + MASK if _SENSITIVE.search(found[1]) else found[0], text)
    for pattern, replacement in _REST:
        text = pattern.sub(replacement, text)
    if not known:
        return text
    for secret in sorted({*_known, *(os.environ.get(name, "") for name in _VARIABLES)}, key=len, reverse=True):
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, MASK)
    return text


def _without_login(found: re.Match[str]) -> str:
    # No login ends after the last @, so nothing after it is searched for one.
    before, at, after = found[0].rpartition("@")
    if "://" not in before:
        return found[0]
    return _LOGIN_WITH_SLASH.sub(rf"://{MASK}@", _LOGIN.sub(rf"://{MASK}@", before + at)) + after


def conceal(url: str) -> None:
    """Mask the password of this URL in all later texts: libraries quote parts of URLs in errors."""
    from urllib.parse import unquote
    login = url.partition("://")[2].rpartition("@")[0]
    password = login.partition(":")[2] or login
    if MASK not in password:
        _known.update({password, unquote(password)})


def is_masked(text: str) -> bool:
    """Return whether a URL is masked, so that user and password must come from another source."""
    return f"://{MASK}@" in text or f"={MASK}" in text


def printable(text: str) -> str:
    """Escape control characters, such as \\x1b; newlines and tabs stay."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], _COLORS.sub("", text))

"""Masking of user names, passwords and tokens in texts and settings."""

from __future__ import annotations

import os
import re

MASK = "***"
_SECRETS = (
    # http://user:password@host; the second form is for a password with a slash, which the first one
    # would parse as a path.
    (re.compile(r"([a-zA-Z][a-zA-Z0-9+.\-]*://)[^/?#\s\"'<>]*@"), rf"\g<1>{MASK}@"),
    (re.compile(r"([a-zA-Z][a-zA-Z0-9+.\-]*://)[^/?#\s:@\"'<>]*:(?!\d+(?:[/?#\s]|$))[^\s\"'<>]*@"), rf"\g<1>{MASK}@"),
    (re.compile(r"([?&;][^=&;\s\"'<>]*(?:passw|pwd|secret|token|key|sig|auth|credential)[^=&;\s\"'<>]*=)[^&;\s\"'<>#]+",
                re.IGNORECASE), rf"\g<1>{MASK}"),
    (re.compile(r"\b((?:password|passwd|pwd|secret|token|api_?key)=)[^&;,\s\"'<>*]+", re.IGNORECASE), rf"\g<1>{MASK}"),
    (re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=\-]{8,}"), rf"\g<1> {MASK}"),
)
_VARIABLES = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "RAY_AUTH_TOKEN")
# A shorter password occurs in too many words.
_SHORTEST = 6
_known: set[str] = set()


def masked(text: str, *, known: bool = True) -> str:
    """Mask user names and passwords in URLs, and tokens, passwords and keys in query strings.

    Args:
        text: the text.
        known: also mask all passwords that this process has seen or that its environment contains.
            Use False for settings that are read again, in which a short password may be a part of a
            path.
    """
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    if not known:
        return text
    for secret in sorted({*_known, *(os.environ.get(name, "") for name in _VARIABLES)}, key=len, reverse=True):
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, MASK)
    return text


def conceal(url: str) -> None:
    """Mask the password of this URL in all later texts, because libraries quote parts of URLs in
    errors.
    """
    from urllib.parse import unquote

    login = url.partition("://")[2].rpartition("@")[0]
    password = login.partition(":")[2] or login
    if MASK not in password:
        _known.update({password, unquote(password)})


def is_masked(text: str) -> bool:
    """Return whether a URL is masked, so that user and password must come from another source."""
    return f"://{MASK}@" in text or f"={MASK}" in text

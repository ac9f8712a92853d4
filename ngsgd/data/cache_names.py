"""Names of prepared files: a kind, and a digest of all that decides the content.

Every prepared file has its name from here: corpora, labels, trees, transforms, networks that
realign, i-vectors, and archives of examples. Equal names are equal content, so a file with its name
is used without further comparison.
"""

from __future__ import annotations

from typing import Any

from ngsgd.files import digest_of_json

_NUM_DIGITS = 12


def cache_name(kind: str, *, version: int, **decides: Any) -> str:
    """Return `KIND-DIGEST`.

    Args:
        kind: kind of the file, such as "ali".
        version: of the code that makes the file. Increase it if the same inputs would give another
            content, so that old files are not used.
        decides: all other inputs, as values of JSON: the digest of the corpus, which covers data,
            phones, lexicon, silence states and grammar (`Corpus.digest`), and the settings.

    Example:
        >>> cache_name("ali", version=2, corpus="0f3b", settings={"num_passes": 2})
        'ali-4be69944aef0'
    """
    digest = digest_of_json({"kind": kind, "version": version, **decides})
    return f"{kind}-{digest[:_NUM_DIGITS]}"

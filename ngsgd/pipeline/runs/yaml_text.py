"""Safe reading of untrusted YAML: a regular file of bounded size, also after alias expansion."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from ngsgd.files import read_regular_text

_MAX_BYTES = 1 << 20
# after expansion; the largest config.yaml has about 600
_MAX_NODES = 200_000


class NamedText(io.StringIO):
    """Text with a file name for YAML errors."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.name = name


def read_yaml_text(path: Path) -> NamedText:
    """Return the text of a YAML file that is safe to load.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is larger than the limit.
        UnicodeDecodeError: it is not UTF-8.
        yaml.YAMLError: it is not YAML, is nested too deeply, or its aliases expand to too many
            values.
    """
    import yaml

    text = read_regular_text(path, _MAX_BYTES)
    try:
        # nothing expands without an anchor and an alias
        if "&" in text and "*" in text and _expanded(yaml.compose(NamedText(text, str(path)), yaml.SafeLoader), {}) > _MAX_NODES:
            raise yaml.YAMLError(f"its aliases expand to more than {_MAX_NODES} values")
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    return NamedText(text, str(path))


def _expanded(node: Any, sizes: dict[int, int]) -> int:
    """Number of values of a node; an alias of a node that contains it is infinite."""
    if node is None or isinstance(node.value, str):
        return 1
    if id(node) not in sizes:
        # while its parts are counted
        sizes[id(node)] = _MAX_NODES + 1
        parts = [part for value in node.value for part in (value if isinstance(value, tuple) else (value,))]
        sizes[id(node)] = 1 + sum(_expanded(part, sizes) for part in parts)
    return sizes[id(node)]

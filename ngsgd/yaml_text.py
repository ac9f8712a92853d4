"""Safe reading of untrusted YAML: a regular file of bounded size, also after alias expansion."""

from __future__ import annotations

import io
import itertools
import re
from pathlib import Path
from typing import Any, ClassVar

from ngsgd.files import read_regular_text

_MAX_BYTES = 1 << 20
# plain values of YAML 1.2 (core schema), and their first characters; longer integers are texts
_PLAIN = {
    "bool": (re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), list("tTfF")),
    "null": (re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""]),
    "int": (re.compile(r"[-+]?(?:0|[1-9][0-9]{0,299})\Z"), list("-+0123456789")),
    "float": (re.compile(r"(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)"
                         r"|\.(?:nan|NaN|NAN))\Z"), list("-+0123456789."))}
_TAG = "tag:yaml.org,2002:"
# kinds of YAML 1.1 that no setting has
_OTHERS = ("timestamp", "binary", "omap", "pairs", "set")
# the deepest config.yaml has 4
_MAX_DEPTH = 100
_BRACKETS = re.compile(r"[\[\]{}]")
# after expansion; the largest config.yaml has about 600
_MAX_NODES = 200_000


class NamedText(io.StringIO):
    """Text with a file name for YAML errors."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.name = name


def read_yaml_text(path: Path) -> NamedText:
    """Return the text of a YAML file that is safe to load.

    Raises OSError as `read_regular_text`, UnicodeDecodeError, and yaml.YAMLError if it is not YAML,
    is nested too deeply, or its aliases expand to too many values.
    """
    import yaml
    text = read_regular_text(path, _MAX_BYTES)
    if _depth(text) > _MAX_DEPTH:
        raise yaml.YAMLError("it is nested too deeply")
    try:
        # nothing expands without an anchor and an alias
        if "&" in text and "*" in text and _expanded(yaml.compose(NamedText(text, str(path)), yaml.SafeLoader), {}) > _MAX_NODES:
            raise yaml.YAMLError(f"its aliases expand to more than {_MAX_NODES} values")
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    return NamedText(text, str(path))


def _depth(text: str) -> int:
    """The most brackets that are open at a place; PyYAML takes the cube of their number in time."""
    depth = most = 0
    for found in _BRACKETS.finditer(text):
        depth = depth + 1 if found[0] in "[{" else max(0, depth - 1)
        most = max(most, depth)
    return most


def dump_yaml(tree: Any, *, has_end_mark: bool = False) -> str:
    """Return YAML that `load_yaml`, and readers of YAML 1.1, read as the same tree.

    With `has_end_mark` it ends with "...", which shows that a file is complete.
    """
    import yaml
    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Quotes texts that are other values by either version, such as 1e5."""

    for kind, (pattern, first) in _PLAIN.items():
        Dumper.add_implicit_resolver(f"{_TAG}{kind}", pattern, first)
    return str(yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=has_end_mark, explicit_end=has_end_mark))


def load_yaml(text: NamedText | str) -> Any:
    """Load plain values by the rules of YAML 1.2; duplicate keys are errors.

    PyYAML reads YAML 1.1, in which 1:59 is 119, 0777 is 511, `yes` is true and 2026-01-01 a date.
    Here these are texts, which no option for numbers or switches accepts. Raises yaml.YAMLError,
    ValueError or RecursionError if it is not YAML, or nested too deeply.
    """
    import yaml
    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key.value, str) and key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"found duplicate key {key.value:.200}", node.start_mark)
                seen |= {key.value} if isinstance(key.value, str) else set()
            return super().construct_mapping(node, deep=deep)

        def construct_plain(self, node: Any) -> Any:
            kind = node.tag.rpartition(":")[2]
            if not isinstance(node.value, str) or not _PLAIN[kind][0].match(node.value):
                raise yaml.constructor.ConstructorError(None, None, f"found no {kind} of YAML 1.2", node.start_mark)
            return getattr(self, f"construct_yaml_{kind}")(node)

    for kind, (pattern, first) in _PLAIN.items():
        Loader.add_implicit_resolver(f"{_TAG}{kind}", pattern, first)
        # also for explicit tags, such as !!int 1:59
        Loader.add_constructor(f"{_TAG}{kind}", Loader.construct_plain)
    for kind in _OTHERS:
        Loader.add_constructor(f"{_TAG}{kind}", Loader.construct_undefined)
    return yaml.load(text, Loader)


def read_entry(path: Path, section: str, name: str) -> Any:
    """Return a value of a section of config.yaml, without parsing the rest of the file.

    It is None where the file has no such value or cannot be read.
    """
    import yaml
    try:
        _, _, rest = f"\n{read_regular_text(path, _MAX_BYTES)}".partition(f"\n{section}:\n")
        text = "\n".join(itertools.takewhile(lambda line: line.startswith(" "), rest.splitlines()))
        found = load_yaml(text) if _depth(text) <= _MAX_DEPTH else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    return found.get(name) if isinstance(found, dict) else None


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

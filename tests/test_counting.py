"""Numbers and their nouns agree in the lines that commands print."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# what commands print; errors name numbers that are wrong, and the engine has no lines of progress
FOLDERS = ("launcher", "ngsgd/asr", "ngsgd/cluster", "ngsgd/data", "ngsgd/object_storage", "ngsgd/pipeline")
NOUNS = re.compile(r" (?:[a-z]+ )?(workers|jobs|threads|cores|nodes|processes|iterations|utterances|words|voices|speakers|"
                   r"settings|states|phones|files|models|shards|minibatches|steps|times|lines|arcs|seeds|runs|updates|"
                   r"connections|examples|transcripts|checks)\b")
COUNT = re.compile(r"len\(|(\w+\.)*_?num_\w+$|(\w+\.)*_?num_\w+ or ")


def uncounted(source: str) -> Iterator[str]:
    """Numbers of an f-string outside of an error that a plural follows, whatever the number is."""
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.JoinedStr) or _is_of_error(node, parents):
            continue
        for value, text in zip(node.values, node.values[1:], strict=False):
            if isinstance(value, ast.FormattedValue) and value.format_spec is None and isinstance(text, ast.Constant):
                number = ast.unparse(value.value)
                if COUNT.match(number) and (noun := NOUNS.match(str(text.value))):
                    yield f"{node.lineno}: {{{number}}}{noun[0]}"


def _is_of_error(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    while node in parents and not isinstance(node, ast.stmt):
        node = parents[node]
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("Error", "_error")):
            return True
    return isinstance(node, ast.Raise)


@pytest.mark.entry("Nc14")
@pytest.mark.parametrize("folder", FOLDERS)
def test_numbers_agree_with_their_nouns(folder: str) -> None:
    """`ngsgd.counting.counted` writes "1 worker" and "2 workers"."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    found = [f"{path.relative_to(ROOT)}:{one}" for path in paths for one in uncounted(path.read_text())]
    assert len(paths) > 5 and not found


def test_the_check_finds_a_number_of_any_kind() -> None:
    assert list(uncounted('report(f"{len(speakers)} voices")')) and list(uncounted('f"for {c.num_workers} workers"'))
    assert not list(uncounted('raise DataError(f"{len(rows)} words")')) and not list(uncounted('f"{counted(1, \'word\')}"'))

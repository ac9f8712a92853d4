"""Measure the structure of the source tree: folders, files, functions, names, comments, options and
imports.

    python -m tests.structure                    # this tree
    python -m tests.structure --tree ../old      # another checkout, to compare two versions

With `--durations FILE`, the output of `pytest --durations=0`, it also counts tests slower than one
second.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Structure:
    """Figures of a tree; lines include blank ones and comments."""

    files_per_folder: dict[str, int] = field(default_factory=dict)
    lines_per_room: dict[str, int] = field(default_factory=dict)
    file_lines: list[int] = field(default_factory=list)
    function_lines: list[int] = field(default_factory=list)
    num_code_lines: int = 0
    num_comment_lines: int = 0
    num_wide_lines: int = 0
    private_functions: int = 0
    one_use_private: int = 0
    short_one_use_private: int = 0
    public_classes: int = 0
    duplicate_classes: dict[str, list[str]] = field(default_factory=dict)
    function_level_imports: int = 0
    widest_constructors: list[tuple[int, str]] = field(default_factory=list)


def sources(tree: Path) -> Iterator[Path]:
    """Python files of the library and the launcher; links to folders are not followed."""
    for room in ("ngsgd", "launcher"):
        for path in sorted((tree / room).rglob("*.py")):
            if not any(part.is_symlink() for part in path.parents):
                yield path


def measure(tree: Path) -> Structure:
    """All figures of one tree."""
    found = Structure()
    folders: Counter[str] = Counter()
    rooms: Counter[str] = Counter()
    classes: defaultdict[str, list[str]] = defaultdict(list)
    for path in sources(tree):
        relative = path.relative_to(tree)
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        folders[str(relative.parent)] += 1
        rooms["/".join(relative.parts[:2]) if len(relative.parts) > 2 else relative.parts[0]] += len(lines)
        found.file_lines.append(len(lines))
        found.num_code_lines += sum(bool(line.strip()) for line in lines)
        found.num_wide_lines += sum(len(line) > 100 for line in lines)
        found.num_comment_lines += _own_line_comments(path)
        module = ast.parse(text)
        _functions(module, text, found)
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                found.public_classes += not node.name.startswith("_")
                classes[node.name].append(str(relative))
                found.widest_constructors.append((_num_collaborators(node), f"{relative}:{node.name}"))
    found.files_per_folder = dict(folders)
    found.lines_per_room = dict(rooms)
    found.duplicate_classes = {name: places for name, places in classes.items() if len(places) > 1}
    found.widest_constructors = sorted(found.widest_constructors, reverse=True)[:8]
    return found


def _own_line_comments(path: Path) -> int:
    with tokenize.open(path) as file:
        tokens = list(tokenize.generate_tokens(file.readline))
    return sum(token.type == tokenize.COMMENT and not token.line[:token.start[1]].strip() for token in tokens)


def _functions(module: ast.Module, text: str, found: Structure) -> None:
    words = Counter(re.findall(r"\w+", text))
    for node in ast.walk(module):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        found.function_lines.append(length)
        found.function_level_imports += sum(isinstance(inner, ast.Import | ast.ImportFrom) for inner in ast.walk(node))
        if node.name.startswith("_") and not node.name.startswith("__"):
            found.private_functions += 1
            if words[node.name] == 2:
                found.one_use_private += 1
                found.short_one_use_private += length <= 5


def _num_collaborators(node: ast.ClassDef) -> int:
    """Arguments of the constructor; fields of a dataclass that is not frozen, as frozen ones are
    records.
    """
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
            return len(inner.args.args) + len(inner.args.kwonlyargs) - 1
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    if any(one.startswith("dataclass") and "frozen=True" not in one for one in decorators):
        return sum(isinstance(inner, ast.AnnAssign) for inner in node.body)
    return 0


def _num_options(tree: Path) -> int:
    """Rows of the table of settings in the reference."""
    page = tree / "docs" / "reference" / "settings.md"
    if not page.exists():
        return 0
    return len(re.findall(r"^\| `[\w.]+` \|", page.read_text(encoding="utf-8"), re.MULTILINE))


def _slow_tests(durations: Path) -> int:
    calls = re.findall(r"^([\d.]+)s call", durations.read_text(encoding="utf-8"), re.MULTILINE)
    return sum(float(seconds) > 1.0 for seconds in calls)


def _spread(values: list[int]) -> str:
    ordered = sorted(values)
    return f"{statistics.median(ordered):.0f} / {ordered[int(0.9 * (len(ordered) - 1))]} / {ordered[-1]}"


def table(found: Structure, tree: Path, durations: Path | None) -> str:
    """Markdown rows: figure and value."""
    largest = sorted(found.files_per_folder.items(), key=lambda item: -item[1])[:5]
    per_function = found.num_comment_lines / max(1, found.num_code_lines)
    rows = [
        ("files", str(len(found.file_lines))),
        ("folders", str(len(found.files_per_folder))),
        ("largest folders (files)", ", ".join(f"{folder} {number}" for folder, number in largest)),
        ("folders with more than 14 files", str(sum(number > 14 for number in found.files_per_folder.values()))),
        ("lines", str(sum(found.file_lines))),
        ("lines of a file: median / 90 % / most", _spread(found.file_lines)),
        ("functions", str(len(found.function_lines))),
        ("lines of a function: median / 90 % / most", _spread(found.function_lines)),
        ("private functions used once in their file", f"{found.one_use_private} of {found.private_functions}"),
        ("of these at most 5 lines long", str(found.short_one_use_private)),
        ("own-line comments", f"{per_function:.1%} of non-blank lines"),
        ("lines wider than 100 columns", f"{found.num_wide_lines / max(1, found.num_code_lines):.1%}"),
        ("public classes", str(found.public_classes)),
        ("class names defined twice or more", f"{len(found.duplicate_classes)}: {', '.join(sorted(found.duplicate_classes))}"),
        ("imports inside functions", str(found.function_level_imports)),
        ("most constructor arguments", ", ".join(f"{name} {number}" for number, name in found.widest_constructors[:4])),
        ("options", str(_num_options(tree))),
    ]
    if durations:
        rows.append(("tests slower than 1 s", str(_slow_tests(durations))))
    rows += [(f"lines in {room}", str(number)) for room, number in sorted(found.lines_per_room.items())]
    return "| figure | value |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--durations", type=Path)
    arguments = parser.parse_args()
    print(table(measure(arguments.tree), arguments.tree, arguments.durations), end="")


if __name__ == "__main__":
    main()

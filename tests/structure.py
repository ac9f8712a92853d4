"""Measure the structure of the source tree: folders, files, functions, comments and imports.

    python -m tests.structure                    # this tree
    python -m tests.structure --tree ../old      # another checkout, to compare two versions
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import tokenize
from collections import Counter
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
    function_level_imports: int = 0


def sources(tree: Path) -> Iterator[Path]:
    """Python files of the library and the launcher; links to folders are not followed."""
    for room in ("ngsgd", "launcher"):
        for path in sorted((tree / room).rglob("*.py")):
            if not any(part.is_symlink() for part in path.parents):
                yield path


def measure(tree: Path) -> Structure:
    found = Structure()
    folders: Counter[str] = Counter()
    rooms: Counter[str] = Counter()
    for path in sources(tree):
        relative = path.relative_to(tree)
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        folders[str(relative.parent)] += 1
        rooms["/".join(relative.parts[:2]) if len(relative.parts) > 2 else relative.parts[0]] += len(lines)
        found.file_lines.append(len(lines))
        found.num_code_lines += sum(bool(line.strip()) for line in lines)
        found.num_wide_lines += sum(len(line) > 100 for line in lines)
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        found.num_comment_lines += sum(
            token.type == tokenize.COMMENT and token.line.lstrip()[:1] == "#" for token in tokens)
        words = Counter(re.findall(r"\w+", text))
        for node in ast.walk(ast.parse(text)):
            found.public_classes += isinstance(node, ast.ClassDef) and not node.name.startswith("_")
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                found.function_lines.append(length)
                found.function_level_imports += sum(isinstance(inner, ast.Import | ast.ImportFrom)
                                                    for inner in ast.walk(node))
                if node.name.startswith("_") and not node.name.startswith("__"):
                    found.private_functions += 1
                    found.one_use_private += words[node.name] == 2
                    found.short_one_use_private += words[node.name] == 2 and length <= 5
    found.files_per_folder = dict(folders)
    found.lines_per_room = dict(rooms)
    return found


def _spread(values: list[int]) -> str:
    ordered = sorted(values)
    return f"{statistics.median(ordered):.0f} / {ordered[int(0.9 * (len(ordered) - 1))]} / {ordered[-1]}"


def table(found: Structure) -> str:
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
        ("imports inside functions", str(found.function_level_imports))]
    rows += [(f"lines in {room}", str(number)) for room, number in sorted(found.lines_per_room.items())]
    return "| figure | value |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT)
    print(table(measure(parser.parse_args().tree)), end="")


if __name__ == "__main__":
    main()

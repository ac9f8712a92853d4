"""Check the language of everything that people read.

    python -m tools.prose                 # the repository: findings and a table of counts
    python -m tools.prose docs README.md  # some folders and files
    python -m tools.prose --counts        # the table only

Four checks: words that `tools/words.txt` replaces, sentences over 35 words, lines of prose over
100 columns, and British spellings. They read Markdown outside code blocks, docstrings, comments,
strings with at least three words, and comments in YAML files. Three counts: exported names without
docstring, settings without help, pictures older than the code they show. Exit code 1 if anything
but an old picture was found.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from tools import pictures

ROOT = Path(__file__).resolve().parent.parent
MAX_WORDS, MAX_COLUMNS = 35, 100
WORD, SENTENCE, LINE, SPELLING = "word", "sentence", "line", "spelling"
NO_DOCSTRING, NO_HELP, OLD_PICTURE = "no docstring", "no help", "old picture"
KINDS = (WORD, SENTENCE, LINE, SPELLING, NO_DOCSTRING, NO_HELP, OLD_PICTURE)

# Markdown and reStructuredText that is not read as words: code, link targets, addresses, HTML tags
_CODE = re.compile(r"``[^`]+``|`[^`]*`")
_LINK = re.compile(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])")
_ADDRESS = re.compile(r"https?://\S+|<[^<>]*>|\{\{.*?\}\}|\{[%:].*?\}")
_WORD = re.compile(r"[A-Za-z][\w'-]*")
_END = re.compile(r"(?<=[.!?])[\"')*_]*\s+(?=[A-Z\"'`(*_\[])")
_ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s+")
_ENTRY = re.compile(r"\s*\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*(?: \([^)]*\))?: ")
_DIRECTIVE = re.compile(r"#\s*(?:type:|noqa|mypy:|pragma|!|fmt:|ruff:|-\*-)")
_SECTIONS = (
    "Args",
    "Returns",
    "Raises",
    "Yields",
    "Attributes",
    "Example",
    "Examples",
    "Note",
    "Notes",
)


class Finding(NamedTuple):
    """A place and its fault."""

    path: str
    line: int
    kind: str
    message: str


@dataclass
class Paragraph:
    """Prose that is split into sentences as one piece: number of the first line, and the lines."""

    first: int
    lines: list[str]
    has_sentences: bool = True
    has_lines: bool = True


@dataclass
class WordList:
    """The contents of `words.txt`: expressions with their replacements, and the exceptions."""

    expressions: dict[str, list[tuple[re.Pattern[str], str]]] = field(default_factory=dict)
    exceptions: list[tuple[str, str]] = field(default_factory=list)
    any: dict[str, re.Pattern[str]] = field(init=False)

    def __post_init__(self) -> None:
        # one search decides for most paragraphs
        self.any = {
            kind: re.compile(
                "|".join(pattern.pattern for pattern, _ in pairs).replace(r")\b|\b(?:", "|")
            )
            for kind, pairs in self.expressions.items()
        }

    @classmethod
    def read(cls, path: Path) -> WordList:
        """Parse the file; see its head for the format."""
        sections: defaultdict[str, list[str]] = defaultdict(list)
        name = ""
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("[") and line.endswith("]"):
                name = line.strip("[]")
            elif line and not line.startswith("#"):
                sections[name].append(line)
        pairs = {
            kind: [
                (re.compile(rf"\b(?:{pattern})\b"), instead)
                for pattern, _, instead in (line.partition("\t") for line in sections[section])
            ]
            for kind, section in ((WORD, "words"), (SPELLING, "spelling"))
        }
        exceptions = []
        for line in sections["exceptions"]:
            where, _, rest = line.partition(": ")
            text, _, reason = rest.rpartition(": ")
            if not text or not reason:
                raise SystemExit(f"{path}: an exception is `path: text: reason`, not {line!r}.")
            exceptions.append((where, text))
        return cls(pairs, exceptions)

    def accepts(self, path: str, paragraph: str) -> bool:
        """Whether an exception covers this paragraph."""
        return any(
            fnmatch.fnmatch(path, where) and text in paragraph for where, text in self.exceptions
        )


def main() -> int:
    """Print findings and counts; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "paths", nargs="*", help="folders and files below the root of the repository; default: all"
    )
    parser.add_argument("--counts", action="store_true", help="print the table of counts only")
    arguments = parser.parse_args()
    findings = check([path.rstrip("/") for path in arguments.paths])
    if not arguments.counts:
        for finding in findings:
            print(f"{finding.path}:{finding.line}: {finding.kind}: {finding.message}")
    print(table(findings))
    # pictures take a browser or a long run to make
    return int(any(finding.kind != OLD_PICTURE for finding in findings))


def check(paths: list[str], root: Path = ROOT) -> list[Finding]:
    """All findings below the given paths, ordered by place."""
    words = WordList.read(Path(__file__).with_name("words.txt"))
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    names = [
        name
        for name in sorted(set(listed))
        if Path(name).suffix in READERS
        and _is_selected(name, paths)
        and (root / name).is_file()
        and not (root / name).is_symlink()
    ]
    with ProcessPoolExecutor() as processes:
        examined = processes.map(partial(_check_file, root, words), names, chunksize=20)
        findings = [
            finding
            for finding in (*undocumented(root), *settings_without_help(root), *old_pictures(root))
            if _is_selected(finding.path, paths)
        ]
        return sorted([*findings, *chain.from_iterable(examined)])


def _check_file(root: Path, words: WordList, name: str) -> list[Finding]:
    text = (root / name).read_text(encoding="utf-8")
    return [
        finding
        for paragraph in READERS[Path(name).suffix](text, name)
        for finding in examine(paragraph, name, words)
    ]


def _is_selected(name: str, paths: list[str]) -> bool:
    return not paths or any(name == path or name.startswith(f"{path}/") for path in paths)


# ---- checks of a paragraph


def examine(paragraph: Paragraph, path: str, words: WordList) -> Iterator[Finding]:
    """Findings of one paragraph: words, spelling, long sentences, wide lines."""
    text = "\n".join(_plain(line) for line in paragraph.lines)
    lower, raw = text.lower(), " ".join(line.strip() for line in paragraph.lines)
    for kind, expressions in words.expressions.items():
        for pattern, instead in expressions if words.any[kind].search(lower) else ():
            for match in pattern.finditer(lower):
                if not words.accepts(path, raw):
                    line = paragraph.first + text.count("\n", 0, match.start())
                    yield Finding(
                        path, line, kind, f"{' '.join(match.group().split())!r}: {instead}"
                    )
    if not paragraph.has_sentences:
        return
    position = 0
    for sentence in _END.split(text):
        number = len(_WORD.findall(sentence))
        position = text.index(sentence, position)
        if number > MAX_WORDS and not words.accepts(path, raw):
            line = paragraph.first + text.count("\n", 0, position)
            yield Finding(
                path, line, SENTENCE, f"{number} words: {' '.join(sentence.split())[:60]}..."
            )
        position += len(sentence)
    for offset, row in enumerate(paragraph.lines if paragraph.has_lines else ()):
        if len(row) > MAX_COLUMNS and len(_ADDRESS.sub("", _LINK.sub(r"\1", row))) > MAX_COLUMNS:
            yield Finding(path, paragraph.first + offset, LINE, f"{len(row)} columns")


def _plain(line: str) -> str:
    """The words of a line: code becomes the word "Code", links their text, addresses nothing."""
    line = line.strip()
    # the capital ends a sentence before code
    line = _CODE.sub("Code", line)
    return _ADDRESS.sub("", _LINK.sub(r"\1", line))


# ---- where prose is


def markdown(text: str, _: str) -> Iterator[Paragraph]:
    """Paragraphs, list items, headings and table rows of a page."""
    current = Paragraph(0, [])
    fence = ""
    in_list = False
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped and not line.startswith(" "):
            in_list = bool(_ITEM.match(line)) or stripped.startswith(("!!!", "???"))
        elif line.startswith("    ") and not in_list and not current.lines:
            # an indented block of code
            continue
        if fence or stripped.startswith(("```", "~~~")):
            if not fence:
                fence = stripped[:3]
            elif stripped.startswith(fence):
                fence = ""
            stripped = ""
        is_table = stripped.startswith("|")
        is_alone = is_table or stripped.startswith(("#", "!!!", "???", ":::", "<"))
        if not stripped or is_alone or _ITEM.match(line):
            if current.lines:
                yield current
            current = Paragraph(number, [])
        if is_alone:
            if not stripped.startswith(":::"):
                yield Paragraph(number, [line], has_sentences=not is_table)
        elif stripped:
            current.first = current.first if current.lines else number
            current.lines.append(line)
    if current.lines:
        yield current


def comments(text: str, _: str) -> Iterator[Paragraph]:
    """Comments of a YAML file."""
    marked = (
        (number, match.start(1), line)
        for number, line in enumerate(text.splitlines(), 1)
        if (match := re.search(r"(?:^|\s)(#)", line))
    )
    yield from _comment_paragraphs(marked)


def python(text: str, path: str) -> Iterator[Paragraph]:
    """Docstrings, comments and strings of a file; in tests only the strings of decorators."""
    lines = text.splitlines()
    found = _Strings(ast.parse(text), strings=not path.startswith("tests/"))
    for node in found.docstrings:
        yield from _docstring(lines, node)
    for text_node, parts in found.texts:
        for words in re.split(r"\n\s*\n", "".join(parts)):
            # letters between spaces: no format, no regular expression, no code
            if len(re.findall(r"(?<!\S)[a-z]{2,}[,.;:]?(?!\S)", words)) >= 3:
                yield Paragraph(
                    text_node.lineno,
                    [words.replace("\n", " ")],
                    has_sentences=len(words) < 2000,
                    has_lines=False,
                )
    spans = found.spans(lines)
    marked = (
        (number, column, line)
        for number, line in enumerate(lines, 1)
        if "#" in line and (column := _comment_column(line, spans.get(number, []))) is not None
    )
    yield from _comment_paragraphs(marked)


def _comment_column(line: str, spans: list[tuple[int, int]]) -> int | None:
    start = line.find("#")
    while start >= 0:
        if not any(low <= start < high for low, high in spans):
            return start
        start = line.find("#", start + 1)
    return None


def _comment_paragraphs(marked: Iterable[tuple[int, int, str]]) -> Iterator[Paragraph]:
    """Join comments on consecutive lines; a comment after code is a separate paragraph."""
    current = Paragraph(0, [])
    for number, column, line in marked:
        comment = line[column:]
        if _DIRECTIVE.match(comment):
            continue
        is_own = not line[:column].strip()
        words = comment.lstrip("#: ")
        follows = is_own and current.lines and number == current.first + len(current.lines)
        if not follows or not words or _ITEM.match(words):
            if current.lines:
                yield current
            current = Paragraph(number, [])
        if not words:
            continue
        if is_own:
            current.lines.append(" " * (len(line) - len(words)) + words)
        else:
            yield Paragraph(number, [" " * (len(line) - len(words)) + words])
    if current.lines:
        yield current


def _docstring(lines: list[str], node: ast.Constant) -> Iterator[Paragraph]:
    """Paragraphs of a docstring: without doctests, indented code and their output."""
    first, last = node.lineno, node.end_lineno or node.lineno
    body = lines[first - 1 : last]
    base = len(body[0]) - len(body[0].lstrip())
    current = Paragraph(first, [])
    in_section = in_doctest = in_code = False
    for number, line in enumerate(body, first):
        words = (
            line.strip().lstrip("rRbBuU").strip('"').strip()
            if number in (first, last)
            else line.strip()
        )
        indent = len(line) - len(line.lstrip())
        if not words:
            in_doctest = False
        in_doctest = in_doctest or words.startswith(">>> ")
        if indent <= base and words:
            in_section = words.rstrip(":") in _SECTIONS
        is_row = words.startswith("|")
        starts = not words or in_doctest or _ITEM.match(line) or (in_section and _ENTRY.match(line))
        if starts or is_row:
            in_code = not in_section and indent > base + 2 and not current.lines and number > first
            if current.lines:
                yield current
            current = Paragraph(number, [])
        if indent > base + 2 and not in_section and not current.lines and number > first:
            in_code = True
        elif indent <= base:
            in_code = False
        if (
            not words
            or in_doctest
            or in_code
            or (indent <= base and words.rstrip(":") in _SECTIONS)
        ):
            continue
        if is_row:
            yield Paragraph(number, [line], has_sentences=False)
            continue
        if not current.lines:
            current.first = number
        current.lines.append(line)
    if current.lines:
        yield current


class _Strings:
    """Docstrings and other strings of a module."""

    def __init__(self, module: ast.Module, strings: bool) -> None:
        self.docstrings: list[ast.Constant] = []
        self.texts: list[tuple[ast.expr, list[str]]] = []
        self._ranges: list[ast.expr] = []
        self._visit(module, strings)

    def _visit(self, node: ast.AST, is_shown: bool) -> None:
        for name in node._fields:
            value = getattr(node, name, None)
            shown = is_shown or name == "decorator_list"
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.Constant):
                    if isinstance(child.value, str | bytes):
                        self._ranges.append(child)
                    if isinstance(child.value, str):
                        if isinstance(node, ast.Expr):
                            self.docstrings.append(child)
                        elif shown and " " in child.value:
                            self.texts.append((child, [child.value]))
                elif isinstance(child, ast.JoinedStr):
                    self._ranges.append(child)
                    if shown:
                        parts = [
                            part.value if isinstance(part, ast.Constant) else "value"
                            for part in child.values
                        ]
                        self.texts.append((child, [str(part) for part in parts]))
                elif isinstance(child, ast.AST) and not isinstance(
                    child, ast.Name | ast.expr_context
                ):
                    self._visit(child, shown)

    def spans(self, lines: list[str]) -> dict[int, list[tuple[int, int]]]:
        """Columns that strings cover, by line."""
        found: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for node in self._ranges:
            last = node.end_lineno or node.lineno
            if last == node.lineno and "#" not in lines[last - 1]:
                continue
            for number in range(node.lineno, last + 1):
                line = lines[number - 1]
                # offsets of the syntax tree count bytes
                start = _characters(line, node.col_offset) if number == node.lineno else 0
                end = _characters(line, node.end_col_offset or 0) if number == last else len(line)
                found[number].append((start, end))
        return found


def _characters(line: str, offset: int) -> int:
    return offset if line.isascii() else len(line.encode()[:offset].decode(errors="ignore"))


READERS: dict[str, Callable[[str, str], Iterator[Paragraph]]] = {
    ".md": markdown,
    ".py": python,
    ".yaml": comments,
    ".yml": comments,
}


# ---- counts of other kinds


def undocumented(root: Path) -> Iterator[Finding]:
    """Names in an `__all__` of the library whose class or function has no docstring."""
    definitions: defaultdict[str, list[tuple[str, ast.ClassDef | ast.FunctionDef]]] = defaultdict(list)
    exported: set[tuple[str, str]] = set()
    for path in sorted((root / "ngsgd").rglob("*.py")):
        if any(parent.is_symlink() for parent in path.parents):
            continue
        name = path.relative_to(root).as_posix()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                definitions[node.name].append((name, node))
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                folder = (
                    path.parent.relative_to(root).as_posix() if path.name == "__init__.py" else name
                )
                exported |= {(folder, one) for one in ast.literal_eval(node.value)}
    reported = set()
    for folder, one in sorted(exported):
        for name, definition in definitions[one]:
            if (
                name.startswith(folder)
                and (name, one) not in reported
                and not ast.get_docstring(definition)
            ):
                reported.add((name, one))
                yield Finding(name, definition.lineno, NO_DOCSTRING, one)


def settings_without_help(root: Path) -> Iterator[Finding]:
    """Rows of the table of settings whose last column is empty."""
    name = "docs/reference/settings.md"
    text = (root / name).read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), 1):
        if (
            re.match(r"\| `[\w.]+` \|", line)
            and not line.rstrip().removesuffix("|").rpartition("|")[2].strip()
        ):
            yield Finding(name, number, NO_HELP, line.split("|")[1].strip())


def old_pictures(root: Path) -> Iterator[Finding]:
    """Pictures that were made by earlier code."""
    for picture, code in pictures.old(root):
        yield Finding(picture, 1, OLD_PICTURE, f"made by earlier code of {code}; see tools/pictures.py")


def table(findings: list[Finding]) -> str:
    """Counts by folder and kind."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for finding in findings:
        parts = finding.path.split("/")
        counts["/".join(parts[: min(2, len(parts) - 1)]) or parts[0]][finding.kind] += 1
        counts["all"][finding.kind] += 1
    width = max([24, *map(len, counts)])
    rows = ["".join([f"{'folder':{width}}", *(f"{kind:>13}" for kind in KINDS)])]
    for folder in sorted(counts, key=lambda name: (name == "all", name)):
        rows.append(
            "".join([f"{folder:{width}}", *(f"{counts[folder][kind]:>13}" for kind in KINDS)])
        )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())

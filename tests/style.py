"""Find assertions in the default test tier that depend on wording, on private names or the clock.

`python -m tests.style` prints them. A test with a tier marker is not examined.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.tiers import TIER_MARKERS

TESTS = Path(__file__).parent
PROSE, PRIVATE, CLOCK = "prose", "private name", "clock"
_MAX_WORDS = 2
_CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns"}
# what holds words for a reader: a message, the output of a command
_TEXTS = re.compile(r"(?:^|_)(?:messages?|errors?|err|out|output|stdout|stderr|text|caught|value|said|told|"
                    r"lines?|warnings?|sentences?|problems|reason|complaints?|log|shown|printed|advice)$")
_PRIVATE = re.compile(r"^_[A-Za-z]\w*$")
# of the standard library, of Hydra's configuration files and of torch, without another name
_PUBLIC_IN_PRACTICE = {"_replace", "_asdict", "_fields", "_make", "_value_", "_name_", "_exit", "_target_",
                       "_forward_hooks", "_forward_pre_hooks", "_C", "_functorch", "_Loss", "_conv_forward"}

# Private names that a test may use, and why
ALLOWED_PRIVATE = {
    "_receive": "a subclass acts between a worker's message and the pool's answer",
    "_fetch": "a subclass makes a worker's reply late or wrong, in the step that receives it",
    "_ask": "a subclass loses a request to a worker, in the step that sends it",
    "_post": "a subclass records whether a worker is asked to keep its result",
    "_new_slot": "a worker joins in the middle of a run",
    "_train": "a worker of the test dies in the middle of a job",
    "_result": "a worker of the test returns a damaged result",
    "_worker": "the pool's only worker is replaced by one that damages results",
    "_gathered": "a connection is lost after the outer step, and before the exchange of the model",
    "_shards": "a worker that lost its part of the outer state",
    "_group": "bytes are counted by the rank that sends them",
    "_slots": "two workers on two machines, which no test has, decide the exchange",
    "_commit": "a crash at this moment cannot be caused from outside",
    "_pass_on": "a crash at this moment cannot be caused from outside",
    "_state": "the scalars of the Fisher estimate are compared with the paper's after each update",
    "_plan_of_one": "the reference follows the same splices, step by step",
    "_drawn": "1000 samples of one row, where a loss takes few",
    "_CHUNK": "several chunks with small matrices",
    "_ROWS_AT_ONCE": "several passes with few rows",
    "_loss": "a copy of a task that changes between two passes",
    "_validation": "a copy of a task that changes between two passes",
    "_spills": "one stored byte is damaged",
    "_settings": "a copy that records its preconditioners; the settings that a worker has after growth",
    "_rows": "how many of its frames a stream has used so far",
    "_join": "the call that connects to a cluster, which the test has not",
    "_known": "secrets of other tests are forgotten",
    "_END_BYTES": "a short log is above the limit",
    "_MAX_BYTES": "a short log is above the limit",
    "_JOBS_BYTES": "a short log is above the limit",
    "_typed": "the moment before a request to the store",
    "_config": "the configuration that ngsgd.train makes, without a run",
    "_composed": "Hydra composes a line once for all tests of a file",
    "_DummyWork": "torchft returns it"}


@dataclass(frozen=True)
class Finding:
    kind: str
    file: str
    line: int
    test: str
    detail: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind}: {self.detail} (in {self.test})"


def findings(folder: Path = TESTS) -> list[Finding]:
    return [finding for path in sorted(folder.rglob("test_*.py"))
            for finding in findings_in(path.read_text(encoding="utf-8"),
                                       str(path.relative_to(folder)))]


def findings_in(source: str, file: str) -> list[Finding]:
    """Findings in unmarked functions and methods of one file, helpers among them."""
    module = ast.parse(source)
    if any(isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0])
           and _names_tier(node.value) for node in module.body):
        return []
    found = {Finding(PRIVATE, file, node.lineno, "the imports", detail) for node in module.body if isinstance(node, ast.ImportFrom)
             for _, detail in _private(node)}
    lists = {ast.unparse(node.targets[0]): node.value for node in module.body if isinstance(node, ast.Assign)}
    for function in _unmarked_functions(module):
        for text in _parametrized_prose(function, lists):
            found.add(Finding(PROSE, file, function.lineno, function.name, text))
        for node in ast.walk(function):
            for kind, detail in (*_prose(node), *_private(node), *_clock(node)):
                found.add(Finding(kind, file, getattr(node, "lineno", 0), function.name, detail))
    return sorted(found, key=lambda finding: (finding.line, finding.kind, finding.detail))


def _names_tier(node: ast.AST) -> bool:
    return re.search(rf"\bmark\.({'|'.join(TIER_MARKERS)})\b", ast.unparse(node)) is not None


def _unmarked_functions(module: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.iter_child_nodes(module):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and any(map(_names_tier, node.decorator_list)):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _unmarked_functions(node)


def _prose(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Assert):
        for comparison in [inner for inner in ast.walk(node.test) if isinstance(inner, ast.Compare)]:
            sides = [comparison.left, *comparison.comparators]
            if any(_is_text(side) for side in sides):
                texts = _strings([side for side in sides
                                  if isinstance(side, ast.Constant | ast.JoinedStr)])
                yield from ((PROSE, text) for text in texts if _is_prose(text))
    if isinstance(node, ast.Call) and ast.unparse(node.func) in {"pytest.raises", "pytest.warns"}:
        patterns = [keyword.value for keyword in node.keywords if keyword.arg == "match"]
        yield from ((PROSE, text) for text in _strings(patterns) if _is_prose(text))


def _parametrized_prose(function: ast.FunctionDef | ast.AsyncFunctionDef, lists: dict[str, ast.expr]) -> Iterator[str]:
    """Sentences among the cases of an argument that is matched with a message."""
    matched = set(_matched_arguments(function))
    for call in [node for node in function.decorator_list if isinstance(node, ast.Call) and len(node.args) > 1]:
        cases = lists.get(ast.unparse(call.args[1]), call.args[1])
        if not ast.unparse(call.func).endswith("mark.parametrize") or not isinstance(cases, ast.List | ast.Tuple):
            continue
        names = [name.strip() for text in _strings([call.args[0]]) for name in text.split(",")]
        for case in cases.elts:
            values = case.elts if isinstance(case, ast.Tuple) and len(names) > 1 else [case]
            for name, value in zip(names, values, strict=False):
                if name in matched:
                    yield from (text for text in _strings([value]) if _is_prose(text))


def _matched_arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Names that are a pattern of pytest.raises or stand before `in`."""
    places = list[ast.AST]()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"pytest.raises", "pytest.warns"}:
            places += [keyword.value for keyword in node.keywords if keyword.arg == "match"]
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
            places.append(node.left)
    for place in places:
        yield from (inner.id for inner in ast.walk(place) if isinstance(inner, ast.Name))


def _is_text(node: ast.AST) -> bool:
    """Whether an expression is a message or output, by its name or as str(...) of an error."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "str":
        return True
    names = [inner.id if isinstance(inner, ast.Name) else inner.attr for inner in ast.walk(node)
             if isinstance(inner, ast.Name | ast.Attribute)]
    return any(_TEXTS.search(name) for name in names)


def _strings(nodes: list[ast.expr]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            # a value in braces stands between words
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        else:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    yield inner.value


def _is_prose(text: str) -> bool:
    """More than two plain words: no name with . _ = / or a digit, no option, no number."""
    if "%WER" in text:
        # a line in the format of Kaldi's compute-wer, which other programs parse
        return False
    plain = re.sub(r"[\^$()\[\]|?]|\*(?!\w)", " ", re.sub(r"\.\*|\.\+|\\s\+", " ", text).replace("\\", ""))
    tokens = plain.split()
    words = [token for token in tokens if re.fullmatch(r"\(?[A-Za-z]{2,}[,.:;)]*", token)
             and not re.search(r"[a-z][A-Z]", token)]
    return len(words) > _MAX_WORDS


def _private(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Attribute) and _is_private(node.attr) and ast.unparse(node.value) not in {"self", "cls"}:
        yield PRIVATE, ast.unparse(node)
    if isinstance(node, ast.ImportFrom):
        # tests may share any helper
        names = [alias.name for alias in node.names if not (node.module or "").startswith("tests.")]
        yield from ((PRIVATE, f"{node.module}.{name}") for name in names if _is_private(name))
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in {"setattr", "delattr", "getattr"}:
        yield from ((PRIVATE, text) for text in _strings(node.args[:2]) if _is_private(text.split(".")[-1]))


def _is_private(name: str) -> bool:
    return bool(_PRIVATE.match(name)) and name not in _PUBLIC_IN_PRACTICE | ALLOWED_PRIVATE.keys()


def _clock(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Assert) and any(_reads_clock(inner) for inner in ast.walk(node)):
        yield CLOCK, ast.unparse(node)


def _reads_clock(node: ast.AST) -> bool:
    return (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CLOCKS
            and ast.unparse(node.func.value) == "time")


if __name__ == "__main__":
    print(*findings(), dict(Counter(finding.kind for finding in findings())), sep="\n")

"""Mutants made from the source of the coordinator, its storage, and all that it runs with.

Candidates are each comparison, each index or count that may be one too large, each call that syncs,
each field of a state, and each pair of adjacent effects. `python -m tests.fault_mutants
--generated 200` draws a sample with a seed.
"""

from __future__ import annotations

import ast
import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

from tests.mutants import REPOSITORY

_TESTS = "tests/training"
# file -> tests that may find its mutants
FILES: dict[str, tuple[str, ...]] = {
    "ngsgd/training/coordinator.py": (f"{_TESTS}/test_coordinator.py",),
    "ngsgd/training/dispatcher.py": (f"{_TESTS}/test_dispatch.py", f"{_TESTS}/validation/test_quarantine.py"),
    "ngsgd/training/job_init.py": (f"{_TESTS}/test_coordinator.py",),
    "ngsgd/training/averaging/averager.py": (f"{_TESTS}/test_coordinator.py", f"{_TESTS}/validation/test_quarantine.py"),
    "ngsgd/training/averaging/averaged_model.py": (f"{_TESTS}/test_coordinator.py", f"{_TESTS}/test_growth.py"),
    "ngsgd/training/storage/ledger.py": (f"{_TESTS}/storage/test_audit.py",),
    "ngsgd/training/storage/checkpoint.py": (f"{_TESTS}/storage/test_checkpoint.py",),
    "ngsgd/training/storage/lock.py": (f"{_TESTS}/storage/test_lock.py",),
    "ngsgd/object_storage/lease.py": ("tests/object_storage/test_lease.py",),
    "ngsgd/object_storage/folder.py": ("tests/object_storage/test_folder.py",),
    "ngsgd/training/sites/site_average.py": (f"{_TESTS}/sites/test_site_average.py",),
    "ngsgd/training/sites/rounds.py": (f"{_TESTS}/sites/test_site_average.py",),
    "ngsgd/training/snapshots/job_snapshots.py": (f"{_TESTS}/snapshots/test_continuation.py",),
    "ngsgd/training/snapshots/book.py": (f"{_TESTS}/snapshots/test_book.py",),
    "ngsgd/training/auditing/audits.py": (f"{_TESTS}/auditing/test_comparison.py",),
    "ngsgd/cluster/exchange/collective.py": ("tests/cluster/exchange",)}
_OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
_SYNCS = ("sync", "fsync", "require_held", "committed")
_STATES = ("Progress", "Checkpoint", "JobInit", "Job", "Plan", "Head", "replace")


class Generated(NamedTuple):
    """A complete file and its mutant, as `tests.fault_mutants.FaultMutant`."""

    name: str
    file: str
    old: str
    new: str
    commit: str
    tests: tuple[str, ...]


def sample(count: int, seed: int) -> list[Generated]:
    """Draw mutants of all files together."""
    found = [mutant for file in FILES if (REPOSITORY / file).exists() for mutant in candidates(file)]
    return random.Random(seed).sample(found, min(count, len(found)))


def candidates(file: str) -> Iterator[Generated]:
    """All mutants of a file."""
    source = (REPOSITORY / file).read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        for what, first, last, text in _changes(source, node):
            # columns count bytes
            lines = source.encode().splitlines(keepends=True)
            before = b"".join(lines[:first[0] - 1]) + lines[first[0] - 1][:first[1]]
            after = lines[last[0] - 1][last[1]:] + b"".join(lines[last[0]:])
            mutant = before.decode() + text + after.decode()
            yield Generated(f"{what}:{file.rpartition('/')[2]}:{first[0]}", file, source, mutant, "", FILES[file])


_Place = tuple[int, int]


def _changes(source: str, node: ast.AST) -> Iterator[tuple[str, _Place, _Place, str]]:
    """Yield (kind, first place, end, new text) of the mutants of one node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        opposite = ast.Compare(node.left, [_OPPOSITES[type(node.ops[0])]()], node.comparators)
        yield ("comparison", *_span(node), f"({ast.unparse(opposite)})")
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield ("one_more", *_span(node), str(node.value + 1))
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _name(node.value) in _SYNCS:
        yield ("no_call", *_span(node), "pass")
    if isinstance(node, ast.Call) and _name(node) in _STATES and node.keywords:
        for number in range(len(node.keywords)):
            fewer = ast.Call(node.func, node.args, node.keywords[:number] + node.keywords[number + 1:])
            yield ("no_field", *_span(node), ast.unparse(fewer))
    body = getattr(node, "body", None)
    for one, other in itertools.pairwise(body) if isinstance(body, list) else ():
        effects = [isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) for statement in (one, other)]
        if all(effects):
            swapped = f"{ast.get_source_segment(source, other)}\n{' ' * one.col_offset}{ast.get_source_segment(source, one)}"
            yield ("swapped", _span(one)[0], _span(other)[1], swapped)


def _span(node: ast.expr | ast.stmt) -> tuple[_Place, _Place]:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _name(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))

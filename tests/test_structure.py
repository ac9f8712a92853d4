"""Limits of the source tree: its size, its small helpers, and the use of private names."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from tests.structure import ROOT, Structure, measure, sources

# the goal of the contraction is 68,000 lines in 450 files, and 80 helpers; a number here may only
# become smaller
MAX_LINES, MAX_FILES = 73_592, 450
MAX_LINES_OF_A_FILE, MAX_FILES_OF_A_FOLDER = 500, 15
# of at most five lines, called once
MAX_SMALL_HELPERS = 67
_PRIVATE = re.compile(r"_[A-Za-z]\w*$")
# of the standard library and of torch, without another name
_PUBLIC_IN_PRACTICE = {"_replace", "_asdict", "_fields", "_make", "_value_", "_name_", "_exit", "_target_",
                       "_C", "_autograd", "_version", "_parameters", "_modules", "_buffers", "_world"}
# modules whose classes complete the abstract pool of slots; nothing else uses its private names
_SLOT_POOL = Path("ngsgd/cluster/slot_pool.py")
_POOLS = {Path("ngsgd/cluster/process_pool.py"), Path("launcher/ray/pool.py"), Path("launcher/ray/metrics.py")}


@functools.cache
def _measured() -> Structure:
    return measure(ROOT)


@functools.cache
def _modules() -> dict[Path, ast.Module]:
    return {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in sources(ROOT)}


def test_the_product_does_not_grow() -> None:
    found = _measured()
    assert 0 < sum(found.file_lines) <= MAX_LINES and len(found.file_lines) <= MAX_FILES
    assert found.short_one_use_private <= MAX_SMALL_HELPERS


def test_files_and_folders_can_be_read() -> None:
    assert not {path for path in sources(ROOT) if len(path.read_text(encoding="utf-8").splitlines()) > MAX_LINES_OF_A_FILE}
    assert not {folder: number for folder, number in _measured().files_per_folder.items() if number > MAX_FILES_OF_A_FOLDER}


def test_constructors_name_their_arguments() -> None:
    """Type checkers and readers see nothing of `**options`."""
    assert not [f"{path}:{node.lineno} {node.name}" for path, module in _modules().items() for node in ast.walk(module)
                if isinstance(node, ast.FunctionDef) and node.args.kwarg
                and node.name == "__init__"]


def _defined(module: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Assign) and "__slots__" in map(ast.unparse, node.targets):
            names |= {str(inner.value) for inner in ast.walk(node.value) if isinstance(inner, ast.Constant)}
    return {name for name in names if _PRIVATE.match(name)} - _PUBLIC_IN_PRACTICE


def test_no_module_uses_private_names_of_another() -> None:
    """Also no subclass those of a base class in another module."""
    own = {path: _defined(module) for path, module in _modules().items()}
    own |= {path: own[path] | own[_SLOT_POOL] for path in _POOLS}
    ours = set().union(*own.values())
    assert not sorted(f"{path}:{node.lineno} {node.attr}" for path, module in _modules().items() for node in ast.walk(module)
                      if isinstance(node, ast.Attribute) and node.attr in ours - own[path])
    assert not sorted(f"{path}:{node.lineno} {alias.name}" for path, module in _modules().items() for node in ast.walk(module)
                      if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ngsgd")
                      for alias in node.names if _PRIVATE.match(alias.name))

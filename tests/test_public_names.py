"""What people import, and what importing costs."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import ngsgd


@pytest.mark.parametrize("name", ngsgd.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(ngsgd, name).__doc__


ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_NAME = re.compile(r"(?<![\w./-])ngsgd(?:\.[A-Za-z_]\w*)+")
_FILE = re.compile(r"\.(?:yaml|toml|md|html|txt|json)$")


def names_in(text: str) -> set[str]:
    return {found for found in _NAME.findall(text) if not _FILE.search(found)}


@pytest.mark.slow
@pytest.mark.entry("R3", "you write `import ngsgd` and then `ngsgd.hypergrad`, `ngsgd.optim` or another package", "works",
                   "all packages are attributes, loaded on first use, and every name that README and docs write resolves")
def test_every_package_is_reachable_from_a_bare_import() -> None:
    packages = sorted({module.name for module in pkgutil.iter_modules(ngsgd.__path__) if module.ispkg} - {"conf", "launcher"})
    assert len(packages) >= 10
    code = "import ngsgd, sys; assert 'torch' not in sys.modules\n" + "\n".join(
        f"assert ngsgd.{name}.__name__ == 'ngsgd.{name}' and '{name}' in dir(ngsgd)" for name in packages)
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.entry("R3")
def test_every_name_in_the_pages_exists() -> None:
    # extending.md makes names, which tests/docs/test_extending.py uses
    wanted = {name: page.name for page in PAGES if page.name != "extending.md"
              for name in names_in(page.read_text(encoding="utf-8"))}
    assert len(wanted) > 30
    missing = []
    for name, page in sorted(wanted.items()):
        try:
            pkgutil.resolve_name(name)
        except (AttributeError, ImportError):
            missing.append(f"{page}: {name}")
    assert missing == []


@pytest.mark.slow
@pytest.mark.entry("R3")
def test_names_in_examples_are_attributes_after_a_bare_import() -> None:
    """Modules that an example imports itself need not be attributes."""
    blocks = [block for page in PAGES
              for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)]
    names = {name for block in blocks if re.search(r"^import ngsgd$", block, re.MULTILINE)
             for name in names_in(re.sub(r"^(?:from|import) ngsgd\..*$", "", block, flags=re.MULTILINE))}
    names |= {"ngsgd.NGSGD", "ngsgd.hypergrad.ReversibleSGD", "ngsgd.hypergrad.hypergradient", "ngsgd.optim.SGD",
              "ngsgd.curvature.collect", "ngsgd.preconditioners.KFAC"}
    code = "import ngsgd\n" + "\n".join(sorted(names))
    subprocess.run([sys.executable, "-c", code], check=True)


def test_completion_shows_public_names_only() -> None:
    packages = [module for module in (ngsgd, *(getattr(ngsgd, name) for name in ngsgd.__all__)) if hasattr(module, "__all__")]
    assert len(packages) > 6
    for module in packages:
        submodules = {one.name for one in pkgutil.iter_modules(module.__path__)}
        shown = {name for name in dir(module) if not name.startswith("__")}
        assert set(module.__all__) <= shown <= {*module.__all__, *submodules}, module


@pytest.mark.parametrize("name", ["KFAC", "collect", "hypergradient", "DatasetTask", "Recognizer", "SGD"])
@pytest.mark.entry("R3")
def test_a_name_of_a_package_is_named_with_its_package(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"ngsgd\.\w+\.{name}"):
        getattr(ngsgd, name)
    with pytest.raises(AttributeError, match="no_such_thing"):
        ngsgd.no_such_thing  # noqa: B018


@pytest.mark.slow
def test_the_library_part_needs_torch_and_numpy_only() -> None:
    code = textwrap.dedent("""
        import sys
        for name in ("ray", "hydra", "omegaconf", "mlflow", "rich", "matplotlib", "safetensors", "psutil", "kaldifst"):
            sys.modules[name] = None          # importing it raises ImportError
        import ngsgd
        assert "torch" not in sys.modules     # lazy
        import torch
        model = torch.nn.Linear(3, 2)
        optimizer = ngsgd.NGSGD(model, lr=0.1)
        torch.nn.functional.cross_entropy(model(torch.randn(5, 3)), torch.zeros(5).long(), reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()
        ngsgd.average_parameters([model.state_dict()] * 2)
        assert "torch._dynamo" not in sys.modules     # takes longer than torch
    """)
    subprocess.run([sys.executable, "-c", code], check=True)

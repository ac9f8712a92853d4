"""docs/extending.md: its changes, made in a copy of the tree, work and pass the tests it names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import FENCE, ROOT
from tests.tiers import HANGS_S

_TEXT = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
_PATH = re.compile(r"# (\S+/\S+\.\w+)\n")
_CHECK = """
import torch, ngsgd
import numpy as np
from ngsgd.data.reader import Minibatch
from ngsgd.launcher.config.compose import compose
from ngsgd.optim.outer import OuterInfo, OuterOptimizer
from ngsgd.optim.outer.rules import make_rule
from ngsgd.tasks.frame_scores import diagnose

config = compose(["outer=median", "optimizer=sign"])
outer = OuterOptimizer(make_rule(config.outer), np.zeros(3, dtype=np.float32))
jobs = [np.full(3, value, dtype=np.float32) for value in (1.0, 2.0, 9.0)]
outer.step(jobs, [1, 1, 1], OuterInfo(outer_iter=0, num_outer_iters=20, num_jobs=3, lr=0.01))
assert outer.eval_model().tolist() == [2.0, 2.0, 2.0]

model = torch.nn.Linear(4, 3)
sign = ngsgd.preconditioners.Sign(model)
sign.evaluate(lambda: torch.nn.functional.cross_entropy(model(torch.ones(2, 4)), torch.tensor([0, 1])))
plain = model.weight.grad.clone()
sign.step()
assert torch.equal(model.weight.grad, plain.sign()) and plain.abs().max() < 1.0

mine = compose(["recipe=mine", "data.source=SOMEWHERE"])
assert (mine.data.corpus, mine.model.kind, mine.model.hidden_dim) == ("kaldi", "tdnn", 128)
# a default of the kind
assert mine.model.normalize == compose(["model=tdnn"]).model.normalize

frames = Minibatch(torch.zeros(5, 4), torch.zeros(5, dtype=torch.long))
with torch.no_grad():
    model.weight.zero_(), model.bias.zero_()
entropy = diagnose(model, frames, frames).figures["entropy"]
assert abs(entropy - np.log(3)) < 1e-6
"""


def _apply(tree: Path, diff: str) -> None:
    """Replace the lines of each hunk, which must stand in the file once."""
    for part in re.split(r"^\+\+\+ ", diff, flags=re.MULTILINE)[1:]:
        name, _, body = part.partition("\n")
        file = tree / name.strip()
        text = file.read_text(encoding="utf-8")
        for hunk in re.split(r"^@@\n", body, flags=re.MULTILINE):
            lines = hunk.splitlines()
            # an empty line of context may have lost its blank
            old = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
            new = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
            assert text.count(old) == 1, f"{name}: {text.count(old)} times\n{old}"
            text = text.replace(old, new)
        file.write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the tree with all changes of the page."""
    tree = tmp_path_factory.mktemp("extended")
    folders = ("ngsgd", "launcher", "conf", "recipes", "tests")
    for name in folders:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tree)
    for language, body in FENCE.findall(_TEXT):
        if language == "diff":
            _apply(tree, body)
        elif path := _PATH.match(body):
            file = tree / path[1]
            assert not file.exists() and file.parent.is_dir(), path[1]
            file.write_text(body[path.end():], encoding="utf-8")
    yield tree
    shutil.rmtree(tree)


def _run(tree: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], cwd=tree, env=environment, capture_output=True,
                          text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_method_is_one_file_of_at_most_60_lines() -> None:
    files = [body for _, body in FENCE.findall(_TEXT) if body.startswith("# ngsgd/preconditioners/methods/")]
    assert len(files) == 2 and all(len(body.splitlines()) - 1 <= 60 for body in files)


@pytest.mark.slow
def test_an_outer_rule_a_preconditioner_a_recipe_and_a_metric_work(extended: Path) -> None:
    _run(extended, "-c", _CHECK)


@pytest.mark.slow
def test_a_command_works_and_is_in_the_help(extended: Path) -> None:
    (extended / "runs" / "mine-1").mkdir(parents=True)
    (extended / "runs" / "mine-1" / "config.yaml").touch()
    assert _run(extended, "-m", "ngsgd", "folders") == "mine-1\n"
    assert "print the run folders" in _run(extended, "-m", "ngsgd", "--help")


@pytest.mark.slow
def test_tests_over_all_kinds_pass_with_the_new_ones(extended: Path) -> None:
    files = ("tests/test_defaults.py", "tests/preconditioners/test_protocol.py",
             "tests/preconditioners/test_new_methods.py",
             "tests/training/test_preconditioned.py", "tests/optim/test_outer.py")
    out = _run(extended, "-m", "pytest", *files, "-v", "-p", "no:cacheprovider",
               "-k", "median or sign or kfac_eigen or exact_damping or rejects_invalid_combinations")
    passed = re.search(r"(\d+) passed", out)
    # at least one test of each file
    assert passed and int(passed[1]) >= len(files), out

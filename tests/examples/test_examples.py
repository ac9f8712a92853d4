"""The scripts of examples/ run, in small, and print what plain torch gives next to them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from tests.tiers import HANGS_S

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_has_at_most_80_lines(script: Path) -> None:
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 80


# arguments at small size -> the largest loss of each line that ends with one; uniform guesses have
# ln(classes)
_SMALL = {
    # 128 characters: 4.85
    "language_model.py": (["2", "1"], 3.0),
    # 10 classes: 2.30
    "image_classification.py": (["2", "2"], 2.0),
    "kfac.py": (["1", "kfac"], 1.5),
    "accelerate_local_sgd.py": (["2"], 1.5),
    # 6 tags: 1.79
    "lstm_tagger.py": (["40"], 1.2),
}
_LOOPS = ("local_sgd.py", "lightning_local_sgd.py", "ray_train_local_sgd.py")
# a corpus on which the sentence of the notebook is still recognized
_FEW = "schedule.num_epochs=1.5 data.train_minutes=10 data.valid_minutes=0.5 data.test_minutes=0.5"


def run(folder: Path, script: str, *arguments: str) -> str:
    path = [str(EXAMPLES.parent)]
    if script.startswith("lightning"):
        (folder / "sitecustomize.py").write_text("import tests.torchvision_operators\n")
        path.append(str(folder))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}
    is_by_torchrun = script.endswith("local_sgd.py") and not script.startswith("ray_")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if is_by_torchrun else []
    done = subprocess.run([sys.executable, *launcher, str(EXAMPLES / script), *arguments], cwd=folder, env=environment,
                          capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("script", _SMALL)
def test_it_trains_and_also_prints_the_loss_of_plain_torch(script: str, tmp_path: Path) -> None:
    arguments, largest = _SMALL[script]
    losses_below(largest, run(tmp_path, script, *arguments))


def losses_below(largest: float, text: str) -> list[str]:
    losses = re.findall(r"valid.loss (\d+\.\d+)$", text, re.MULTILINE)
    # a run of its own ends with a table of its metrics, before the lines of the script
    assert len(losses) >= 2
    assert all(float(loss) < largest for loss in losses), losses
    return losses


@pytest.mark.slow
@pytest.mark.services
@pytest.mark.same_process("ray")
def test_the_loops_of_lightning_and_ray_train_are_the_plain_one(tmp_path: Path) -> None:
    ours = [losses_below(1.5, run(tmp_path, script, "2")) for script in _LOOPS]
    assert ours[0][0] == ours[1][0] == ours[2][0]
    # AdamW with an average every 20 steps, which the plain script compares with DDP
    assert ours[1][1] == ours[2][1] != ours[0][1]


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    notebook: Any = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    nbformat.validate(notebook)
    assert not [cell for cell in notebook.cells if cell.get("outputs")]
    [training] = [cell for cell in notebook.cells if cell.source.startswith("!ngsgd train ")]
    training.source += f" {_FEW}"
    # seconds of one cell
    nbclient.NotebookClient(notebook, timeout=int(HANGS_S), kernel_name="python3",
                            resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    # a notebook keeps each frame of a status line
    assert "%WER" in text and "\x1b[" not in text
    assert text.count("four two nine zero") == 1 and "nine " in text
    losses = dict(re.findall(r"(NGSGD|AdamW): loss (\S+)", text))
    assert float(losses["NGSGD"]) < float(losses["AdamW"]) < 1.0
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2


@pytest.mark.slow
def test_variances_are_those_of_torch(tmp_path: Path) -> None:
    lines = re.findall(r"variance (\S+), torch.func (\S+)", run(tmp_path, "gradient_variance.py"))
    assert len(lines) == 4
    for ours, theirs in lines:
        assert float(ours) == pytest.approx(float(theirs), rel=1e-3)   # four printed digits


@pytest.mark.slow
def test_a_hypergradient_is_the_finite_difference_of_torch(tmp_path: Path) -> None:
    ours, theirs = re.findall(r": (-?\d\.\d{6})$", run(tmp_path, "hypergradient.py"), re.MULTILINE)
    # central difference with a step of 1e-5 in float64
    assert float(ours) == pytest.approx(float(theirs), rel=1e-4)


def test_every_example_is_run() -> None:
    # in tests/exports, which has exported models, and in tests/docs
    elsewhere = {"onnx_recognizer.py", "speak_digits.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*_SMALL, *_LOOPS, *elsewhere, "gradient_variance.py",
                                                             "hypergradient.py"}

"""Python blocks of every page run in their order, and the tutorial runs at small size."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ngsgd.asr.corpora.digits import TOPOLOGY
from ngsgd.launcher.cli import main
from tests.docs.pages import FENCE, PAGES, ROOT, name
from tests.integration.service import TINY
from tests.tiers import HANGS_S

# what a page assumes that its reader has
_LOADER = [(torch.zeros(8, 40), torch.arange(8)) for _ in range(3)]
_GIVEN: dict[str, dict[str, Any]] = {"docs/natural-gradient.md": {"torch": torch, "loader": _LOADER}}
# processes import their script
_SCRIPTS = {"docs/any-model.md", "docs/local-sgd.md", "docs/trackers.md"}
_OF_A_RUN = {"docs/tutorial.md", "docs/transcribe.md", "docs/align.md", "docs/export.md"}
# their own tests run them and check the output
_ELSEWHERE = {"docs/curvature.md", "docs/mlflow.md", "docs/preconditioners.md"}


def python_of(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [body for language, body in FENCE.findall(text) if language == "python"]


def _run(page: str, given: dict[str, Any]) -> None:
    names = {"__name__": "docs", **given}
    for body in python_of(page):
        exec(compile(body, page, "exec"), names)


_WITH_PYTHON = {name(page) for page in PAGES if "```python" in page.read_text(encoding="utf-8")}


@pytest.mark.parametrize("page", sorted(_WITH_PYTHON - _SCRIPTS - _OF_A_RUN - _ELSEWHERE))
def test_python_in_a_page_runs(page: str) -> None:
    _run(page, _GIVEN.get(page, {}))


@pytest.mark.end_to_end
@pytest.mark.parametrize("page", sorted(_SCRIPTS))
def test_a_script_in_a_page_runs(page: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("\n\n".join(python_of(page)), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True,
                          timeout=HANGS_S, check=False)
    assert done.returncode == 0, done.stderr


def _commands(page: str) -> list[list[str]]:
    """Lines of console blocks and indented blocks that start ngsgd or one of the examples."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = [line.strip() for language, body in FENCE.findall(text) if language == "console" for line in body.splitlines()]
    lines += [line.strip() for line in FENCE.sub("", text).splitlines() if line.startswith("    ")]
    words = [shlex.split(line, comments=True) for line in lines if re.match(r"(ngsgd|python examples/speak)", line)]
    # a server, and a verdict on this machine
    return [line for line in words if line[1:2] not in (["ui"], ["doctor"])]


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the tutorial's commands were given, one after another."""
    for module in ("kaldi_decoder", "kaldi_native_fbank", "espeakng_loader", "webrtcvad"):
        pytest.importorskip(module)
    folder = tmp_path_factory.mktemp("tutorial")
    for words in _commands("docs/tutorial.md"):
        _give(words, folder)
    return folder


def _give(words: list[str], folder: Path) -> None:
    with contextlib.chdir(folder):
        if words[0] == "python":
            with mock.patch.object(sys, "argv", words[1:]):
                runpy.run_path(str(ROOT / words[1]), run_name="__main__")
            return
        arguments = words[1:]
        if words[1] == "train":
            arguments = [word for word in words[1:] if word != "data.train_minutes=20"]
            given = {word.partition("=")[0] for word in arguments}
            arguments += ["cluster=in_process", *(one for one in TINY if one.partition("=")[0] not in given)]
        assert main(arguments) == 0, words


@pytest.mark.end_to_end
def test_the_tutorial_runs_at_small_size(tutorial: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (tutorial / "recording.wav").is_file() and (tutorial / "compare.html").is_file()
    assert list(tutorial.glob("runs/first-*/report.html"))
    monkeypatch.chdir(tutorial)
    _run("docs/tutorial.md", {})


@pytest.mark.end_to_end
def test_the_speech_quickstart_of_readme_runs(tutorial: Path) -> None:
    commands = [["first" if word == "RUN" else word for word in words] for words in _commands("README.md")]
    chosen = [words for words in commands if words[0] == "python" or words[1:2] == ["transcribe"]]
    assert len(chosen) == 2
    for words in chosen:
        _give(words, tutorial)


@pytest.mark.end_to_end
def test_python_with_a_trained_model_runs(tutorial: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _give(["ngsgd", "export", "--format", "bundle", "first", "model.ngsgd"], tutorial)
    monkeypatch.chdir(tutorial)
    samples = torch.zeros(16000)
    (tutorial / "names.txt").write_text(f"anna {' '.join(TOPOLOGY.lexicon['one'][0])}\n")
    (tutorial / "names.jsgf").write_text("<name> = anna+;")
    _run("docs/transcribe.md", {"samples": samples, "chunks": samples.split(4000)})
    _run("docs/align.md", {})


@pytest.mark.slow
def test_python_with_an_exported_model_runs(tutorial: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("onnx", "onnxscript", "onnxruntime", "sherpa_onnx"):
        pytest.importorskip(module)
    for kind, output in (("torch", "model.pt2"), ("sherpa-onnx", "FOLDER")):
        _give(["ngsgd", "export", "--format", kind, "first", output], tutorial)
    monkeypatch.chdir(tutorial)
    _run("docs/export.md", {"frames": torch.zeros(1, 20, 40)})

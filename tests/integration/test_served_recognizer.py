"""The logged model of a speech run is a recognizer, which `mlflow models serve` offers by HTTP."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ngsgd.launcher.cli import main
from ngsgd.launcher.mlflow import tracker as mlflow_tracker
from ngsgd.launcher.mlflow.store import read_tracking
from ngsgd.launcher.mlflow.tracker import MlflowTracker
from ngsgd.pipeline import recipe
from ngsgd.pipeline.run import build_run
from ngsgd.pipeline.services import Services
from tests.asr.made_up_speech import write_yesno
from tests.tiers import HANGS_S

for module in ("kaldi_decoder", "kaldi_native_fbank", "kaldialign", "webrtcvad"):
    pytest.importorskip(module)

pytestmark = [pytest.mark.services,
              pytest.mark.filterwarnings("error:.*(Type hint used|Add type hints|input example was not):UserWarning")]
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "mlflow.md"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of yesno that is tracked in a database next to it."""
    root = tmp_path_factory.mktemp("run")
    source = write_yesno(root / "waves_yesno", num_recordings=12)
    config = recipe("yesno", data={"source": str(source)}, output_dir=str(root / "runs"), cluster={"kind": "in_process"},
                    model={"hidden_dim": 32, "num_layers": 1}, schedule={"num_epochs": 2},
                    tracking={"kind": "mlflow"})
    config = replace(config, name="first")
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlflow_tracker, "CLOSE_TIMEOUT_S", HANGS_S)
        services = Services(make_trackers=lambda config, folder: [MlflowTracker(config, folder.path, said.append)])
        trained = build_run(config, services)
        trained.train()
    assert said == []
    return trained.folder.path


@pytest.fixture(scope="module")
def model(run: Path) -> Path:
    """The folder of the logged model."""
    [found] = (run.parent / "mlartifacts").glob("models/*/artifacts")
    return found


def recordings(run: Path) -> list[Path]:
    return sorted((run.parents[1] / "waves_yesno").glob("*.wav"))[:3]


def words_of_the_command(run: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    found = []
    for path in recordings(run):
        assert main(["transcribe", "--quiet", str(run), str(path)]) == 0
        found.append(capsys.readouterr().out.strip())
    assert any(found), "some words are recognized"
    return found


def test_a_served_model_answers_audio_by_http_with_the_words_of_ngsgd_transcribe(
        run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import soundfile

    expected, paths = words_of_the_command(run, capsys), recordings(run)
    tracked = read_tracking(run)
    with served(f"runs:/{tracked['run_id']}/model", tracked["tracking_uri"], tmp_path) as address:
        encoded = [base64.b64encode(path.read_bytes()).decode() for path in paths]
        samples, rates = zip(*(soundfile.read(path) for path in paths), strict=True)
        asked: list[Any] = [
            {"inputs": [{"audio": one} for one in encoded]}, {"dataframe_records": [{"audio": one} for one in encoded]},
            {"dataframe_split": {"columns": ["samples", "sample_rate_hz"],
                                 "data": [[one.tolist(), rate] for one, rate in zip(samples, rates, strict=True)]}},
            {"dataframe_records": [{"samples": one.tolist(), "sample_rate_hz": rate}
                                   for one, rate in zip(samples, rates, strict=True)]},
            # the rate of the model
            {"dataframe_records": [{"samples": one.tolist()} for one in samples]}]
        for request in asked:
            found = post(address, request)["predictions"]
            assert [one["text"] for one in found] == expected, request.keys()
            assert [" ".join(word["word"] for word in one["words"]) for one in found] == expected
            word = next(word for one in found for word in one["words"])
            assert 0.0 <= word["start_s"] < word["end_s"] and 0.0 <= word["confidence"] <= 1.0
        for wrong, named in (({"audio": base64.b64encode(b"no audio").decode()}, "row 0"),
                             ({"samples": [40.0, -3000.0] * 4000}, "32768"), ({"sample_rate_hz": 8000}, "samples"),
                             ({"audio": encoded[0], "samples": [0.0]}, "either")):
            with pytest.raises(urllib.error.HTTPError) as refused:
                post(address, {"dataframe_records": [wrong]})
            assert refused.value.code == 400 and named in refused.value.read().decode()
        # as docs/mlflow.md has it
        [made, sent] = re.findall(r"^(?:\(printf|curl) .*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
        (tmp_path / "recording.wav").write_bytes(paths[0].read_bytes())
        command = f"{made}\n{sent.replace('http://127.0.0.1:5001', address)}"
        answer = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, check=True)
        assert json.loads(answer.stdout)["predictions"][0]["text"] == expected[0]


def test_the_program_of_the_page_prints_the_words(
        run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = words_of_the_command(run, capsys)[0]
    (run.parents[1] / "recording.wav").write_bytes(recordings(run)[0].read_bytes())
    # as a reader would paste it, next to a folder `runs` with a run called first
    monkeypatch.chdir(run.parents[1])
    [block] = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    exec(block, {})
    assert capsys.readouterr().out.startswith(f"{expected} [{{'word': ")


def test_bytes_and_arrays_of_a_program_are_recognized(run: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import mlflow
    import pandas as pd
    import soundfile

    expected, paths = words_of_the_command(run, capsys), recordings(run)
    loaded = mlflow.pyfunc.load_model(str(model))
    as_bytes = loaded.predict(pd.DataFrame({"audio": [path.read_bytes() for path in paths]}))
    assert list(as_bytes["text"]) == expected
    samples, rate = soundfile.read(paths[0])
    assert list(loaded.predict(pd.DataFrame({"samples": [samples], "sample_rate_hz": [float(rate)]}))["text"]) == expected[:1]
    # of another rate than the model
    twice = np.repeat(samples, 2)
    assert loaded.predict(pd.DataFrame({"samples": [twice], "sample_rate_hz": [2.0 * rate]}))["text"][0]


def test_the_requirements_are_those_of_recognition_and_an_index_has_them(model: Path) -> None:
    lines = (model / "requirements.txt").read_text().split()
    pinned = dict(line.split("==") for line in lines)
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*about["dependencies"], *about["optional-dependencies"]["asr"], "mlflow"]
    assert pinned.keys() == {re.split(r"[<>=\[ ]", one)[0] for one in needed}
    local = [line for line in lines if not re.fullmatch(r"[^=]+==[0-9][0-9.]*(?:(?:\.post|rc)[0-9]+)?", line)]
    assert local == [], "a version of one index only"


def test_the_model_works_where_ngsgd_is_not_installed(
        run: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = words_of_the_command(run, capsys)[0]
    script = tmp_path / "elsewhere.py"
    script.write_text("""
import importlib.util, sys
# as an environment of requirements.txt: no folder and no finder has ngsgd
sys.path = [one for one in sys.path if one and not importlib.machinery.PathFinder.find_spec("ngsgd", [one])]
sys.meta_path = [one for one in sys.meta_path if one.__class__ is type and not one.__module__.startswith("__editable__")]
assert importlib.util.find_spec("ngsgd") is None
import mlflow
loaded = mlflow.pyfunc.load_model(sys.argv[1])
import pandas as pd
print(loaded.predict(pd.DataFrame({"audio": [open(sys.argv[2], "rb").read()]}))["text"][0])
import ngsgd
assert "ngsgd-library-" in ngsgd.__file__ and "ngsgd.launcher" not in sys.modules
""")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, str(script), str(model), str(recordings(run)[0])], cwd=tmp_path, env=environment,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == expected


def post(address: str, content: Any) -> Any:
    request = urllib.request.Request(f"{address}/invocations", json.dumps(content).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=HANGS_S) as answer:
        return json.loads(answer.read())


@contextlib.contextmanager
def served(model: str, tracking_uri: str, folder: Path) -> Iterator[str]:
    """`mlflow models serve` on localhost; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "mlflow", "models", "serve", "--model-uri", model, "--env-manager", "local",
             "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    address, log = f"http://127.0.0.1:{port}", folder / "server.log"
    # MLflow starts a program of its environment, as in an activated one
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with log.open("w") as out:
        server = subprocess.Popen(words, stdout=out, stderr=out, start_new_session=True, cwd=folder,
                                  env={**os.environ, "PATH": path, "MLFLOW_TRACKING_URI": tracking_uri})
    try:
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/ping", timeout=3):
                break
            assert server.poll() is None, log.read_text()
            time.sleep(0.3)
        yield address
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()

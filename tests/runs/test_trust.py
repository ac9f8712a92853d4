"""Modules that received runs name are imported only where the user allowed it, or began the run."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ngsgd.config import ModelConfig, RunConfig
from ngsgd.errors import ConfigError
from ngsgd.files import sealed, sha256
from ngsgd.launcher import cli
from ngsgd.launcher.commands import info
from ngsgd.models import build
from ngsgd.pipeline import run as composition
from ngsgd.runs import config_file, trust
from ngsgd.runs.config_file import read_config
from ngsgd.runs.final_model import DIGESTS, open_final, save_final
from ngsgd.runs.run_folder import RunFolder, with_digest
from ngsgd.training.storage.event_log import EventLog
from tests import toy
from tests.launcher.records import final_report, outer_iteration

HELPER = """
from pathlib import Path
from torch import nn
Path(__file__).with_name("EXECUTED").touch()

def Net(num_inputs, num_classes, **sizes):
    return nn.Linear(num_inputs, num_classes)
"""


@pytest.fixture
def attacker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with modules that leave a file when they are imported or called."""
    finished()  # before the record moves to a folder of this test
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(trust, "allowed_modules", set())
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "attacker"
    folder.mkdir()
    for name in ("helper_mod", "hubconf"):
        (folder / f"{name}.py").write_text(HELPER.replace("def Net", "def Net" if name == "helper_mod" else "def made"))
    yield folder
    for name in ("helper_mod", "hubconf"):
        sys.modules.pop(name, None)


GADGETS: dict[str, Callable[[Path], ModelConfig]] = {
    "module": lambda folder: ModelConfig(_target_="helper_mod:Net", search_path=str(folder)),
    "torch.hub": lambda folder: ModelConfig(_target_="torch.hub:load", args={
        "repo_or_dir": str(folder), "model": "made", "source": "local", "trust_repo": True}),
    "hydra": lambda folder: ModelConfig(_target_="hydra.utils:instantiate", args={
        "config": {"_target_": "pathlib.Path.touch", "_args_": [str(folder / "EXECUTED")]}}),
    "eval": lambda folder: ModelConfig(_target_="builtins:eval"),
    "system": lambda folder: ModelConfig(_target_="os:system", args={"command": f"touch {folder}/EXECUTED"}),
}
COMMANDS = (["resume", "RUN"], ["decode", "RUN"], ["decode", "RUN", "--streaming"], ["evaluate", "RUN"],
            ["evaluate", "RUN", "--outer-iter", "1"], ["export", "RUN", "-o", "OUT"], ["align", "--model", "RUN", "-o", "OUT"],
            ["align", "RUN", "absent.wav", __file__],
            ["train", "init_model=RUN", "output_dir=OUT", "cluster=in_process"])
READERS = (["report", "RUN"], ["status", "RUN"], ["info", "RUN"], ["logs", "RUN"], ["stop", "RUN"], ["compare", "RUN"])


def name_of(value: list[str] | str) -> str:
    return value if isinstance(value, str) else " ".join(value)


@functools.cache
def finished() -> Path:
    """A folder with a final model, made once."""
    folder = Path(tempfile.mkdtemp(dir=os.environ["XDG_STATE_HOME"]))
    small = toy.Run(folder, toy.config())
    save_final(RunFolder(folder), toy.config(), small.model.eval(), small.reader)
    # with its examples, a report would build the model to measure the Fisher factors
    RunFolder(folder).data.write_text(json.dumps({"digest": "", "egs": str(small.egs)}))
    return folder


def make_run(folder: Path, model: ModelConfig, config: RunConfig | None = None) -> Path:
    """A run that has ended, whose config.yaml and final model both name the module."""
    config = replace(config or toy.config(), data=replace(toy.config().data, corpus="kaldi", source="nowhere"),
                     tracking=replace(toy.config().tracking, kind="none"))
    shutil.copytree(finished(), folder)
    about = json.loads((folder / "final" / "model.json").read_text())
    seal(folder / "final", {**about, "model": asdict(model)})
    (folder / "config.yaml").write_text(with_digest(config_file.to_yaml(replace(config, model=model))))
    log = EventLog(folder / "events.jsonl")
    log.outer_iteration(outer_iteration())
    log.finished(final_report())
    log.close("FINISHED")
    (folder / "decode").mkdir()
    (folder / "decode" / "wer.json").write_text(json.dumps({"valid": {}, "test": {}, "test_interval_95": {"low": 1, "high": 2},
                                                            "word_penalty": 0.0, "acoustic_scale": 0.1}))
    return folder


def seal(final: Path, about: dict[str, Any]) -> None:
    """What an attacker can do as well: a changed file, and all digests right."""
    (final / "model.json").write_text(json.dumps(about))
    digests = {file.name: sha256(file) for file in final.iterdir() if file.name != DIGESTS}
    (final / DIGESTS).write_text(json.dumps(sealed("final model", digests)))


def call(words: list[str], run: Path) -> int:
    return cli.main([word.replace("RUN", str(run)).replace("OUT", str(run.parent / "out")) for word in words])


# every command asks the same function, whatever the module
@pytest.mark.parametrize(("words", "gadget"), [*((words, "module") for words in COMMANDS),
                                               *((COMMANDS[1], gadget) for gadget in list(GADGETS)[1:])], ids=name_of)
def test_a_received_run_executes_nothing(attacker: Path, tmp_path: Path, words: list[str], gadget: str,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    model = GADGETS[gadget](attacker)
    run = make_run(tmp_path / "received", model)
    before = list(sys.path)
    assert call(words, run) == ConfigError.exit_code
    said = capsys.readouterr().err
    assert said.count("ngsgd: ") == 1 and model._target_ in said and "--trust" in said and str(run) in said
    assert not (attacker / "EXECUTED").exists()
    assert "helper_mod" not in sys.modules and sys.path == before


@pytest.mark.slow
@pytest.mark.parametrize(("words", "gadget"), [*((words, "module") for words in READERS),
                                               *((words, gadget) for words in READERS[-2:] for gadget in list(GADGETS)[1:])],
                         ids=name_of)
def test_commands_that_only_read_never_execute(attacker: Path, tmp_path: Path, words: list[str], gadget: str) -> None:
    run = make_run(tmp_path / "received", GADGETS[gadget](attacker))
    trust.allow(GADGETS[gadget](attacker))  # not even then
    assert call(words, run) == 0
    assert not (attacker / "EXECUTED").exists()


@pytest.mark.parametrize("gadget", ["module", "torch.hub"])
@pytest.mark.parametrize("words", [words for words in COMMANDS if (words[0] not in ("resume", "train") and len(words) < 4)
                                   or words[0] == "export"], ids=" ".join)
def test_with_trust_the_module_is_imported(attacker: Path, tmp_path: Path, words: list[str], gadget: str) -> None:
    run = make_run(tmp_path / "received", GADGETS[gadget](attacker))
    call([*words, "--trust"], run)  # fails later, as this run has no data
    assert (attacker / "EXECUTED").exists()


def without_data(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Runs that would be trained, after their module was imported; no data is made."""
    ran: list[RunConfig] = []
    monkeypatch.setattr(composition, "require_model", lambda config, *_: config.model._target_ and build.find_custom(config.model))
    monkeypatch.setattr(composition, "EgsReader", lambda *_: None)

    def train(run: composition.Run) -> Any:
        if run.config.model._target_:
            build.find_custom(run.config.model)
        ran.append(run.config)
        return final_report()

    @dataclass
    class Data:
        egs_directory: str = ""
        rungs: tuple[str, ...] = ()
    monkeypatch.setattr(composition, "prepare", lambda *_, **__: Data())
    monkeypatch.setattr(composition.Run, "train", train)
    return ran


def test_resume_with_trust(attacker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = without_data(monkeypatch)
    run = make_run(tmp_path / "received", GADGETS["module"](attacker))
    assert call(["resume", "RUN"], run) == 2
    assert call(["resume", "RUN", "--trust"], run) == 0
    assert len(ran) == 1 and (attacker / "EXECUTED").exists()


WORDS = ["train", "name=mine", "output_dir=runs", "cluster=in_process", "tracking.kind=none", "model._target_=helper_mod:Net"]


def begin(attacker: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> Path:
    """A run that the user begins in the folder with the module."""
    monkeypatch.chdir(attacker)
    assert cli.main([*WORDS, *more]) == 0
    (run,) = (attacker / "runs").glob("mine-*")
    monkeypatch.setattr(trust, "allowed_modules", set())  # as in a new process
    return run


@pytest.mark.slow
def test_ones_own_run_resumes_without_the_flag_but_not_with_other_settings(
        attacker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = without_data(monkeypatch)
    run = begin(attacker, monkeypatch)
    assert (tmp_path / "state" / "ngsgd" / "trusted.json").stat().st_mode & 0o777 == 0o600
    moved = shutil.move(run, tmp_path / "moved")
    assert cli.main(["resume", str(moved)]) == 0
    assert len(ran) == 2
    for change in ({"_target_": "os:system"}, {"search_path": str(tmp_path)}, {"args": {"x": 1}}):
        changed = read_config(Path(moved) / "config.yaml")
        other = replace(changed, model=replace(changed.model, **change))
        (Path(moved) / "config.yaml").write_text(with_digest(config_file.to_yaml(other)))
        assert cli.main(["resume", "--accept-changed-config", str(moved)]) == 2
        (Path(moved) / "config.yaml").write_text(with_digest(config_file.to_yaml(changed)))
        monkeypatch.setattr(trust, "allowed_modules", set())
    assert len(ran) == 2


def test_the_final_model_of_an_own_run_opens_anywhere(attacker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As MLflow stores it: a copy of final/ without the rest of the run."""
    model = GADGETS["module"](attacker)
    final = make_run(tmp_path / "run", model) / "final"
    about = json.loads((final / "model.json").read_text())
    trust.remember(model, "0123")
    seal(final, {**about, "run_id": "4567"})
    with pytest.raises(ConfigError):
        open_final(final)
    seal(final, {**about, "run_id": "0123"})
    # imported; the parameters are another model's
    with pytest.raises(Exception, match="state_dict"):
        open_final(final)


@pytest.mark.parametrize("record", ["mode", "damaged", "list", "missing"])
def test_a_record_that_others_could_have_written_is_ignored(
        attacker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: str) -> None:
    ran = without_data(monkeypatch)
    run = begin(attacker, monkeypatch)
    path = tmp_path / "state" / "ngsgd" / "trusted.json"
    if record == "mode":
        path.chmod(0o666)
    elif record == "missing":
        path.unlink()
    else:
        path.write_text({"damaged": '{"a', "list": "[]"}[record])
    assert cli.main(["resume", str(run)]) == 2
    assert len(ran) == 1


def test_a_home_that_cannot_be_written_is_reported_and_training_continues(
        attacker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "state").touch()
    ran = without_data(monkeypatch)
    begin(attacker, monkeypatch)
    assert len(ran) == 1
    assert "--trust" in capsys.readouterr().out


@pytest.mark.slow
def test_continue_takes_the_module_from_the_command_line(attacker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a job that was queued again on a machine with another home."""
    ran = without_data(monkeypatch)
    begin(attacker, monkeypatch)
    shutil.rmtree(tmp_path / "state")
    assert cli.main([*WORDS, "--continue"]) == 0
    assert len(ran) == 2
    monkeypatch.setattr(trust, "allowed_modules", set())
    assert cli.main([word for word in WORDS if "_target_" not in word] + ["--continue"]) == 2
    assert cli.main([*WORDS, "--continue", "model.args={hidden: 3}"]) == 2
    assert cli.main([*WORDS, "--continue", "model.args={hidden: 3}", "--trust"]) == 0
    assert len(ran) == 3


@pytest.mark.slow
def test_a_model_to_start_from_takes_the_module_from_the_command_line(
        attacker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = without_data(monkeypatch)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run = make_run(tmp_path / "received", ModelConfig(_target_="helper_mod:Net", search_path=str(elsewhere), args={"x": 1}))
    words = [word for word in WORDS if "_target_" not in word] + [f"init_model={run}"]
    monkeypatch.chdir(attacker)
    assert cli.main(words) == 2
    assert cli.main([*words, "model._target_=helper_mod:Net"]) == 0
    assert len(ran) == 1
    (begun,) = (attacker / "runs").glob("mine-*")
    # the module of the command line, without the received arguments
    with pytest.raises(Exception, match="state_dict"):
        open_final(begun / "init", own=ran[0].model)
    assert cli.main([*words, "--trust"]) == 0


def test_the_environment_allows_it_in_python(attacker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = make_run(tmp_path / "received", GADGETS["module"](attacker)) / "final"
    with pytest.raises(ConfigError):
        open_final(final)
    monkeypatch.setenv("NGSGD_TRUST", "1")
    with pytest.raises(Exception, match="state_dict"):
        open_final(final)
    assert (attacker / "EXECUTED").exists()


def test_a_folder_of_modules_is_never_in_front_of_installed_packages(attacker: Path) -> None:
    (attacker / "colorsys.py").write_text("raise SystemExit('the wrong one')")
    sys.modules.pop("colorsys", None)
    build.find_custom(GADGETS["module"](attacker))
    assert sys.path[-1] == str(attacker)
    import colorsys
    assert os.path.dirname(colorsys.__file__) != str(attacker)


def test_tuned_settings_name_no_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tuned.yaml").write_text("model: {_target_: 'os:system'}\n")
    assert cli.main(["train", f"+tuned={tmp_path / 'tuned.yaml'}", "--cfg", "job"]) == 2
    assert "model._target_" in capsys.readouterr().err


def test_info_shows_a_received_run(attacker: Path, tmp_path: Path) -> None:
    assert info.state_of(make_run(tmp_path / "received", GADGETS["module"](attacker)))["is_finished"]

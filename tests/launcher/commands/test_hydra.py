"""What a Hydra user types has its usual effect, or is one error that names the alternative."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ngsgd.config import RunConfig
from ngsgd.config.build import flatten
from ngsgd.errors import ConfigError
from ngsgd.launcher.config import compose
from ngsgd.launcher.config.sources import OURS, Sources
from ngsgd.runs import trust
from tests.launcher.commands.test_cli import ROOT, Service, service
from tests.launcher.config.test_compose import problems_of
from tests.launcher.records import Command

__all__ = ["service"]

GLOBAL = "# @package _global_\n"


def written(folder: Path, **files: str) -> Sources:
    """A folder of --config-dir; names of files have __ for /."""
    for name, text in files.items():
        file = folder / f"{name.replace('__', '/')}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return Sources(folder)


# Printing -----------------------------------------------------------------------------------------


@pytest.mark.entry("H1", "`--cfg job`, `--cfg all`, `--resolve`", "works", "prints the composed settings, after the same checks as "
                   "a run")
@pytest.mark.entry("H2", "`--cfg job -p optimizer`", "works", "prints one package")
@pytest.mark.entry("H3", "`--cfg hydra`", "works", "prints the node of Hydra")
def test_settings_are_printed(command: Command) -> None:
    job = yaml.safe_load(command("train", "--cfg", "job", "--resolve", "seed=3").out)
    assert (job["seed"], "hydra" in job) == (3, False)
    assert yaml.safe_load(command("train", "--cfg", "job", "-p", "optimizer").out)["kind"] == "ngsgd"
    assert [*yaml.safe_load(command("train", "--cfg", "hydra").out)] == ["hydra"]
    assert {"hydra", "seed"} <= {*yaml.safe_load(command("train", "--cfg", "all").out)}
    assert "schedule.num_epochs" in command("train", "--cfg", "job", "schedule.num_epochs=x", code=2).err


@pytest.mark.entry("H4", "`--info defaults`, `--info defaults-tree`, `--info searchpath`", "works", "print the defaults list, its "
                   "tree, and the folders, with those of `--config-dir`")
@pytest.mark.entry("H5", "`--info plugins`", "works", "lists launchers and sweepers that are installed")
@pytest.mark.entry("H6", "`--hydra-help`", "works", "prints Hydra's help, with the flags of `ngsgd train`")
@pytest.mark.entry("H7", "`--help optimizer`", "works", "prints the choices and settings of a group")
def test_information_is_printed(tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert "recipe/digits" in command("train", "--info", "defaults").out
    assert "BasicLauncher" in command("train", "--info", "plugins").out
    assert str(tmp_path) in command("train", "--info", "searchpath", "-cd", str(tmp_path)).out
    printed_text = command("train", "--hydra-help").out
    assert "hydra/launcher" in printed_text and "--experimental-rerun" in printed_text
    assert "optimizer=adamw" in command("train", "--help", "optimizer").out


@pytest.mark.entry("H20", "`-m --cfg job`", "works", "prints the settings of every run of the sweep, as YAML documents; "
                   "Hydra itself refuses it")
def test_settings_of_a_sweep_are_printed(command: Command) -> None:
    found = [*yaml.safe_load_all(command("train", "-m", "--cfg", "job", "seed=1,2", "name=r${hydra.job.num}", "--resolve").out)]
    assert [(one["seed"], one["name"]) for one in found] == [(1, "r0"), (2, "r1")]


@pytest.mark.entry("H22", "`-sc install=bash`", "works", "prints the script of `ngsgd completion bash`, for eval")
def test_completion_is_installed_as_hydra_users_do(command: Command) -> None:
    assert command("train", "-sc", "install=bash").out == command("completion", "bash").out != ""
    assert "ngsgd completion" in command("train", "-sc", "uninstall=bash", code=2).err


# Values and mistakes ------------------------------------------------------------------------------


@pytest.mark.entry("H8", "`name='run-${now:%Y}'`, `${oc.env:HOME}`, `${hydra.job.name}`", "works", "Hydra's resolvers and node are "
                   "available in settings")
@pytest.mark.entry("H10", "a group twice, such as `optimizer=sgd optimizer=adam`", "works", "the last choice counts")
@pytest.mark.entry("H14", "`++seed=3`, `++optimizer=sgd`, `+model.args.width=64`", "works", "`++` of a setting or group is "
                   "`seed=3`; names in mappings, such as `model.args`, are added with `+` or `++` and deleted with `~`")
def test_values_are_those_of_hydra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHO", "me")
    names = compose.compose(["name='${oc.env:WHO}-${now:%Y}-${hydra.job.name}'"]).name.split("-")
    assert names[0] == "me" and len(names[1]) == 4 and names[2] == "ngsgd"
    assert compose.compose(["optimizer=sgd", "optimizer=adam"]).optimizer.kind == "adam"
    forced = compose.compose(["++seed=3", "++optimizer.kind=sgd", "++cluster.num_workers=3", "++schedule={num_epochs: 2}"])
    assert (forced.seed, forced.optimizer.kind, forced.schedule.num_epochs) == (3, "sgd", 2.0)
    assert forced.schedule.num_jobs_final == 3
    module = ["model._target_=nets:Net", "+model.args.width=64", "++model.args.depth=2", "++model.args.width=32"]
    assert compose.compose(module).model.args == {"width": 32, "depth": 2}
    assert compose.compose([*module, "~model.args.depth"]).model.args == {"width": 32}


@pytest.mark.entry("H9", "an interpolation that cannot be resolved", "error",
                   "names the setting and the interpolation")
@pytest.mark.entry("H11", "several mistakes", "error", "all of them, one per line")
@pytest.mark.entry("H12", "a key that is nearly a setting, also with `+` and `++`", "error", "names the setting that is meant, "
                   "with the value")
@pytest.mark.entry("H13", "`seed=1,2` without `-m`", "error", "names `--multirun`")
def test_mistakes_are_named() -> None:
    assert "${no.such}" in problems_of("seed=${no.such}")[0]
    assert len(problems_of("optimizer=adma", "++model.fo=1", "schedule.num_epochs=abc", "+x=1")) == 4
    for mark in ("", "+", "++"):
        assert "schedule.lr_initial=" in problems_of(f"{mark}optimizer.lr=0.1")[0]
    assert "--multirun" in problems_of("seed=1,2")[0]
    assert "optimizer.args" in problems_of("optimizer._target_=torch.optim.SGD", "+optimizer.nesterov=true")[0]


# Files --------------------------------------------------------------------------------------------


@pytest.mark.entry("H15", "`+experiment=mine` with `experiment/mine.yaml` and `# @package _global_` in conf/ or `--config-dir`",
                   "works", "also as `experiment=mine`, in subfolders, and with `override /model: tdnn` in its defaults list; "
                   "settings and groups of the command line take precedence")
def test_an_experiment_sets_anything_below_the_command_line(tmp_path: Path) -> None:
    sources = written(tmp_path, experiment__mine=f"{GLOBAL}defaults:\n  - override /model: tdnn\n  - _self_\nseed: 5\n"
                      "optimizer: {kind: adam, momentum: 0.1}\naugment: {noise: true}\n",
                      experiment__asr__deep=f"{GLOBAL}seed: 6\n")
    for line in ("+experiment=mine", "experiment=mine", "++experiment=mine"):
        found = compose.compose([line], sources)
        assert (found.seed, found.model.kind, found.optimizer.kind, found.augment.noise) == (5, "tdnn", "adam", True)
    found = compose.compose(["+experiment=mine", "seed=1", "optimizer=sgd", "model=relu", "augment=none"], sources)
    assert (found.seed, found.model.kind, found.optimizer.kind, found.augment.noise) == (1, "relu", "sgd", False)
    assert found.optimizer.momentum == 0.1
    assert compose.compose(["experiment/asr=deep"], sources).seed == 6 == compose.compose(["+experiment=asr/deep"], sources).seed
    lines = compose.normalized(["+experiment=mine", "optimizer=sgd,kfac"], sources)
    assert [job.config.optimizer.kind for job in compose.jobs_of_sweep(lines, sources)] == ["sgd", "kfac"]
    [problem] = problems_of("+experiment=none", sources=sources)
    assert "mine" in problem


@pytest.mark.entry("H16", "`--config-name mine`, `-cn mine`", "works", "a primary config of `--config-dir`, `--config-path` or "
                   "conf/. With a defaults list it begins with `- ngsgd`; without one it is used like a recipe")
@pytest.mark.entry("H17", "`--config-path DIR`, `-cp DIR`", "works", "the folder of the primary config, `config` by default, from "
                   "the current folder; ngsgd's own groups stay available")
def test_a_primary_config_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: Service, command: Command) -> None:
    listed = "defaults:\n  - ngsgd\n  - _self_\n  - override recipe: fsdd\nseed: 4\noptimizer: {kind: adam}\n"
    written(tmp_path / "d", mine=listed, plain="seed: 7\noptimizer: {kind: adam}\n", config="seed: 8\n",
            lacking="defaults:\n  - _self_\n")
    monkeypatch.chdir(tmp_path)
    for flags in (["-cd", "d", "-cn", "mine"], ["--config-dir=d", "--config-name=mine.yaml"], ["-cp", "d", "-cn", "mine"]):
        command("train", *flags, "model=pnorm")
        found = service.trained.pop()
        assert (found.seed, found.data.corpus, found.optimizer.kind, found.model.kind) == (4, "fsdd", "adam", "pnorm")
    for name, seed in (("plain", 7), ("", 8)):
        sources = Sources(path=Path("d"), name=name)
        chosen = compose.compose(["optimizer=sgd", "recipe=yesno", "data.source=x"], sources)
        assert (chosen.seed, chosen.optimizer.kind, chosen.data.corpus) == (seed, "sgd", "yesno")
    assert compose.compose(["optimizer=sgd"], Sources(Path("d"), name="mine")).optimizer.kind == "sgd"
    assert "- ngsgd" in problems_of(sources=Sources(Path("d"), name="lacking"))[0]
    assert "none.yaml" in command("train", "-cn", "none", code=2).err
    assert "--config-path none" in command("train", "-cp", "none", code=2).err
    assert compose.compose([], OURS).seed == 0


@pytest.mark.entry("H23", "`~augment`, `~recipe`", "works", "`~augment` is `augment=none`, which switches off all of a recipe; "
                   "`~recipe` leaves the defaults. A group of kinds cannot be deleted: the error names the group")
def test_groups_are_deleted(tmp_path: Path) -> None:
    assert compose.compose(["recipe=digits_robust"]).augment.changes_audio
    assert compose.compose(["recipe=digits_robust", "~augment"]) == compose.compose(["recipe=digits_robust", "augment=none"])
    assert not compose.compose(["recipe=digits_robust", "~augment"]).augment.changes_audio
    assert flatten(compose.compose(["~recipe"])) == flatten(compose.compose([]))
    for line in ("~optimizer", "~seed", "~nothing"):
        assert len(problems_of(line)) == 1
    assert len(problems_of("~experiment", sources=written(tmp_path, experiment__a=GLOBAL))) == 1


# Jobs ---------------------------------------------------------------------------------------------


@pytest.mark.entry("H18", "`hydra.run.dir=DIR`, in sweeps `hydra.sweep.dir` and `hydra.sweep.subdir`", "works", "the folder of the "
                   "run instead of `output_dir/NAME-TIME`; it must be empty")
@pytest.mark.entry("H19", "`.hydra/` of a run, and `--experimental-rerun RUN`", "works",
                   "`RUN/.hydra` has config.yaml, hydra.yaml and overrides.yaml without passwords, unless "
                   "`hydra.output_subdir=null`. `--experimental-rerun RUN` (or `-cp RUN/.hydra`) begins a run with these "
                   "settings, from the YAML and never from a pickle; more settings may follow. "
                   "Modules need `--trust` if another user made the run")
def test_the_folder_of_a_run_and_its_rerun(tmp_path: Path, service: Service, command: Command,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    command("train", "seed=3", "cluster.num_workers=3", "tracking.uri=https://me:secret@host/x", f"hydra.run.dir={tmp_path}/a/b")
    [place] = service.places
    assert place.path == tmp_path / "a" / "b" and place.path.is_dir()
    assert sorted(place.files) == [".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml"]
    assert not [name for name, text in place.files.items() if "secret" in text]
    assert "seed=3" in yaml.safe_load(place.files[".hydra/overrides.yaml"])
    assert not (place.path / ".hydra").exists() and not (tmp_path / ".hydra").exists()
    for name, text in {**place.files, "config.yaml": "", "run_id": "x"}.items():
        (place.path / name).parent.mkdir(exist_ok=True)
        (place.path / name).write_text(text)
    assert "not empty" in command("train", f"hydra.run.dir={place.path}", code=2).err
    for again in ("", "/.hydra", "/.hydra/config.pickle"):
        command("train", "--experimental-rerun", f"{place.path}{again}", "tracking.uri=''", "optimizer=sgd",
                "cluster.num_workers=2")
        found = service.trained.pop()
        assert (found.seed, found.optimizer.kind, found.schedule.num_jobs_final) == (3, "sgd", 2)
    assert service.places[-1].path is None
    command("train", "-cp", f"{place.path}/.hydra", "tracking.uri=''", "hydra.output_subdir=null")
    assert service.trained.pop().seed == 3 and not service.places[-1].files
    for wrong in ("hydra.output_subdir=x", "hydra.job.chdir=true"):
        assert wrong.partition("=")[0] in command("train", wrong, code=2).err
    # of another user, and with code of Hydra
    monkeypatch.setattr(trust, "allowed_modules", set())
    (place.path / ".hydra" / "config.yaml").write_text("model: {_target_: 'nets:Net'}\n")
    trained = len(service.trained)
    assert "--trust" in command("train", "--experimental-rerun", str(place.path), code=2).err
    (place.path / ".hydra" / "config.yaml").write_text("hydra: {callbacks: {a: {_target_: os.abort}}}\n")
    command("train", "--experimental-rerun", str(place.path), code=2)
    assert len(service.trained) == trained


def test_runs_of_a_sweep_have_their_folders(tmp_path: Path, service: Service, command: Command) -> None:
    command("train", "-m", "seed=1,2", f"hydra.sweep.dir={tmp_path}/s", "hydra.sweep.subdir=${hydra.job.num}")
    assert [place.path for place in service.places] == [tmp_path / "s" / "0", tmp_path / "s" / "1"]
    assert all("seed=" in place.files[".hydra/overrides.yaml"] for place in service.places)
    assert not list((tmp_path / "s").glob("*/.hydra"))
    command("train", "-m", "seed=1,2", f"hydra.sweep.dir={tmp_path}/t")
    assert service.places[-1].path is None


@pytest.mark.entry("H21", "`--run`, `-r`", "works", "runs once, which is the default")
def test_a_run_and_one_command_only(service: Service, command: Command) -> None:
    command("train", "--run", "seed=2")
    assert service.trained[0].seed == 2
    for flags in (["--run", "-m"], ["--cfg", "job", "--info"], ["-m", "--info"]):
        assert "only one" in command("train", *flags, code=2).err


@pytest.mark.entry("H24", "`hydra/launcher=ray`", "error", "hydra-ray-launcher needs another Ray; the error names `cluster=ray` "
                   "with a launcher of runs, such as `hydra/launcher=joblib`")
def test_a_launcher_that_is_not_there_names_the_others(command: Command) -> None:
    printed_text = command("train", "-m", "hydra/launcher=ray", "seed=1,2", code=2).err
    assert "cluster=ray" in printed_text and "hydra/launcher=joblib" in printed_text
    assert "basic" in command("train", "hydra/launcher=nothing", code=2).err


LOGGING = """
import logging, sys
from pathlib import Path
from types import SimpleNamespace
from ngsgd.launcher import cli, commands
def train(*_, **__):
    logging.getLogger("mine").debug("a detail")
    logging.getLogger("mine").info("a fact")
    raise SystemExit(0)
module = type(sys)("ngsgd.launcher.commands.train")
module.train = train
sys.modules["ngsgd.launcher.commands.train"] = commands.train = module
cli.main(sys.argv[1:])
"""


@pytest.mark.entry("H25", "`hydra/job_logging=default`, `stdout` or an own file", "works",
                   "messages of Python's logging, such as those of a custom module, "
                   "go to the terminal, and with `default` to a file in `hydra.run.dir`; the lines of ngsgd "
                   "are no log messages. The default is `disabled`")
@pytest.mark.entry("H26", "`hydra.verbose=true`, `hydra.verbose=[NAME]`", "works", "sets the level DEBUG, and shows the messages "
                   "on the terminal unless `hydra/job_logging` is given")
@pytest.mark.parametrize(("words", "printed", "logged"), [
    ([], "", ""), (["hydra/job_logging=stdout"], "a fact", ""), (["hydra.verbose=[mine]"], "a detail\na fact", ""),
    (["hydra/job_logging=default", "hydra.run.dir=here"], "a fact", "a fact")])
def test_messages_are_logged(words: list[str], printed: str, logged: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LOGGING, "train", *words], cwd=tmp_path, capture_output=True, text=True,
                          check=False, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert all(line in done.stdout for line in printed.splitlines()) and bool(printed) == bool(done.stdout), done.stderr
    logs = "".join(file.read_text() for file in tmp_path.rglob("*.log"))
    assert logged in logs and bool(logged) == bool(logs)


def test_a_run_is_composed_once(service: Service, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra._internal.config_loader_impl import ConfigLoaderImpl

    made: list[object] = []
    original = ConfigLoaderImpl.load_configuration

    def counted(self: ConfigLoaderImpl, *args: object, **given: object) -> object:
        made.append(args)
        return original(self, *args, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", counted)
    for words in ([], ["--cfg", "job"]):
        made.clear()
        command("train", "optimizer=adam", *words)
        assert len(made) == 1
    assert service.trained[0].optimizer.kind == "adam"


def test_a_file_may_ask_for_a_sweep(tmp_path: Path, service: Service, command: Command) -> None:
    written(tmp_path / "d", experiment__three=f"{GLOBAL}hydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      seed: 1,2,3\n")
    command("train", "-cd", str(tmp_path / "d"), "+experiment=three", f"output_dir={tmp_path}/runs")
    assert [config.seed for config in service.trained] == [1, 2, 3]


def test_defaults_without_flags_are_those_of_the_schema() -> None:
    assert compose.compose([], Sources(name="ngsgd")) == compose.compose([])
    assert isinstance(compose.compose([]), RunConfig)
    with pytest.raises(ConfigError):
        Sources(name="config").primary()

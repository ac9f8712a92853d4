"""The `ngsgd` command: exit codes, one message per mistake, nothing heavy imported or written."""

from __future__ import annotations

import errno
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from ngsgd import errors
from ngsgd.config import RunConfig
from ngsgd.errors import ClusterError, ConfigError, DataError, NgsgdError
from ngsgd.launcher import cli
from ngsgd.launcher.config import compose, describe
from ngsgd.launcher.registry import COMMANDS
from ngsgd.runs.run_folder import Place, RunFolder, find_run
from ngsgd.training.records import FinalReport
from tests.launcher.records import Command, final_report

ROOT = Path(__file__).resolve().parents[3]


class Service(ModuleType):
    """Stands in for ngsgd.launcher.commands.train."""

    def __init__(self) -> None:
        super().__init__("ngsgd.launcher.commands.train")
        self.trained: list[RunConfig] = []
        self.places: list[Place] = []
        self.allowed: list[bool] = []
        self.runs: list[tuple[str, Path, bool]] = []
        self.error: BaseException | None = None

    def train(self, config: RunConfig, quiet: bool, *, place: Place, allow_other_bits: bool = False, **_: object) -> FinalReport:
        self.trained.append(config)
        self.places.append(place)
        self.allowed.append(allow_other_bits)
        if self.error is not None:
            raise self.error
        return final_report()

    def resume(self, run_dir: Path, quiet: bool, address: str | None, num_workers: int | None, *,
               allow_other_bits: bool = False, **_: object) -> int:
        self.allowed.append(allow_other_bits)
        self.runs.append(("resume" + (f" at {address} with {num_workers}" if address else ""), run_dir, quiet))
        return 0

    def open_run(self, run_dir: Path, quiet: bool, **_: object) -> SimpleNamespace:
        self.runs.append(("decode", run_dir, quiet))
        return SimpleNamespace(decode=lambda trust: SimpleNamespace(valid="", test=""),
                               services=SimpleNamespace(report=lambda line: None))


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Service:
    fake = Service()
    monkeypatch.setitem(sys.modules, "ngsgd.launcher.commands.train", fake)
    from ngsgd.launcher import commands

    monkeypatch.setattr(commands, "train", fake, raising=False)
    monkeypatch.chdir(tmp_path)
    return fake


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([command.name, "--help"] for command in COMMANDS)],
                         ids=lambda arguments: arguments[0])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = ("import sys; from ngsgd.launcher.cli import main; code = main(sys.argv[1:]); "
            # the defaults of a simulated cluster are made with numpy, which costs 0.1 s
            "light = {'numpy'} if sys.argv[1] == 'simulate' else set(); "
            "heavy = {'torch', 'ray', 'mlflow', 'hydra', 'omegaconf', 'numpy', 'rich', 'yaml'} & set(sys.modules) - light; "
            "sys.exit(f'imported {heavy}' if heavy else code)")
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ngsgd" in done.stdout


def test_train_help_lists_groups_settings_and_units(command: Command) -> None:
    text = command("train", "--help").out
    assert "adam | adamw" in text
    assert "schedule.lr_initial" in text
    [lr] = [one for one in describe.options() if one.path == "schedule.lr_initial"]
    assert lr.about in " ".join(text.split())
    assert "--cfg job" in text


@pytest.mark.parametrize("columns", ["80", "100", "200"])
def test_columns_of_the_help_of_train_do_not_collide(columns: str, monkeypatch: pytest.MonkeyPatch,
                                                     command: Command) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = command("train", "--help").out
    lists = text[text.index("Groups ("):text.index("Flags:")].splitlines()
    assert max(map(len, lists)) <= min(int(columns), 100)
    for group, choices in compose.groups().items():
        assert re.search(rf"^  {group}= +{choices[0]}( |$)", text, re.MULTILINE), group
    joined = " ".join(text.split())
    for group, default in (("model", "relu"), ("outer", "bmuf"), ("optimizer", "ngsgd"), ("recipe", "digits")):
        assert f"{' | '.join(compose.groups()[group])} (default {default})" in joined


@pytest.mark.parametrize(("words", "same"), [
    ([], ["--help"]), (["help"], ["--help"]), (["-h", "train"], ["train", "-h"]), (["help", "resume"], ["resume", "--help"]),
    (["help", "train", "outer"], ["train", "--help", "outer"])], ids=" ".join)
def test_help_can_be_asked_for_in_several_ways(words: list[str], same: list[str], command: Command) -> None:
    first = command(*words)
    assert command(*same).out == first.out != ""
    assert first.err == ""


BAD_INPUTS = [(["train", "+foo=1"], "foo"), (["train", "name=[1"], "name=[1"),
              (["train", "-m", "seed=1,x"], "seed is 'x'"), (["train", "--nope"], "--nope"),
              (["train", "--cfg", "nope"], "invalid choice: 'nope'"),
              (["train", "--config-dir", "none"], "--config-dir none"),
              (["train", "--resolve"], "--resolve goes with --cfg"),
              (["train", "-m", "--info", "all"], "--info"), (["resume"], "RUN"),
              (["resume", "none"], "none "), (["decode", "none"], "none "),
              (["info", "none"], "none "), (["ui", "none"], "mlflow.db"),
              (["ui", "--port", "x"], "'x'")]


@pytest.mark.parametrize(("arguments", "told"), BAD_INPUTS, ids=[" ".join(arguments) for arguments, _ in BAD_INPUTS])
def test_bad_input_is_reported_with_exit_code_2(
        arguments: list[str], told: str, service: Service, tmp_path: Path, command: Command) -> None:
    captured = command(*arguments, code=2)
    assert told in captured.err
    assert all(line.startswith("ngsgd: ") for line in captured.err.splitlines())
    assert captured.out == ""
    assert service.trained == []
    assert list(tmp_path.iterdir()) == []


def test_the_package_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "ngsgd", "--version"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"ngsgd \S+\n", done.stdout)


def test_bad_input_as_a_real_command_shows_no_traceback_and_writes_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "ngsgd", "train", "augment=rain", "sed=1"],
                          cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, check=False)
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first.startswith("ngsgd: augment=rain ") and "kaldi, none, robust, rooms, spec" in first
    assert second.startswith("ngsgd: sed ") and "seed=1" in second
    assert list(tmp_path.iterdir()) == []


def test_train_hands_over_the_composed_configuration_and_writes_nothing(service: Service, tmp_path: Path) -> None:
    assert cli.main(["train", "seed=3", "--quiet", "optimizer=sgd"]) == 0
    [config] = service.trained
    assert (config.seed, config.optimizer.kind) == (3, "sgd")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_multirun_runs_every_combination_and_keeps_its_file_in_the_output_folder(
        service: Service, tmp_path: Path) -> None:
    assert cli.main(["train", "-m", "seed=1,2", "optimizer=ngsgd,sgd"]) == 0
    assert [(c.seed, c.optimizer.kind) for c in service.trained] == [(1, "ngsgd"), (1, "sgd"), (2, "ngsgd"), (2, "sgd")]
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_cfg_job_prints_and_trains_nothing(
        service: Service, tmp_path: Path, command: Command) -> None:
    assert "seed: 3" in command("train", "--cfg", "job", "seed=3").out
    assert service.trained == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("error", "code", "told"), [
    (ConfigError(["one.", "two."]), 2, "ngsgd: one.\nngsgd: two.\n"),
    (DataError("x.wav is cut short."), 3, "ngsgd: x.wav is cut short.\n"),
    (ClusterError("no worker is left."), 5, "ngsgd: no worker is left.\n"),
    (NgsgdError("ended."), 1, "ngsgd: ended.\n"),
    (KeyboardInterrupt(), 130, "ngsgd: interrupted.\n"),
    (ValueError("odd\nmore"), 1, "ngsgd: ValueError: odd. Run again with --debug to see where.\n"),
    (ModuleNotFoundError("No module named 'ray'", name="ray"), 2,
     "ngsgd: This command needs the package ray, which is not installed: pip install 'ngsgd[service]'\n"),
])
def test_every_kind_of_error_has_its_exit_code_and_sentence(
        error: BaseException, code: int, told: str, service: Service, command: Command) -> None:
    service.error = error
    assert command("train", code=code).err == told


def test_debug_shows_the_traceback(service: Service, command: Command) -> None:
    service.error = ValueError("odd")
    assert "Traceback" in command("train", "--debug", code=1).err


@pytest.mark.slow
@pytest.mark.parametrize(("error", "code", "num_runs"), [(KeyboardInterrupt(), 130, 1), (DataError("x"), 3, 2)])
def test_an_interrupt_ends_a_sweep_and_a_failed_run_does_not(error: BaseException, code: int, num_runs: int,
                                                             service: Service) -> None:
    service.error = error
    assert cli.main(["train", "-m", "seed=1,2"]) == code
    assert len(service.trained) == num_runs


def test_resume_and_decode_find_a_run_by_path_or_name(service: Service, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("")
    assert cli.main(["resume", "first"]) == 0
    assert cli.main(["resume", "first", "--address", "head:6379", "--workers", "3"]) == 0
    assert cli.main(["decode", "runs/first", "-q"]) == 0
    assert service.runs == [("resume", run, False), ("resume at head:6379 with 3", run, False), ("decode", run, True)]


def test_a_run_is_found_by_its_name_the_newest_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("mine-20260101-000000", "mine-20260102-000000", "mine-too-20260103-000000"):
        (tmp_path / "runs" / folder).mkdir(parents=True)
        (tmp_path / "runs" / folder / "config.yaml").write_text("")
    assert find_run("mine").name == "mine-20260102-000000"
    with pytest.raises(ConfigError, match="mine-20260101"):
        find_run("mime-20260101-000000")
    with pytest.raises(ConfigError, match=str(tmp_path / "runs")):
        find_run("of-another-folder")


def test_reader_that_goes_away_is_no_error() -> None:
    code = 'import sys; from ngsgd.launcher.cli import main; sys.exit(main(["train", "--help"]))'
    script = f"{sys.executable} -c '{code}' | true"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr == ""


@pytest.mark.slow
def test_continue_starts_a_run_once_and_then_resumes_it(service: Service, tmp_path: Path,
                                                             command: Command) -> None:
    words = ["train", "--continue", "name=night", f"output_dir={tmp_path}", "cluster.address=auto", "cluster.num_workers=3"]
    for other in ("night-2-20260101-000000", "midnight-20260101-000000"):
        (tmp_path / other).mkdir()
        (tmp_path / other / "config.yaml").touch()
    assert cli.main(words) == 0
    assert len(service.trained) == 1 and service.runs == []
    run = tmp_path / "night-20260101-000000"
    run.mkdir()
    (run / "config.yaml").touch()
    assert cli.main(words) == 0
    assert len(service.trained) == 1 and service.runs == [("resume at auto with 3", run, False)]
    assert "--continue" in command("train", "--continue", code=2).err


@pytest.mark.parametrize("name", [one.name for one in COMMANDS if "runs" in one.takes])
def test_completion_offers_runs(
        name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Command) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.yaml").write_text("")
    monkeypatch.setenv("COMP_LINE", f"ngsgd {name} fi")
    assert command("completion", "--words").out.split() == ["first"]


_OTHER_WORDS = {"compare": ["other"], "export": ["out", "--format", "onnx"], "transcribe": ["a.wav"], "align": ["a.wav", "a.txt"],
                "decode": ["--data", "x"]}


@pytest.mark.parametrize("name", [one.name for one in COMMANDS if "runs" in one.takes])
def test_a_run_that_does_not_exist_is_an_error_before_torch_is_imported(name: str, tmp_path: Path) -> None:
    program = ("import sys\nfrom ngsgd.launcher import cli\ncode = cli.main(sys.argv[1:])\n"
               "print(code, sorted({'torch', 'ray', 'mlflow', 'hydra'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", program, name, "nosuch", *_OTHER_WORDS.get(name, [])], cwd=tmp_path,
                          capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.stdout.strip() == f"{ConfigError.exit_code} []"
    assert "nosuch" in done.stderr


def test_completion_knows_each_command_that_takes_a_run(command: Command) -> None:
    for one in COMMANDS:
        usage = command(one.name, "--help").out.partition("\n\n")[0]
        named = re.findall(r"\b(?:RUN|MODEL)\b", re.sub(r"--[\w-]+ \w+", "", usage))
        assert bool(named) == ("runs" in one.takes), one.name


def test_the_completion_script_of_a_shell_completes(command: Command) -> None:
    """As bash calls it; of zsh and fish, where they are installed, only the syntax is checked."""
    calls = (f'ngsgd() {{ {shlex.quote(sys.executable)} -m ngsgd "$@"; }}\nCOMP_LINE="ngsgd submit --resu" COMP_POINT=19\n'
             '_ngsgd\necho "${COMPREPLY[@]}"\ncomplete -p ngsgd\n')
    for shell, flags, more in (("bash", [], calls), ("zsh", ["-n"], ""), ("fish", ["--no-execute"], "")):
        text = command("completion", shell).out + more
        if program := shutil.which(shell):
            done = subprocess.run([program, *flags], input=text, capture_output=True, text=True, check=False,
                                  env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
            assert done.returncode == 0 and done.stderr == ""
            assert not more or (done.stdout.split()[0] == "--resume" and "-F _ngsgd ngsgd" in done.stdout)


@pytest.mark.parametrize(("line", "offered"), [
    ("ngsgd re", ["resume", "report"]),
    *((f"ngsgd {name} augment=", [f"augment={choice}" for choice in compose.groups()["augment"]])
      for name in ("train", "submit")),
    ("ngsgd submit seed=1 --res", ["--resume"]), ("ngsgd doctor --o", ["--output-dir"]),
    ("ngsgd train schedule.lr_", ["schedule.lr_initial=", "schedule.lr_final=", "schedule.lr_schedule=",
                                 "schedule.lr_factors="]),
    ("ngsgd train seed=1 sched", ["schedule."]),
    ("ngsgd train optimizer=kfac,so", ["optimizer=kfac,soap"]),
    ("ngsgd train cluster.elastic=", ["cluster.elastic=true", "cluster.elastic=false"]),
    ("ngsgd align cluster.elastic=", ["cluster.elastic=true", "cluster.elastic=false"]),
    ("ngsgd train --help sch", ["schedule"]),
    ("ngsgd help tra", ["train", "transcribe"]),
    ("ngsgd export --format o", ["onnx"]),
    ("ngsgd completion f", ["fish"]),
])
def test_completion_offers_commands_flags_and_settings(
        line: str, offered: list[str], monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    assert command("completion", "--words").out.split() == offered


def test_words_after_two_dashes_belong_to_the_other_command(command: Command) -> None:
    # it is an argument of the command, and not the --debug of `ngsgd`
    assert "--debug" in command("doctor", "--quiet", "--", "--debug", code=2).err


@pytest.mark.slow
def test_other_bits_are_allowed_by_a_flag(service: Service, tmp_path: Path) -> None:
    run = tmp_path / "night-20260101-000000"
    run.mkdir()
    (run / "config.yaml").touch()
    for flags in ([], ["--allow-other-bits"]):
        assert cli.main(["train", "--continue", *flags, "name=night", f"output_dir={tmp_path}"]) == 0
        assert cli.main(["train", *flags, f"output_dir={tmp_path}"]) == 0
        assert cli.main(["resume", *flags, str(run)]) == 0
    assert service.allowed == [False] * 3 + [True] * 3


@pytest.mark.parametrize(("error", "code", "fragment"), [
    (OSError(errno.EROFS, "Read-only file system", "/r/x/report"), 3, "/r/x/report"),
    (OSError(errno.ENOSPC, "No space left on device", "/r/x"), 3, "make room"),
    (PermissionError(errno.EACCES, "Permission denied", "/r/x"), 3, "permissions"),
    (MemoryError(), 1, "memory"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
     1, "memory"),
    (RecursionError("maximum recursion depth exceeded"), 3, "recursion"),
])
def test_errors_of_disk_and_memory_are_typed(service: Service, command: Command, error: BaseException, code: int,
                                             fragment: str) -> None:
    service.error = error
    said = command("train", code=code).err
    assert said.count("\n") == 1 and fragment in said and "Error:" not in said


def test_a_disk_error_in_a_run_folder_has_the_exit_code_of_a_checkpoint(service: Service, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    service.error = OSError(errno.EROFS, "Read-only file system", str(tmp_path / "decode" / "wer.json"))
    assert cli.main(["train"]) == 6


def test_a_run_folder_that_cannot_be_made_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(ConfigError, match="output_dir"):
        RunFolder.create(RunConfig(output_dir=str(tmp_path)), "")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="name"):
        RunFolder.create(RunConfig(output_dir=str(tmp_path), name="x" * 300), "")


@pytest.mark.entry("Nc14")
def test_the_help_lists_every_exit_code(command: Command) -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.NgsgdError)]
    codes = {kind.exit_code for kind in kinds} | {value for name, value in vars(errors).items()
                                                  if name.startswith("EXIT_") and isinstance(value, int)}
    assert codes == errors.EXIT_CODES.keys() and len(codes) > 8
    rows = re.findall(r"^ +(\d+) +\w", command("--help").out, re.MULTILINE)
    assert sorted(map(int, rows)) == sorted(codes)

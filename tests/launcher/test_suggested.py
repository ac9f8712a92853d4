"""Commands that ngsgd prints or writes can be given, and files that it makes for others are run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import suggested
from tests.suggested import ROOT, in_python, rejection, suggestions

# file that is made for other programs, or module that makes it -> the test that runs it
_RUN_BY = {
    "launcher/schedulers/kubernetes.py": "integration/test_made_files.py::test_the_entry_point_of_a_kubernetes_manifest_trains",
    "launcher/schedulers/slurm.sh": "integration/test_made_files.py::test_the_slurm_script_trains_with_stand_ins_for_slurm_alone",
    "launcher/completion.py": "launcher/commands/test_cli.py::test_the_completion_script_of_a_shell_completes",
    "docker/Dockerfile": "integration/test_made_files.py::containers",
    "docker/build-steps.sh": "integration/test_made_files.py::test_the_build_steps_of_the_image_run",
    "docker/compose.yaml": "integration/test_made_files.py::test_the_command_in_compose_reaches_the_head",
    "docker/entrypoint.sh": "integration/test_made_files.py::containers",
    "docker/healthcheck.sh": "integration/test_made_files.py::test_the_command_in_compose_reaches_the_head",
}
# text of a script, a manifest or a completion
_MADE = re.compile(r"#!/|\bapiVersion\b|\bcomplete -|\bcrontab\b|\[Unit\]|<<\s*EOF")
# the shell scripts are executed
_FILES = [path for pattern in ("docker/[!.]*", "Makefile", "examples/*.py", "conf/**/*.yaml", "recipes/**/*.py")
          for path in sorted(ROOT.glob(pattern)) if path.suffix != ".sh"]


@pytest.mark.entry("Ra1")
def test_a_test_runs_each_file_that_is_made_for_others() -> None:
    rooms = ("launcher", "ngsgd", "benchmarks", "recipes", "tools", "examples")
    found = [*(ROOT / "docker").iterdir(), *(path for room in rooms for path in (ROOT / room).rglob("*.sh"))]
    found += [path for path in suggested.modules(skip=()) if _MADE.search(path.read_text(encoding="utf-8"))]
    assert {path.relative_to(ROOT).as_posix() for path in found} == set(_RUN_BY)
    for test in _RUN_BY.values():
        file, _, name = test.partition("::")
        assert re.search(rf"def {name}\(", (ROOT / "tests" / file).read_text(encoding="utf-8")), test


def _problems(modules: list[Path]) -> list[str]:
    found = [one for path in modules for one in in_python(path)]
    assert len(found) >= 10, "the commands are found"
    return [problem for one in found if (problem := one.problem())]


def test_commands_in_the_answers_of_why_can_be_given() -> None:
    assert _problems(sorted((ROOT / "launcher" / "why").glob("*.py"))) == []


@pytest.mark.slow
def test_commands_in_messages_and_help_texts_can_be_given() -> None:
    assert _problems(suggested.modules()) == []


@pytest.mark.slow
def test_commands_in_comments_of_files_can_be_given() -> None:
    # values that a program puts in
    texts = {path: re.sub(r"\{\w+\}", suggested.VALUE, path.read_text(encoding="utf-8")) for path in _FILES}
    found = [one for path, text in texts.items() for one in suggestions(path.relative_to(ROOT).as_posix(), text)]
    assert [problem for one in found if (problem := one.problem())] == []


@pytest.mark.parametrize("line", [
    "ngsgd resume --workers 3", "ngsgd train --multirn", "ngsgd info --nam first", "ngsgd align --format pdf",
    "ngsgd train schedule.lr=1", "ngsgd export --format tflite RUN FILE",
    *(pytest.param(line, marks=pytest.mark.slow) for line in ("ray start --haed", "ray job submit --adress=x -- y",
                                                              "mlflow server --prot 5000"))])
def test_a_command_that_cannot_be_given_is_found(line: str) -> None:
    assert rejection(line.split())
    [one] = suggestions("here", f"it failed; run it again with: {line}, or ask")
    assert one.problem()


@pytest.mark.parametrize("line", [
    "ngsgd resume RUN --workers 3", "ngsgd train -m seed=0,1", "ngsgd why",
    *(pytest.param(line, marks=pytest.mark.slow) for line in ("ray start --head --port=6379", "mlflow server --port 5000"))])
def test_a_command_that_can_be_given_is_none(line: str) -> None:
    [one] = suggestions("here", f"it failed; run it again with: {line}, or ask")
    assert one.words == tuple(line.split()) and one.problem() == ""

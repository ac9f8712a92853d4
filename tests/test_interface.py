"""Messages name options as the interface in use does: the command line, or Python."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ngsgd import interface
from ngsgd.cluster.fingerprint import Agreement, Fingerprint
from ngsgd.cluster.restarts import Restarts, none_agrees
from ngsgd.config import ModelConfig
from ngsgd.config.other_names import did_you_mean
from ngsgd.errors import NgsgdError
from ngsgd.runs import trust
from ngsgd.training.verification.repetition import Sample

ROOT = Path(__file__).resolve().parent.parent
# `ngsgd.launcher` is the command line, but `ngsgd.train` also uses its clusters and trackers
LIBRARY = [*(path for path in sorted((ROOT / "ngsgd").rglob("*.py")) if "launcher" not in path.relative_to(ROOT).parts),
           *(ROOT / "launcher" / name for name in (
               "ray/pool.py", "ray/worker.py", "ray/cluster.py", "ray/node_data.py",
               "mlflow/tracker.py", "mlflow/store.py", "reports/progress.py", "signals.py"))]
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
# flags of a command that the text contains: ours, which anybody can run, or another program's
_COMMAND = re.compile(r"ngsgd [a-z]+ |pip install|apply-cmvn|copy-tree|nnet3-[\w-]+|fstconvert|ray start|serve-artifacts"
                      r"|snip-edges|--force-reinstall|--build-arg|--porcelain")
# where flags are made or parsed: file -> reason
_MADE = {"ngsgd/interface.py": "the names of both interfaces",
         "ngsgd/training/storage/audit.py": "a separate command"}


def texts(path: Path, word: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    """The strings of a module; those of one expression are one text, and docstrings are none.

    None if the source does not have the word.
    """
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source if word.search(source) else "")
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False):
            skipped.add(id(node.body[0].value))  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and id(node) not in skipped:
            skipped.update(id(one) for one in node.values)
            yield node.lineno, "".join(str(one.value) if isinstance(one, ast.Constant) else "{}" for one in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.lineno, node.value


def test_no_message_of_the_library_names_a_flag() -> None:
    found = [f"{path.relative_to(ROOT)}:{line}: {flag[0]}" for path in LIBRARY if str(path.relative_to(ROOT)) not in _MADE
             for line, text in texts(path, _FLAG) if (flag := _FLAG.search(text)) and not _COMMAND.search(text)]
    assert found == []


def test_no_message_of_the_library_resumes_a_run_by_a_command() -> None:
    word = re.compile("ngsgd resume")
    found = [f"{path.relative_to(ROOT)}:{line}" for path in LIBRARY if path.name not in ("interface.py", "other_names.py")
             for line, text in texts(path, word) if word.search(text)]
    assert found == []


@pytest.mark.parametrize("line", ["raise E('add --trust')", "f'use --lm {x}.'", "x = ('a'\n    'b --model')"])
def test_a_flag_in_a_message_is_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(line)
    assert any(_FLAG.search(text) for _, text in texts(tmp_path / "module.py", _FLAG))


def _refused() -> str:
    restarts = Restarts(3)
    agreement = Agreement(Fingerprint(torch="1"), allow_other_bits=True)
    restarts.refusal(0, Fingerprint(torch="2"), agreement, is_starting=False)
    return restarts.news()[0].message


def _raised(call: Callable[[], object]) -> str:
    with pytest.raises(NgsgdError) as error:
        call()
    return str(error.value)


def _received(tmp: Path) -> str:
    return _raised(lambda: trust.require(ModelConfig(_target_="of.somebody"), tmp / "config.yaml"))


MESSAGES: dict[str, Callable[[Path], str]] = {
    "allow-other-bits": lambda _tmp: str(none_agrees("torch: 1, 2")),
    "allow-other-bits of a worker": lambda _tmp: _refused(),
    "trust": _received,
    "sample": lambda _tmp: _raised(lambda: Sample.parse("-3")),
    "resume": lambda _tmp: did_you_mean("resume", [], "resume")}


@pytest.mark.parametrize("name", [pytest.param(name, id=name) for name in MESSAGES])
def test_each_message_has_the_words_of_its_interface(name: str, tmp_path: Path) -> None:
    in_python = MESSAGES[name](tmp_path)
    with interface.command_line():
        on_command_line = MESSAGES[name](tmp_path)
    assert in_python != on_command_line
    assert "--" not in in_python and "=True" not in on_command_line
    assert not interface.is_command_line()


@pytest.mark.parametrize(("task", "call"), [
    ("python:make_task", 'ngsgd.train(make_task, resume="RUN", trust=True)'),
    ("python:<lambda>", 'ngsgd.train(task, resume="RUN", trust=True)'),
    ("module:make_task", "ngsgd resume RUN --trust"), ("", "ngsgd resume RUN --trust")])
@pytest.mark.parametrize("quote", ["", "'"])
def test_the_next_step_of_a_run_is_that_of_its_task(task: str, call: str, quote: str, tmp_path: Path) -> None:
    value = task if task and not quote else f"'{task}'"
    (tmp_path / "config.yaml").write_text(f"seed: 0\ntask:\n  _target_: {value}\n  args: {{}}\n")
    assert interface.resume(tmp_path, trust=True, allow_other_bits=False).startswith(call.replace("RUN", str(tmp_path)))

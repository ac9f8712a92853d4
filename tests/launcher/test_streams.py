"""Commands whose standard streams are closed or full."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ngsgd.errors import EXIT_RUN_FAILED

ROOT = Path(__file__).resolve().parents[2]
CODE = "import sys; from ngsgd.launcher.cli import main; sys.exit(main(sys.argv[1:]))"


def run(words: str, streams: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command line in a shell, with these redirections."""
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    return subprocess.run(f'"{sys.executable}" -c "{CODE}" {words} {streams}', shell=True, cwd=folder, capture_output=True,
                          text=True, env=environment, check=False)


@pytest.mark.entry("Lo2", "run a command with closed standard streams (`ngsgd COMMAND >&-`, also all three)", "works",
                   "It runs without output, and no file gets the descriptor of a closed stream.")
@pytest.mark.parametrize("streams", [">&-", ">&- 2>&- <&-", "2>&-", "<&-"])
def test_a_command_with_closed_streams_does_its_work(tmp_path: Path, streams: str) -> None:
    found = run("settings --help", streams, tmp_path)
    assert (found.returncode, found.stderr) == (0, "")
    assert bool(found.stdout) == (">&-" not in streams.replace("2>&-", ""))


@pytest.mark.entry("Lo2")
def test_files_do_not_get_the_descriptors_of_closed_streams(tmp_path: Path) -> None:
    code = ("from ngsgd.launcher.console import replace_closed_streams; replace_closed_streams(); import sys; "
            "file = open('file', 'w'); print('text'); sys.stderr.write('more'); import os; os.write(1, b'x'); os.write(2, b'x'); "
            "assert file.fileno() > 2")
    found = subprocess.run(f'"{sys.executable}" -c "{code}" >&- 2>&- <&-', shell=True, cwd=tmp_path, check=False,
                           env={"PYTHONPATH": str(ROOT)})
    assert found.returncode == 0 and (tmp_path / "file").read_bytes() == b""


@pytest.mark.entry("Lo3", "write the output of a command to a full disk (`ngsgd info RUN >/dev/full`)", "error",
                   "Exit code 1, and one message that names the standard output; no run and no data are at fault.")
@pytest.mark.parametrize("words", ["--version", "settings", "status"])
def test_a_full_output_is_named(tmp_path: Path, words: str) -> None:
    found = run(words, ">/dev/full", tmp_path)
    assert found.returncode == EXIT_RUN_FAILED and found.stderr.count("\n") == 1
    assert "standard output" in found.stderr and "output_dir" not in found.stderr and "Traceback" not in found.stderr


@pytest.mark.entry("Lo3")
def test_a_full_output_and_errors_without_a_reader_end_with_an_exit_code(tmp_path: Path) -> None:
    assert run("status", ">/dev/full 2>/dev/full", tmp_path).returncode == EXIT_RUN_FAILED
    assert run("nonsense", "2>/dev/full", tmp_path).returncode == 2

"""Files that only a release and GitHub read: versions, commands and contents."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ngsgd
from tools import release_check

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def steps_of(path: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def test_the_citation_has_the_version_of_the_package() -> None:
    assert release_check.version_problems(ROOT, ngsgd.__version__) == []
    assert release_check.version_problems(ROOT, "9.9.9")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_each_step_of_a_workflow_is_an_action_of_a_version_or_a_target_of_make(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    commands = [step["run"] for step in steps_of(path) if "run" in step]
    assert commands
    for command in commands:
        assert command.split()[0] == "sed" or (command.split()[0] == "make" and command.split()[1] in targets), command
    assert all("@" in step["uses"] for step in steps_of(path) if "uses" in step)


def test_the_oldest_torch_of_the_workflow_is_that_of_the_package(tmp_path: Path) -> None:
    [command] = [step["run"] for path in WORKFLOWS for step in steps_of(path) if step.get("run", "").startswith("sed")]
    (tmp_path / "constraints.txt").write_bytes((ROOT / "constraints.txt").read_bytes())
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True)
    [oldest] = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lines = (tmp_path / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert f"torch=={oldest}.0" in lines
    # a version of these belongs to one version of torch
    assert not [line for line in lines if line.startswith(("triton==", "torchvision=="))]


def test_the_library_is_imported_without_a_function_that_torch_2_9_lacks() -> None:
    # `make check` with torch 2.9.0 runs in ci.yml; this needs no second torch
    code = ("from torch.nn import functional; vars(functional).pop('linear_cross_entropy', None); "
            "import ngsgd; from ngsgd.curvature import collect; from ngsgd.preconditioners import KFAC; print(KFAC)")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "KFAC" in done.stdout, done.stderr


def test_everything_that_make_installs_has_one_version() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {canonicalize_name(line.split("==")[0]) for line in lines}
    [extras] = re.findall(r"-e '\.\[(.+)\]'", (ROOT / "Makefile").read_text(encoding="utf-8"))
    # torch pins its own requirements, which differ between CPUs and GPUs; ci.yml removes the others
    wanted, seen = [("ngsgd", extras.split(","))], set[tuple[str, ...]]([("torch",), ("torchvision",), ("triton",)])
    while wanted:
        name, extras_of_it = wanted.pop()
        for line in importlib.metadata.requires(name) or []:
            requirement = Requirement(line)
            marker = requirement.marker
            applies = any(not marker or marker.evaluate({"extra": one}) for one in ["", *extras_of_it])
            key = (canonicalize_name(requirement.name), *sorted(requirement.extras))
            if applies and key not in seen:
                seen.add(key)
                wanted.append((requirement.name, [*requirement.extras]))
    assert len(seen) > 100
    assert not {key[0] for key in seen} - pinned - {"torchvision", "triton"}


def test_lines_of_the_manifest_name_what_is_there() -> None:
    for line in (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines():
        kind, *names = line.split()
        if kind in ("graft", "include"):
            assert names and all((ROOT / name).exists() for name in names), line


def archives(folder: Path, wheel_names: list[str], sdist_names: tuple[str, ...]) -> tuple[Path, Path]:
    wheel, sdist = folder / "a.whl", folder / "a.tar.gz"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in wheel_names:
            archive.writestr(name, "")
    file = folder / "empty"
    file.touch()
    with tarfile.open(sdist, "w:gz") as tar:
        for name in sdist_names:
            tar.add(file, f"ngsgd-1.0/{name}")
    return wheel, sdist


def test_incomplete_and_foreign_archives_are_found(tmp_path: Path) -> None:
    good = ["ngsgd/__init__.py", "ngsgd-1.0.dist-info/METADATA"]
    assert release_check.problems_of(*archives(tmp_path, good, release_check.WANTED), "1.0") == []
    [problem] = release_check.problems_of(*archives(tmp_path, [*good, "launcher/cli.py"], release_check.WANTED), "1.0")
    assert "launcher" in problem
    [problem] = release_check.problems_of(*archives(tmp_path, good, release_check.WANTED[1:]), "1.0")
    assert release_check.WANTED[0] in problem

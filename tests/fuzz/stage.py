"""A directory with data and a run, put back to a known state; its path never changes."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz import server
from tests.fuzz.interposer import Arming, Mode, operations
from tests.fuzz.server import Outcome
from tests.simulation.durability import Operation

NAME = "fuzz"
_STAMPED = re.compile(rf"{NAME}-\d{{8}}-\d{{6}}(-\d+)?")
STOPPED, FINISHED = "stopped", "finished"   # names of saved states
SETTINGS = (
    "cluster=in_process", "cluster.num_workers=2", "cluster.threads_per_worker=1", f"name={NAME}",
    "data.train_minutes=0.15", "data.valid_minutes=0.05", "data.test_minutes=0.05",
    "data.snr_db_low=30", "data.snr_db_high=30", "egs.samples_per_iter=300",
    "egs.num_diagnostic_frames=200", "model.num_layers=1", "model.hidden_dim=16",
    # at this rate the final model is a mean of three, one of them older than the checkpoints kept
    "schedule.lr_initial=0.1", "schedule.lr_final=0.1", "schedule.num_epochs=1.5",
    "schedule.minibatch_size=64", "checkpoint.num_to_keep=2",
    "decode.acoustic_scales=[0.1]", "decode.word_penalties=[0.0,4.0]", "tracking.kind=none",
)


class Stage:
    """`out` is the output directory of every run; `saved` holds its known states."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.out = scratch / "stage" / "out"
        self.saved = scratch / "saved"
        self.out.mkdir(parents=True)
        self.saved.mkdir()

    def save(self, name: str) -> None:
        """Keeps the present state under a name."""
        remove(self.saved / name)
        shutil.copytree(self.out, self.saved / name, symlinks=True)

    def reset(self, name: str | None = None) -> None:
        """Puts back a saved state, or an empty directory."""
        remove(self.out)
        if name is None:
            self.out.mkdir()
        else:
            shutil.copytree(self.saved / name, self.out, symlinks=True)

    def runs(self) -> list[Path]:
        """The run folders, the oldest first."""
        return sorted(path for path in self.out.glob(f"{NAME}-*") if path.is_dir())

    @property
    def run(self) -> Path:
        return self.runs()[0]

    def neutral(self, text: str) -> str:
        """Text without what differs between two tries: the scratch folder and the time of a run."""
        return _STAMPED.sub("RUN", text.replace(f"{self.out}/", ""))

    def train(self, arming: Arming | None = None, timeout_s: float = 60.0) -> Outcome:
        """A new run."""
        return server.call(train_words(self.out), self.scratch, arming, timeout_s)

    def call(self, *words: str, arming: Arming | None = None, timeout_s: float = 60.0) -> Outcome:
        """A command whose first argument is the run folder."""
        command, *rest = words
        return server.call([command, str(self.run), *rest], self.scratch, arming, timeout_s)

    def finish(self) -> list[Operation]:
        """Puts on the stage a run that nobody disturbed, data included; all its operations."""
        path = self.scratch / "record"
        if not path.exists():
            self.reset()
            done = self.train(Arming(self.out, record=path))
            if done.code != 0:
                raise RuntimeError(f"the undisturbed run failed with {done.ending}:\n{done.text}")
            self.save(FINISHED)
        self.reset(FINISHED)
        return list(operations(path))

    def stop(self) -> None:
        """Puts on the stage a run that was killed some time after its second commit."""
        if not (self.saved / STOPPED).exists():
            reports = [operation.number for operation in self.finish()
                       if operation.path.endswith("ledger.jsonl")
                       and b'"event": "committed"' in operation.data]
            self.reset()
            self.train(Arming(self.out, Mode.KILL, reports[1] + 4))
            self.save(STOPPED)
        self.reset(STOPPED)


def train_words(out: Path) -> list[str]:
    return ["train", *SETTINGS, f"output_dir={out}"]


def remove(path: Path) -> None:
    """Removes whatever is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read(path: Path) -> bytes | None:
    """Content of a regular file; None where there is none, so that no FIFO or device is opened."""
    try:
        return path.read_bytes() if stat.S_ISREG(os.lstat(path).st_mode) else None
    except OSError:
        return None


def digest(path: Path) -> str:
    """SHA-256 of a regular file, or a word for its absence."""
    content = read(path)
    return "absent" if content is None else hashlib.sha256(content).hexdigest()


def tree(folder: Path, skip: Sequence[str] = ()) -> dict[str, bytes | None]:
    """Content of every file by its relative path; None for a directory."""
    return {str(path.relative_to(folder)): read(path) for path in sorted(folder.rglob("*"))
            if path.name not in skip}

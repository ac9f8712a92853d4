"""Train small runs of many kinds and print the SHA-256 of each final model, to detect changes of
numbers.

    python benchmarks/final_models.py --data data > before.json      # in the old tree
    python benchmarks/final_models.py --data data > after.json       # in the new tree, on the same machine
    diff before.json after.json

The runs cover recipes, networks, optimizers, preconditioners, objectives and outer rules.  Data are
synthetic digits, and Kaldi's yesno with `--yesno PATH`.  The digests are valid for one machine and
one torch version only, so none is stored.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ngsgd.files import sha256

_SMALL = ("recipe=digits", "data.train_minutes=2", "data.valid_minutes=0.5", "data.test_minutes=0.5", "model.num_layers=2",
          "model.hidden_dim=96", "schedule.num_epochs=1", "egs.samples_per_iter=4000", "seed=0", "cluster=in_process",
          "cluster.num_workers=2", "cluster.threads_per_worker=1", "tracking.kind=none")
RUNS: dict[str, tuple[str, ...]] = {
    "ngsgd": (),
    "sgd": ("optimizer=sgd", "schedule.lr_initial=0.002", "schedule.lr_final=0.0005"),
    "momentum": ("optimizer.momentum=0.5",),
    "backstitch": ("optimizer.backstitch_scale=0.3",),
    "pnorm, average": ("model=pnorm", "model.hidden_dim=100", "outer=average"),
    "tdnnf, diloco": ("model=tdnnf", "model.num_layers=4", "outer=diloco"),
    "tdnn, dropout, spec": ("model=tdnn", "model.num_layers=4", "augment=spec", "model.dropout_schedule='0.2,0.2'"),
    "streaming": ("outer=streaming",),
    "overlap": ("outer.overlap=true",),
    "kfac": ("optimizer=kfac",),
    "shampoo": ("optimizer=shampoo",),
    "combination": ("combination.kind=generalized",),
    "lfmmi": ("objective=lfmmi",),
    "yesno": ("recipe=yesno", "cluster=local", "cluster.num_workers=2", "cluster.threads_per_worker=1", "tracking.kind=none",
              "seed=0"),
}


def final_model(settings: Sequence[str], folder: Path) -> str:
    """SHA-256 of the final model of one run."""
    command = [sys.executable, "-m", "launcher", "train", "--quiet", f"output_dir={folder}", "name=run", *settings]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    if done.returncode:
        return f"exit {done.returncode}: {done.stderr.strip().splitlines()[-1][:300]}"
    (model,) = folder.glob("run-*/final/model.safetensors")
    return sha256(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of prepared data, shared by the trees that are compared")
    parser.add_argument("--yesno", type=Path, help="Kaldi's yesno recordings; without them that run is skipped")
    parser.add_argument("names", nargs="*", help="the runs; all if none is named")
    arguments = parser.parse_args()
    found = {}
    for name, own in RUNS.items():
        if (arguments.names and name not in arguments.names) or (name == "yesno" and not arguments.yesno):
            continue
        settings = [*own, f"data.source={arguments.yesno}"] if name == "yesno" else [*_SMALL, *own]
        with tempfile.TemporaryDirectory() as folder:
            found[name] = final_model([*settings, f"data.cache_dir={arguments.data.absolute()}"], Path(folder))
        print(f"{name}: {found[name][:60]}", file=sys.stderr, flush=True)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

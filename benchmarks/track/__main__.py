"""The optimizer track: minibatches to a fixed validation objective, by the rule in rule.py.

    python -m benchmarks.track run digits [--entries adamw muon]
    python -m benchmarks.track run an4 --source AN4 [--entries adamw muon]
    python -m benchmarks.track cost                    # time of a step, compared with plain SGD
    python -m benchmarks.track board [--page benchmarks/track/RESULTS.md]

`run` trains what the results do not have yet. It may be stopped and repeated, and several may run
at once with different tasks. Each run appends one line with all its settings to
benchmarks/track/results/TASK.jsonl. A new entry is one line in entries.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.track import board, cost
from benchmarks.track.entries import ENTRIES
from benchmarks.track.runs import Track
from benchmarks.track.tasks import TASKS


def main() -> None:
    options = _options()
    if options.command == "board":
        board.write(options.page)
        return
    entries = [entry for entry in ENTRIES if options.entries is None or entry.name in options.entries]
    if options.command == "cost":
        cost.measure(entries)
        return
    track = Track(options.task, options.cache, options.source)
    for entry in entries:
        track.measure(entry)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    names = [entry.name for entry in ENTRIES]
    run = commands.add_parser("run", help="train the entries of a task")
    run.add_argument("task", choices=TASKS)
    run.add_argument("--source", default="", help="the folder of AN4")
    run.add_argument("--cache", type=Path, default=Path("runs/data"), help="folder of prepared data")
    timed = commands.add_parser("cost", help="time the steps of the entries on an idle machine")
    for command in (run, timed):
        command.add_argument("--entries", nargs="+", choices=names, metavar="NAME")
    write = commands.add_parser("board", help="write the tables")
    write.add_argument("--page", type=Path, default=Path("benchmarks/track/RESULTS.md"))
    return parser.parse_args()


if __name__ == "__main__":
    main()

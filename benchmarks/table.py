"""A Markdown table of finished runs, for a recipe's RESULTS.md.

    python benchmarks/table.py RUN_FOLDER ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml

from ngsgd.files import read_json_lines
from ngsgd.word_errors import WordErrors

COLUMNS = ("optimizer", "seed", "frames", "minutes", "train objf", "valid objf", "valid acc", "valid", "test", "95 % interval")


def row(run: Path) -> tuple[str, ...]:
    """One line of the table."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    lines = read_json_lines(run / "events.jsonl")
    (report,) = [line for line in lines if line["event"] == "finished"][-1:]
    interval = json.loads((run / "decode" / "wer.json").read_text())["test_interval_95"]
    return (config["optimizer"]["kind"], str(config["seed"]), f"{report['frames_processed']:,}", f"{report['seconds'] / 60:.1f}",
            f"{report['train']['objf']:.3f}", f"{report['valid']['objf']:.3f}", f"{100 * report['valid']['accuracy']:.1f} %",
            str(WordErrors.of_json(report["valid_errors"])),
            str(WordErrors.of_json(report["test_errors"])), f"{interval['low']:.1f} to {interval['high']:.1f}")


def main() -> None:
    rows = sorted(row(Path(folder)) for folder in sys.argv[1:])
    for cells in (COLUMNS, ("---",) * len(COLUMNS), *rows):
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

"""Print the WER of a run on the test set by sex and age of the speakers.

    python recipes/speechocean/local/groups.py RUN PREPARED

RUN is a folder of `ngsgd train recipe=speechocean`, PREPARED the output of prepare.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ADULT = 16  # years; the children of the corpus are 6 to 15


def table(folder: Path, name: str) -> dict[str, str]:
    """Speaker -> value."""
    return dict(line.split() for line in (folder / "test" / name).read_text(encoding="utf-8").splitlines())


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    run, prepared = map(Path, sys.argv[1:])
    errors_of = json.loads((run / "decode" / "wer.json").read_text(encoding="utf-8"))["test_by_speaker"]
    sex, age = table(prepared, "spk2gender"), table(prepared, "spk2age")
    groups = {"women and girls": lambda who: sex[who] == "f", "men and boys": lambda who: sex[who] == "m",
              "adults": lambda who: int(age[who]) >= ADULT, "children": lambda who: int(age[who]) < ADULT}
    for name, is_in in groups.items():
        chosen = [errors for speaker, errors in errors_of.items() if is_in(speaker)]
        words = sum(errors["num_words"] for errors in chosen)
        wrong = sum(errors["insertions"] + errors["deletions"] + errors["substitutions"] for errors in chosen)
        print(f"{name}: {100 * wrong / max(words, 1):.1f} %WER, {wrong} of {words} words, {len(chosen)} speakers")


if __name__ == "__main__":
    main()

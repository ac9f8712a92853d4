"""Run cases on the pretended device and print the operators: a JSON object on each line.

    python -m tests.device.audit [CASE ...]
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch

from tests.device import pretended

# from the first 11 minibatches every Fisher estimate is updated; then every fourth
WARM_UP, MEASURED = 12, 16


def audit(make: Any) -> dict[str, Any]:
    """Launches of each measured step, and in how many steps the host waited, by place."""
    watch = pretended.Watch()
    launches, waits = [], dict[str, int]()
    with watch:
        step = make()
        for _ in range(WARM_UP):
            step()
        for _ in range(MEASURED):
            with watch.step():
                step()
            launches.append(watch.num_launches)
            for place, times in watch.waits.items():
                waits[place] = waits.get(place, 0) + bool(times)
    return {"launches": launches, "waits": {place: number for place, number in waits.items() if number}}


def main() -> None:
    from tests.device.cases import CASES

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pretended.register()
    found: dict[str, Any] = {}
    for name in sys.argv[1:] or CASES:
        try:
            found[name] = audit(CASES[name].make)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        print(json.dumps({name: found[name]}), flush=True)


if __name__ == "__main__":
    main()

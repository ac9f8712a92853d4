"""`ngsgd why`: the cause of a failure, the outlook of a retry, and the next command."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ngsgd.errors import EXIT_OK, ConfigError
from ngsgd.launcher.arguments import JSON, RUN, Parser
from ngsgd.launcher.run_state import state_of
from ngsgd.launcher.why.explain import Answer, explain, explain_command, lines_about
from ngsgd.masking import masked, printable
from ngsgd.object_storage.urls import is_url, local_root
from ngsgd.runs import stored_run
from ngsgd.runs.run_folder import find_run


def command(arguments: Sequence[str]) -> int:
    parser = Parser("why")
    parser.add_argument("run", nargs="?", metavar="RUN",
                        help=f"{RUN} (default: the last command that failed before it created a run, else the newest run)")
    parser.declare({"--output-dir DIR": ("runs", "folder of the runs, if RUN is not given"), "--json": JSON})
    options = parser.parse_args(arguments)
    answer = explain(find_run(options.run, with_models=False)) if options.run else _newest(options.output_dir)
    print(masked(json.dumps(answer.as_json(), indent=1) if options.json else printable("\n".join(lines_about(answer)))))
    return EXIT_OK


def _newest(output_dir: str) -> Answer:
    root = local_root(output_dir)
    if found := explain_command(root):
        return found
    if is_url(output_dir):
        # a run that was fetched just now is not newer than the others
        runs = sorted((folder / "config.yaml" for folder in stored_run.fetched_runs(output_dir)),
                      key=lambda file: file.parent.name[-len("YYYYMMDD-HHMMSS"):])
    else:
        # and the first networks of data.labels=ladder, unless they finished
        networks = (file for file in root.glob("data/networks/*/config.yaml") if state_of(file.parent)["state"] != "SUCCEEDED")
        # by the newest event or error that was written, or the configuration
        names = ("config.yaml", "events.jsonl", "error.json")
        runs = sorted([*root.glob("*/config.yaml"), *networks], key=lambda config: (
            max(file.stat().st_mtime_ns for name in names if (file := config.with_name(name)).is_file()),
            config.parent.name))
    if not runs:
        raise ConfigError(f"{output_dir} contains no runs, and no failed command is recorded for "
                          "it; name a run, or a folder of runs with --output-dir.")
    return explain(runs[-1].parent.resolve())

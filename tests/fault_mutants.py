"""Whether simulated faults or tests find planted bugs: `python -m tests.fault_mutants [NAME ...]`.

Each mutant is one change of the product. In a copy of the package the change is made, and
`tests.simulation` runs seeds until one fails. If none does, the tests of the mutant are run; for
mutants made from the source, the tests come first.
Mutants with a commit are bugs that this commit fixed. `--write PAGE` replaces the table in a page
of the documentation.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

# imported before the forks
import pytest
import safetensors.torch  # noqa: F401
import torch  # noqa: F401
import yaml  # noqa: F401

from tests.generated_mutants import sample
from tests.mutants import REPOSITORY, BrokenRunError, Mutant, apply

COORDINATOR = "ngsgd/training/coordinator.py"
DISPATCHER = "ngsgd/training/dispatcher.py"
JOB_INIT = "ngsgd/training/job_init.py"
CHECKPOINT = "ngsgd/training/storage/checkpoint.py"
LEDGER = "ngsgd/training/storage/ledger.py"
LOCK = "ngsgd/training/storage/lock.py"
EVENTS = "ngsgd/training/storage/event_log.py"
FILES = "ngsgd/files.py"
RESUME = "ngsgd/pipeline/base_run.py"
FOLDER = "ngsgd/runs/run_folder.py"
AWAKE = "ngsgd/training/worker_wait.py"
PLANNING = "ngsgd/training/planning.py"
AVERAGER = "ngsgd/training/averaging/averager.py"
MODEL = "ngsgd/training/averaging/averaged_model.py"
WORKER = "ngsgd/training/worker.py"
SNAPSHOTS = "ngsgd/training/snapshots/job_snapshots.py"
AUDITS = "ngsgd/training/auditing/audits.py"
SITES = "ngsgd/training/sites/site_average.py"
OUTER = "ngsgd/optim/outer/optimizer.py"
LEASE = "ngsgd/object_storage/lease.py"
STORED = "ngsgd/object_storage/folder.py"

TESTS = "tests/training"

# two need rare combinations, and a loaded machine runs few seeds in the time
_MAX_SURVIVORS = 4
_START, _END = "<!-- table of make fault-mutants -->", "<!-- end of the table -->"


class FaultMutant(NamedTuple):
    """`old`, which occurs exactly once in the file, becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    # the commit that fixed this bug; empty: it never existed
    commit: str = ""
    # tests that may find it
    tests: tuple[str, ...] = ()


MUTANTS = [
    # bugs that earlier versions had
    FaultMutant("record_not_in_checkpoint", COORDINATOR, "fisher=self._job_init.fisher, record=record,",
                "fisher=self._job_init.fisher,", "50c59f64"),
    FaultMutant("job_states_not_loaded", CHECKPOINT, "has_jobs=_JOBS in manifest[\"files\"]", "has_jobs=False"),
    FaultMutant("job_states_without_model", JOB_INIT, "return JobStates(own, ahead.model.read(), ", "return JobStates(own, None, "),
    FaultMutant("no_run_lock", LOCK, "fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass", "50c59f64"),
    FaultMutant("no_fencing", CHECKPOINT, "            self.lock.require_held()\n", "", "50c59f64"),
    FaultMutant("absence_is_counted", AWAKE, "counted_s = min(step_s, self.longest_step_s)", "counted_s = step_s", "c202826e"),
    FaultMutant("own_kill_is_evidence_against_data", DISPATCHER,
                "self._hangs.get(piece, 0) + failure.from_outside", "self._hangs.get(piece, 0)", "c202826e"),
    FaultMutant("config_not_synced", FILES, "            fsync(temporary)\n            temporary.rename(final)",
                "            temporary.rename(final)", "50c59f64"),
    FaultMutant("half_written_line_stays", FILES, "            self._remove_unfinished_line()\n", "", "50c59f64"),
    FaultMutant("temporary_files_stay", FOLDER, "                files.remove_abandoned(directory)",
                "                pass", "838ce709"),
    FaultMutant("event_not_synced", EVENTS, "        self._lines.sync()\n        self._last", "        self._last",
                "50c59f64"),
    FaultMutant("estimates_lost_on_resume", COORDINATOR, "        self._job_init.fisher.update(start.fisher)\n", "", "3e0fe4f9"),
    FaultMutant("output_dir_not_synced", FOLDER, "make_directories(Path(config.output_dir))",
                "Path(config.output_dir).mkdir(parents=True, exist_ok=True)", "fe61912d"),
    FaultMutant("run_name_not_synced", FOLDER, "                    files.fsync(root)\n", "                    pass\n", "fe61912d"),
    FaultMutant("lines_of_dead_process_not_synced", FILES,
                "                os.fsync(self._descriptor)\n                fsync(path.parent)\n",
                "                fsync(path.parent)\n", "a78e3477"),
    FaultMutant("new_log_not_synced", FILES, "                fsync(path.parent)\n        except OSError:",
                "        except OSError:", "fe61912d"),
    FaultMutant("events_of_replaced_process", EVENTS, "            self._lock.require_held()\n", "            pass\n", "fe61912d"),
    # coordinator
    FaultMutant("deferred_work_forgotten", COORDINATOR, "pending=(*progress.pending, *state.deferred))",
                "pending=progress.pending)"),
    FaultMutant("pending_work_planned_again", COORDINATOR, " if piece not in plan.taken_up))", "))"),
    FaultMutant("frames_of_rejected_results", COORDINATOR, "sum(r.num_frames for r in accepted)",
                "sum(r.num_frames for r in state.results.values())"),
    FaultMutant("deferred_jobs_count_as_passes", COORDINATOR, "passes_done=plan.iteration.passes_done + plan.num_fresh",
                "passes_done=plan.iteration.passes_done + plan.num_jobs"),
    FaultMutant("vectors_not_released", COORDINATOR, "        self._refcount.release(state.model)\n", ""),
    FaultMutant("model_released_early", COORDINATOR, "        self._refcount.acquire(model)\n",
                "        self.pool.release(model)\n"),
    FaultMutant("resumed_commit_not_in_ledger", COORDINATOR, "            self.storage.ledger.committed(start.commit)\n",
                "            pass\n"),
    FaultMutant("event_after_its_checkpoint", COORDINATOR, "        if start.record:\n", "        if False:\n"),
    # dispatcher
    FaultMutant("duplicate_counts", DISPATCHER, " or outcome.job.job not in state.unsettled:", ":"),
    FaultMutant("damaged_result_counts", DISPATCHER, "damage := is_damaged(result, self.layout):", "False:"),
    FaultMutant("partial_result_counts", DISPATCHER, "if result.remainder and not state.is_stopped and not is_worth_keeping:",
                "if False:"),
    FaultMutant("same_attempt_again", DISPATCHER, "appendleft(replace(job, attempt=job.attempt + 1))", "appendleft(job)"),
    FaultMutant("hang_not_detected", DISPATCHER, "            if now - since > deadline_s:\n", "            if False:\n"),
    FaultMutant("deferred_work_dropped", DISPATCHER,
                "                self._failures[piece] = num_failed\n                state.deferred += job.pieces\n",
                "                self._failures[piece] = num_failed\n"),
    FaultMutant("one_attempt_fewer", DISPATCHER, "if tries >= policy.max_attempts:", "if tries >= policy.max_attempts - 1:"),
    FaultMutant("running_jobs_never_end", DISPATCHER, "        state.running.discard(outcome.job.job)\n", ""),
    FaultMutant("lost_result_stays_settled", DISPATCHER, "            state.unsettled.add(failure.job.job)\n", ""),
    # checkpoints
    FaultMutant("oldest_checkpoint_resumed", CHECKPOINT, "for path in reversed(self._found()):", "for path in self._found():"),
    FaultMutant("newest_checkpoint_removed", CHECKPOINT, "found[:-self.num_to_keep]", "found[self.num_to_keep:]"),
    FaultMutant("job_states_removed", CHECKPOINT, "if old not in resumable:", "if True:"),
    FaultMutant("resumed_without_job_states", CHECKPOINT, "or self.jobs_interval == 1:", "or True:"),
    FaultMutant("buffers_not_loaded", CHECKPOINT, "if _OUTER in manifest[\"files\"] else {}", "if False else {}"),
    FaultMutant("pending_not_loaded", CHECKPOINT, "\"pending\": pieces_of(fields[\"pending\"]),", "\"pending\": (),"),
    FaultMutant("checkpoint_not_synced", FILES, "            for path in temporary.rglob(\"*\"):\n                fsync(path)\n",
                ""),
    FaultMutant("checkpoint_name_not_synced", FILES, "            place(temporary, final)\n            fsync(final.parent)",
                "            place(temporary, final)"),
    # ledger, lock and resumption
    FaultMutant("attempt_not_in_ledger", LEDGER, "        self._write(\"submitted\", **_identity(job))", "        pass"),
    FaultMutant("start_not_in_ledger", LEDGER, "        self._write(\"started\", format=FORMATS[\"ledger\"], after=after,",
                "        (lambda *_, **__: None)(\"\", format=FORMATS[\"ledger\"], after=after,"),
    FaultMutant("ledger_not_synced", COORDINATOR, "        self.storage.ledger.sync()\n", ""),
    FaultMutant("same_fence_again", LOCK, "self.fence = 1 + max(", "self.fence = max("),
    FaultMutant("lock_not_released", LOCK, "            self._write({\"fence\": self.fence})\n        os.close(self._descriptor)",
                "            self._write({\"fence\": self.fence})"),
    FaultMutant("events_repeated", EVENTS, "        if self.has(record.outer_iter):\n            return\n", ""),
    FaultMutant("trackers_not_closed", RESUME, "                training.trackers.close(status)", "                pass"),
    FaultMutant("rate_not_from_progress", PLANNING, "lr * progress.lr_scale)", "lr)"),
    # bugs of an adversarial review, and four more of their kinds
    FaultMutant("one_checkpoint_fewer", CHECKPOINT, "found[:-self.num_to_keep]",
                "found[:len(found) - max(1, self.num_to_keep - 1)]",
                tests=(f"{TESTS}/storage/test_checkpoint.py",)),
    FaultMutant("replacement_not_synced", FILES, "            fsync(temporary)\n            temporary.rename(final)",
                "            if not final.exists():\n                fsync(temporary)\n            temporary.rename(final)",
                tests=("tests/test_files.py", f"{TESTS}/storage/test_checkpoint.py")),
    FaultMutant("result_of_a_plan_before_a_roll_back", DISPATCHER, "if r.number == outcome.job.plan)",
                "if r.plan.outer_iter == outcome.job.outer_iter)", tests=(f"{TESTS}/test_dispatch.py",)),
    FaultMutant("lease_expires_early", LEASE, "while self._clock.now() - seen < lease_s:",
                "while self._clock.now() - seen < lease_s / _RENEWALS_PER_LEASE:", tests=("tests/object_storage/test_lease.py",)),
    FaultMutant("momentum_of_a_rejected_average", MODEL,
                "        self.optimizer = self.read_again(before)\n",
                "        self.optimizer.arrays[\"model\"][:] = self.read_again(before).arrays[\"model\"]\n",
                tests=(f"{TESTS}/test_coordinator.py",)),
    FaultMutant("seed_without_outer_iteration", WORKER, "[self.settings.seed, job.outer_iter, job.job, *own]",
                "[self.settings.seed, job.job, *own]", tests=(f"{TESTS}/test_worker.py",)),
    FaultMutant("equal_weights", AVERAGER, "[result.num_frames for result in accepted]", "[1.0 for result in accepted]",
                tests=(f"{TESTS}/test_coordinator.py",)),
    FaultMutant("quarantine_lost_at_resume", CHECKPOINT, "\"quarantined\": pieces_of(fields[\"quarantined\"])",
                "\"quarantined\": ()", tests=(f"{TESTS}/storage/test_checkpoint.py",)),
    FaultMutant("bad_examples_lost_at_resume", CHECKPOINT, "tuple(fields[\"bad_examples\"])", "()",
                tests=(f"{TESTS}/validation/test_bad_batches.py", f"{TESTS}/validation/test_quarantine.py")),
    FaultMutant("snapshot_of_another_rate", SNAPSHOTS, "job.pieces, job.lr, job.lr_factor", "job.pieces, job.lr_factor",
                tests=(f"{TESTS}/snapshots/test_continuation.py",)),
    FaultMutant("deadlines_not_restarted", DISPATCHER,
                "            self._seen = {}\n        # the time of the round", "            pass\n        # the time of the round",
                tests=(f"{TESTS}/test_dispatch.py",)),
    FaultMutant("wrong_original_kept", AUDITS, "found.right, is_right=case.runs[0] in found.right)", "found.right, is_right=True)",
                tests=(f"{TESTS}/auditing/test_comparison.py",)),
    FaultMutant("objects_of_readers_deleted", STORED, "[key for key in self._unused if key not in used]",
                "[*self._unused, *(self.manifest.keys() - used)]", tests=("tests/object_storage/test_folder.py",)),
    FaultMutant("sites_of_equal_weight", SITES, "float(self.sites.counts[site])", "1.0",
                tests=(f"{TESTS}/sites/test_site_average.py",)),
    FaultMutant("duplicate_of_a_concluded_audit", AUDITS, "case.original is not None) or key in ended",
                "case.original is not None)", tests=(f"{TESTS}/auditing/test_comparison.py",)),
    FaultMutant("failed_attempts_forgotten", DISPATCHER, "                self._failures[piece] = num_failed\n", "",
                tests=(f"{TESTS}/test_dispatch.py",)),
    FaultMutant("elapsed_time_lost", COORDINATOR, "self.control.clock() - start.progress.elapsed_s", "self.control.clock()",
                tests=(f"{TESTS}/test_coordinator.py",)),
    FaultMutant("moving_average_of_the_initial_model", OUTER, "min(self.ema_decay, 1.0 - 1.0 / (info.outer_iter + 1))",
                "self.ema_decay", tests=("tests/optim/test_outer.py",)),
    FaultMutant("renewal_is_no_sign_of_life", LEASE, "if (now.fence, now.renewal) != (head.fence, head.renewal):",
                "if now.fence != head.fence:", tests=("tests/object_storage/test_lease.py",)),
    FaultMutant("rate_quartered_after_a_roll_back", COORDINATOR, "lr_scale = before.progress.lr_scale / 2",
                "lr_scale = before.progress.lr_scale / 4", tests=(f"{TESTS}/test_coordinator.py",)),
    FaultMutant("jobs_kept_after_a_roll_back", COORDINATOR,
                "                self._job_init.forget()\n                ahead = None\n",
                "                ahead = None\n", tests=(f"{TESTS}/test_coordinator.py",)),
    FaultMutant("new_directory_not_synced", FILES, "            fsync(temporary)\n            place(temporary, final)",
                "            place(temporary, final)", tests=("tests/test_files.py",))]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fault_mutants", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="mutants (default: all)")
    parser.add_argument("--seconds", type=float, default=600.0, help="limit for each mutant")
    parser.add_argument("--seeds", type=int, default=3000, help="limit for each mutant")
    parser.add_argument("--generated", type=int, metavar="N", help="draw N mutants from the source instead (default: none)")
    parser.add_argument("--seed", type=int, default=0, help="of the mutants that are drawn (default: 0)")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="every N-th mutant from the I-th (default: all)")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="page whose table is replaced")
    options = parser.parse_args(arguments)
    first, step = map(int, options.part.split("/"))
    of_source = [FaultMutant(*one) for one in sample(options.generated or 0, options.seed)]
    chosen = of_source or [mutant for mutant in MUTANTS if not options.names or mutant.name in options.names]
    rows, survivors = [], []
    for mutant in chosen[first::step]:
        began = time.monotonic()
        # a mutant of the source may not even run, or never end
        output = _output(mutant, options.seconds, options.seeds, tests_first=bool(of_source))
        row = row_of(mutant, output, time.monotonic() - began)
        print(row, flush=True)
        rows.append(row)
        survivors += [mutant.name] if "not found" in row else []
    print(f"{len(rows) - len(survivors)} of {len(rows)} found; not found: {', '.join(survivors) or 'none'}")
    if options.write:
        write_table(options.write, rows)
    return int(len(survivors) > _MAX_SURVIVORS)


def _output(mutant: FaultMutant, seconds: float, seeds: int, *, tests_first: bool) -> str:
    """Output of the simulation or of the tests that found a mutant; empty if none did."""
    output = ""
    with tempfile.TemporaryDirectory(prefix="fault-mutant-") as folder:
        copy = Path(folder)
        # links are followed: ngsgd/launcher and ngsgd/conf
        shutil.copytree(REPOSITORY / "ngsgd", copy / "ngsgd", ignore=shutil.ignore_patterns("__pycache__"))
        apply(Mutant(mutant.name, mutant.file, mutant.old, mutant.new, ()), copy)
        simulation = (["--until-failure", "--seeds", str(seeds), "--seconds", str(seconds)], "replay:")
        tests = (["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not services and not faults", *mutant.tests], "FAILED")
        for arguments, sign in (tests, simulation) if tests_first else (simulation, tests):
            code, output = run_in(copy, arguments, 3 * seconds) if mutant.tests or arguments[0] != "-x" else (0, "")
            if sign in output or code not in (0, 1):
                if code not in (0, 1) and mutant in MUTANTS:
                    raise BrokenRunError(f"{mutant.name} could not run:\n{output[-3000:]}")
                return output if sign in output else f"FAILED {output}"
    return ""


def run_in(copy: Path, arguments: list[str], limit_s: float) -> tuple[int | None, str]:
    """Run pytest or the simulation on a copy of the package; return (exit code, output)."""
    assert "ngsgd" not in sys.modules
    output = copy / "output"
    # a fork has torch already, whose import takes longer than many seeds
    process = multiprocessing.get_context("fork").Process(target=_work, args=(copy, output, arguments))
    process.start()
    process.join(limit_s)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode, output.read_text(encoding="utf-8")


def _work(copy: Path, output: Path, arguments: list[str]) -> None:
    """Run one of the two commands in this process, with the package of `copy`."""
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(copy), str(REPOSITORY)])
    with output.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        import ngsgd

        # an editable install must not be tested
        assert ngsgd.__file__ and Path(ngsgd.__file__).is_relative_to(copy), ngsgd.__file__
        if arguments[0] == "-x":
            code = int(pytest.main(arguments))
        else:
            from tests.simulation import __main__ as simulation
            code = simulation.main(arguments)
    # threads of a broken product may be left
    os._exit(code)


def row_of(mutant: FaultMutant, output: str, seconds: float) -> str:
    about = f"| {mutant.name} | {Path(mutant.file).name} | {mutant.commit or 'never existed'} |"
    if "FAILED" in output:
        test = re.search(r"^FAILED (tests/\S+)", output, re.MULTILINE)
        return f"{about} {f'test {test[1]}' if test else 'the code does not run'} | | | {seconds:.0f} |"
    if "replay:" not in output:
        return f"{about} not found | | | |"
    problem = re.search(r"^seed \d+ failed: (.*)", output, re.MULTILINE)
    faults = re.search(r"^  faults: (.*)", output, re.MULTILINE)
    replay = re.search(r"^  replay: python -m tests.simulation (.*)", output, re.MULTILINE)
    assert problem and faults and replay
    text = re.sub(r"/\S*/", "", problem[1]).replace("|", "/")[:90]
    return f"{about} {text} | {faults[1][:120]} | `{replay[1]}` | {seconds:.0f} |"


def write_table(page: Path, rows: list[str]) -> None:
    head = ["| bug | file | fixed by | first problem | faults after shrinking | replay on the broken code | s |",
            "|---|---|---|---|---|---|---|"]
    before, _, rest = page.read_text(encoding="utf-8").partition(_START)
    _, _, after = rest.partition(_END)
    page.write_text("\n".join([before + _START, "", *head, *rows, "", _END + after]), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What `ngsgd plan` prints: the table, the reasons, one line of advice; or the same as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ngsgd.pipeline.performance_model.planner import Machine, Prediction, Workload
from ngsgd.pipeline.performance_model.scaling import MAX_OVERHEAD, Assumptions, Row

# efficiency below which more workers are a waste
_WORTH_IT = 0.5


def text(machine: Machine, workload: Workload, assumed: Assumptions,
         table: Sequence[Row]) -> list[str]:
    """What a person reads: what was measured, the table, why these samples_per_iter, one line of
    advice.
    """
    lines = _heading(machine, workload, assumed)
    lines += ["", "               here                a core or GPU for each worker",
              "workers  s/iter  speed-up   machines  s/iter  efficient  speed-up    lost  best "
              "average            samples_per_iter"]
    for row in table:
        here = f"{_seconds(row.here.outer_iter_s):>6}  {row.speed_up_here:>8.3g}" if row.here else f"{'-':>6}  {'-':>8}"
        samples = f"{row.samples.samples}" if row.samples.enough_data else "-"
        best = f"{row.averaging} {_seconds(row.averaging_s)}"
        lines.append(f"{row.workers:>7}  {here}   {row.num_machines:>8}  "
                     f"{_seconds(row.there.outer_iter_s):>6}  {_percent(row.there.efficiency):>9}  "
                     f"{row.speed_up:>8.3g}  {_percent(row.lost):>6}  {best:<22}  {samples:>16}")
    return [*lines, "", *_reasons(table), f"advice: {advice(machine, table)}"]


def _heading(machine: Machine, workload: Workload, assumed: Assumptions) -> list[str]:
    alone, full = machine.serial[0], machine.parallel[-1]
    units = f"{machine.num_gpus} GPUs" if machine.num_gpus else f"{machine.num_cores} cores"
    sigma = machine.spread.of_job(workload.samples / workload.minibatch_size) if assumed.sigma is None else assumed.sigma
    return [
        f"the run    {workload.model_bytes / 4e6:.2f} million parameters; a job has "
        f"{workload.samples:.0f} frames, minibatches of {workload.minibatch_size}",
        f"measured   {units}; frames per second of a worker: {alone.rate:.0f} alone, "
        f"{full.rate:.0f} beside {full.num_processes - 1} others",
        f"           seconds of a job besides its steps {full.fixed_s:.2g}, checkpoint "
        f"{machine.checkpoint_s:.2g}, diagnostics {full.diagnostics_s:.2g}",
        f"assumed    {assumed.slots_per_machine} workers per machine, links of "
        f"{assumed.bandwidth:.3g} bytes/s, spread of a job's time {_percent(sigma)},",
        f"           {assumed.failures_per_worker_hour:g} failures per worker and hour, "
        f"{assumed.replace_s:g} s to replace a worker"]


def _reasons(table: Sequence[Row]) -> list[str]:
    """Why these samples_per_iter, each reason once."""
    workers_of: dict[str, list[int]] = {}
    for row in table:
        workers_of.setdefault(row.samples.reason, []).append(row.workers)
    ranges = {reason: str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
              for reason, counts in workers_of.items()}
    return [f"samples_per_iter for {workers} workers: {reason}"
            for reason, workers in ranges.items()]


def advice(machine: Machine, table: Sequence[Row]) -> str:
    """Up to how many workers it pays, what is in the way of more, and the one change that helps
    most.
    """
    few, many = machine.serial[0], machine.serial[-1]
    if many.rate < few.rate:
        threads = f"{few.num_threads} thread{'' if few.num_threads == 1 else 's'}"
        return (f"one worker is {few.rate / many.rate:.1f} times as fast with {threads} as with "
                f"{many.num_threads}; set cluster.threads_per_worker={few.num_threads}.")
    paying = [row for row in table if row.samples.enough_data and row.there.efficiency >= _WORTH_IT]
    best = paying[-1] if paying else table[0]
    beyond = [row for row in table if row.workers > best.workers]
    runs = "1 worker runs" if best.workers == 1 else f"up to {best.workers} workers run"
    said = f"{runs} at {_percent(best.there.efficiency)} efficiency"
    if best.there.overhead_s > MAX_OVERHEAD * best.there.outer_iter_s and best.samples.enough_data:
        said += f", better with egs.samples_per_iter={best.samples.samples}"
    return f"{said}; {_what_stops(beyond[0])}." if beyond else f"{said}; the table ends there."


def _what_stops(row: Row) -> str:
    """Why so many workers do not pay."""
    if not row.samples.enough_data:
        return f"for {row.workers} there is too little data"
    gain_s = row.there.travel_s + row.there.average_s - row.averaging_s
    if gain_s > MAX_OVERHEAD * row.there.outer_iter_s:
        return f"with {row.workers} averaging in one place takes {_seconds(gain_s)} s longer than {row.averaging} would"
    return f"with {row.workers} too little of the time is training ({_percent(row.there.efficiency)})"


def as_json(machine: Machine, workload: Workload, assumed: Assumptions,
            table: Sequence[Row]) -> dict[str, Any]:
    def told(one: Prediction | None) -> dict[str, Any] | None:
        derived = ("outer_iter_s", "efficiency", "frames_per_s", "overhead_s")
        return None if one is None else {**asdict(one),
                                         **{name: getattr(one, name) for name in derived}}
    return {"machine": machine.to_json(), "workload": asdict(workload),
            "assumptions": asdict(assumed),
            "rows": [{**asdict(row), "here": told(row.here), "there": told(row.there)}
                     for row in table],
            "advice": advice(machine, table)}


def _seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}" if value >= 0.01 else f"{value:.4f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if share < 0.1 else f"{100 * share:.0f}%"

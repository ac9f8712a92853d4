"""What `ngsgd plan` prints: the table, the reasons, one line of advice; or the same as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ngsgd.counting import counted, duration
from ngsgd.planning.planner import MIN_OUTER_ITERS, Machine, Prediction, Workload
from ngsgd.planning.scaling import MAX_OVERHEAD, Assumptions, Choice, Row, choose

# efficiency below which more workers are a waste
_WORTH_IT = 0.5


@dataclass(frozen=True)
class Wishes:
    """What a choice of settings must satisfy."""

    # of a worker; 0: not known
    price_per_hour: float = 0.0
    deadline_s: float = math.inf
    budget: float = math.inf

    def any(self) -> bool:
        return self.price_per_hour > 0.0 or math.isfinite(self.deadline_s)


def text(machine: Machine, workload: Workload, assumed: Assumptions, table: Sequence[Row], found: Sequence[Choice] = (),
         wishes: Wishes | None = None, *, is_speech: bool = True) -> list[str]:
    """Measurement, table, reasons for the job lengths, a line of advice, and choice of settings."""
    has_cost = wishes is not None and wishes.price_per_hour > 0.0
    length = "samples_per_iter" if is_speech else "shard_size"
    lines = _heading(machine, workload, assumed, "frames" if is_speech else "examples")
    # a column without a value in any row is omitted; reasons for single ones follow the table
    here_workers = [row.workers for row in table if row.here]
    here_head, above = ("  s/iter  speed-up", f"{'here':>12}     ") if here_workers else ("", "")
    length_head = f"  {length:>16}" if any(row.samples.enough_data for row in table) else ""
    lines += ["", f"{'':7}{above}{'':11}a core or GPU for each worker",
              f"workers{here_head}   machines  s/iter  efficient  speed-up    lost{length_head}  iters  training"
              f"{'      cost' if has_cost else ''}"]
    for row in table:
        cost = f"  {row.cost:>8.3g}" if has_cost else ""
        here = f"  {_seconds(row.here.outer_iter_s):>6}  {row.speed_up_here:>8.3g}" if row.here else f"{'':{len(here_head)}}"
        samples = row.samples.samples if row.samples.enough_data else ""
        lines.append(f"{row.workers:>7}{here}   {row.num_machines:>8}  {_seconds(row.there.outer_iter_s):>6}  "
                     f"{_percent(row.there.efficiency):>9}  {row.speed_up:>8.3g}  {_percent(row.lost):>6}"
                     f"{samples:>{len(length_head)}}  {row.num_outer_iters:>5}  {duration(row.total_s):>8}{cost}")
    workers_of: dict[str, list[int]] = {}
    for row in table:
        workers_of.setdefault(row.samples.reason, []).append(row.workers)
    lines.append("")
    if 0 < len(here_workers) < len(table):
        lines.append(f"here for up to {counted(here_workers[-1], 'worker')}: more are too many for the cores of this machine")
    lines += [f"{length} for {f'{counts[0]} to ' if len(counts) > 1 else ''}{counted(counts[-1], 'worker')}: {reason}"
              for reason, counts in workers_of.items()]
    return [*lines, *([f"threads: {threads}"] if (threads := thread_advice(machine)) else []),
            f"advice: {advice(table, is_speech=is_speech)}",
            *([f"choice: {choice_text(found, wishes, length)}"] if wishes and wishes.any() else [])]


def choice_text(found: Sequence[Choice], wishes: Wishes, length: str) -> str:
    def priced(one: Choice) -> str:
        return duration(one.total_s) + (f", cost {one.cost:.3g}" if wishes.price_per_hour else "")
    if not found:
        return "none; there is too little data for these numbers of workers, try fewer with --workers."
    best = choose(found, deadline_s=wishes.deadline_s, budget=wishes.budget)
    if best is None:
        fastest, cheapest = min(found, key=lambda one: one.total_s), min(found, key=lambda one: one.cost)
        return (f"none; the fastest settings have {counted(fastest.workers, 'worker')}: {priced(fastest)}; the cheapest have "
                f"{counted(cheapest.workers, 'worker')}: {priced(cheapest)}.")
    name = f"egs.{length}" if length == "samples_per_iter" else length
    return (f"cluster.num_workers={best.workers} {name}={best.samples_per_iter} cluster.compression={best.compression}: "
            f"{priced(best)}")


def _heading(machine: Machine, workload: Workload, assumed: Assumptions, examples: str) -> list[str]:
    alone, full = machine.serial[0], machine.parallel[-1]
    units = f"{machine.num_gpus} GPUs" if machine.num_gpus else f"{counted(machine.num_cores, 'core')}"
    sigma = machine.spread.of_job(workload.samples / workload.minibatch_size) if assumed.sigma is None else assumed.sigma
    return [
        f"the run    {workload.model_bytes / 4e6:.2f} million parameters; a job has {workload.samples:.0f} {examples}, "
        f"minibatches of {workload.minibatch_size}",
        f"measured   {units}; {examples} per second of a worker: {alone.rate:.0f} alone, {full.rate:.0f} next to "
        f"{full.num_processes - 1} others",
        f"           seconds of a job outside its steps {full.fixed_s:.2g}, checkpoint {machine.checkpoint_s:.2g}, "
        f"diagnostics {full.diagnostics_s:.2g}",
        f"assumed    {assumed.slots_per_machine} workers per machine, links of {assumed.bandwidth:.3g} bytes/s, "
        f"spread of a job's time {_percent(sigma)},",
        f"           {assumed.failures_per_worker_hour:g} failures per worker and hour, "
        f"{assumed.replace_s:g} s to replace a worker"]


def thread_advice(machine: Machine) -> str:
    """The number of threads of a worker, where fewer are faster; empty where they are not."""
    few, many = machine.serial[0], machine.serial[-1]
    if many.rate >= few.rate:
        return ""
    return (f"one worker is {few.rate / many.rate:.1f} times as fast with {counted(few.num_threads, 'thread')} as with "
            f"{many.num_threads}; set cluster.threads_per_worker={few.num_threads}.")


def advice(table: Sequence[Row], *, is_speech: bool = True) -> str:
    """The number of workers that pays, the reason against more, and the most useful change."""
    paying = [row for row in table if row.samples.enough_data and row.there.efficiency >= _WORTH_IT
              and row.num_outer_iters >= MIN_OUTER_ITERS]
    best = paying[-1] if paying else table[0]
    if not paying and best.workers > 1:
        return f"none of these numbers of workers pays: {_what_stops(best)}; try fewer with --workers."
    beyond = [row for row in table if row.workers > best.workers]
    workers = "1 worker runs" if best.workers == 1 else f"up to {best.workers} workers run"
    said = f"{workers} at {_percent(best.there.efficiency)} efficiency"
    if best.there.overhead_s > MAX_OVERHEAD * best.there.outer_iter_s and best.samples.enough_data:
        said += f", better with {'egs.samples_per_iter' if is_speech else 'shard_size'}={best.samples.samples}"
    return f"{said}; {_what_stops(beyond[0])}." if beyond else f"{said}; the table ends there."


def _what_stops(row: Row) -> str:
    if not row.samples.enough_data:
        return f"for {row.workers} there is too little data"
    if row.num_outer_iters < MIN_OUTER_ITERS:
        return f"with {row.workers} a run has {counted(row.num_outer_iters, 'outer iteration')}, not {MIN_OUTER_ITERS}"
    return f"with {row.workers} too little of the time is training ({_percent(row.there.efficiency)})"


def as_json(machine: Machine, workload: Workload, assumed: Assumptions, table: Sequence[Row], found: Sequence[Choice] = (),
            wishes: Wishes | None = None, *, is_speech: bool = True) -> dict[str, Any]:
    def told(one: Prediction | None) -> dict[str, Any] | None:
        derived = ("outer_iter_s", "efficiency", "frames_per_s", "overhead_s")
        return None if one is None else {**asdict(one), **{name: getattr(one, name) for name in derived}}
    chosen = choose(found, deadline_s=wishes.deadline_s, budget=wishes.budget) if wishes and wishes.any() else None
    return {"machine": machine.to_json(), "workload": asdict(workload), "assumptions": asdict(assumed),
            "rows": [{**asdict(row), "here": told(row.here), "there": told(row.there)} for row in table],
            "thread_advice": thread_advice(machine), "advice": advice(table, is_speech=is_speech),
            "choices": [asdict(one) for one in found], "choice": asdict(chosen) if chosen else None}


def _seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}" if value >= 0.01 else f"{value:.4f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if share < 0.1 else f"{100 * share:.0f}%"

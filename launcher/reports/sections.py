"""The sections of `ngsgd report`, each of which answers one question about a run."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ngsgd.asr.decode.scoring import NOTHING, UtteranceErrors, operations, word_form
from ngsgd.counting import counted, duration
from ngsgd.launcher.reports import figures
from ngsgd.launcher.reports import page as html
from ngsgd.launcher.reports.checks import Check, Verdict, user_settings
from ngsgd.launcher.reports.efficiency import efficiency_of, sites_of
from ngsgd.launcher.reports.history import LayerRow, RunHistory
from ngsgd.launcher.why.faults import bad_examples
from ngsgd.masking import masked
from ngsgd.schedules import JOB_RATE
from ngsgd.word_errors import WordErrors

_WORST = 10
_WRONG = ("reference", "hypothesis", "count")
# rows of a table of words
_MOST = 15
_MOST_WORKERS = 100
_MOST_INCIDENTS = 100
# of the smallest e_i of a Fisher factor (docs/natural-gradient.md)
_USUAL_E = (0.05, 0.2)
_RANK_OF = {"input": "rank_in", "output": "rank_out"}
# of the share of updates that max_change clips
_MAX_CLIPPED = 0.5


def summary(run: RunHistory, verdict: Verdict, checks: Sequence[Check]) -> Iterator[str]:
    """The verdict, its checks and the main figures."""
    yield html.verdict(verdict.level, verdict.word, verdict.sentence)
    yield html.checks((check.level, check.name, check.reason, check.threshold) for check in checks)
    state = run.state
    tiles = []
    if run.test_errors:
        tiles.append(("WER, test set, final model", f"{run.test_errors.wer:.2f}%"))
    if run.iterations:
        efficiency = efficiency_of(run.iterations)
        tiles += [("outer iterations", f"{state['outer_iter']} / {state['num_outer_iters']}"),
                  ("epochs", f"{state['epoch']:.2f}"),
                  (f"{run.curve.example}s processed", f"{state['frames_processed']:,}"),
                  ("training", duration(run.iterations[-1]["elapsed_s"])),
                  ("workers", f"{len(run.workers())}"),
                  ("participation", f"{100 * efficiency.participation:.4g}%"),
                  ("effective training time", f"{100 * efficiency.effective_share:.3g}%")]
        if (sites := sites_of(run.iterations)).num_rounds:
            sent = f"{sites.sent_mb:.3g} MB sent, {sites.received_mb:.3g} MB received"
            tiles += [("sites in the averages over sites", f"{100 * sites.participation:.4g}%"),
                      ("to other sites", sent), ("wait for other sites", duration(sites.wait_s))]
        if price := run.config.cluster.price_per_hour:
            cost = efficiency.cost_text(price, is_speech=run.curve.is_speech)
            tiles.append(("cost of training", cost))
    yield html.tiles(tiles)


def quality(run: RunHistory, word_errors: Sequence[Sequence[str]]) -> Iterator[str]:
    """Scores of the final model and of the last outer iteration, and the figure of the run."""
    if not run.iterations:
        return
    yield html.heading("How good is the model?")
    yield html.table(("score", "final model", "last outer iteration"), _scores(run))
    if run.final:
        yield html.note("The final model is usually combined from the last outer iterations, so "
                        "its scores differ from the ends of the curves.")
    if word_errors:
        yield html.table(("set", "WER (%)", "95% interval", "errors / words"), word_errors)
    yield html.picture(
        figures.png(figures.run_figure(run.curve, run.stops())),
        "Scores, learning rate, clipped updates and time of the outer iterations. The learning rate "
        f"is {JOB_RATE}; gain is that of the outer optimizer. A share of clipped updates near 100% "
        "for long means that the learning rate is too high. Workers train only during jobs.")


def decoding_weights(about: Mapping[str, Any]) -> Iterator[str]:
    """WER on the validation set by acoustic scale and word penalty, from decode/wer.json."""
    found = {(float(one["acoustic_scale"]), float(one["word_penalty"])):
             f"{WordErrors.of_json(one['errors']).wer:.2f}" for one in about["sweep_on_valid"]}
    if len(found) < 2:
        return
    scales, penalties = tried = [sorted({pair[axis] for pair in found}) for axis in (0, 1)]
    names = ("acoustic_scale", "word_penalty")
    chosen = {name: float(about[name]) for name in names}
    # a penalty of 0 is none, not the end of a range
    ends = [name for name, values in zip(names, tried, strict=True)
            if len(values) > 1 and chosen[name] and chosen[name] in (values[0], values[-1])]
    yield html.heading("Acoustic scale and word penalty", level=3)
    yield html.note(
        "WER (%) on the validation set. "
        + " and ".join(f"{name} {value:g}" for name, value in chosen.items()) + " were chosen: errors are averaged with those "
        "of neighbors in the table, and of settings within one standard error of the best, one inside the table is preferred."
        + "".join(f" {name} is at an end of the values that were tried; add values beyond it." for name in ends))
    yield html.table(
        ("acoustic_scale", *(f"penalty {penalty:g}" for penalty in penalties)),
        ((f"{scale:g}", *(found.get((scale, penalty), "") for penalty in penalties)) for scale in scales))


def words(rows: Sequence[UtteranceErrors], speakers: Mapping[str, WordErrors]) -> Iterator[str]:
    """Wrong words, speakers and utterances of the test set."""
    if not rows:
        return
    yield html.heading("Which words and speakers are wrong?")
    found = operations(rows)
    wrong = Counter({pair: count for pair, count in found.items() if pair[0] != pair[1]})
    if not wrong:
        yield html.note("All words of the test set are right.")
        return
    yield html.note(f"Errors of the final model on the test set, {counted(len(rows), 'utterance')}.")
    # the speakers with the most errors: a high WER of a few words is chance
    most = sorted(speakers.items(), key=lambda row: (-row[1].num_errors, row[1].num_words, row[0]))
    tables: dict[str, tuple[tuple[str, ...], Sequence[Sequence[str]]]] = {
        "Substitutions": (_WRONG, _pairs(wrong, lambda ref, hyp: NOTHING not in (ref, hyp))),
        "Deletions": (_WRONG, _pairs(wrong, lambda ref, hyp: hyp == NOTHING)),
        "Insertions": (_WRONG, _pairs(wrong, lambda ref, hyp: ref == NOTHING)),
        "Words": (("word", "in reference", "wrong", "wrong (%)"), _words(found)),
        "Speakers": (("speaker", "words", "errors", "WER (%)"),
                     [(name, str(one.num_words), str(one.num_errors),
                       f"{one.wer:.1f}" if one.num_words else "no words")
                      for name, one in most[:_MOST]])}
    yield html.columns(html.heading(title, level=3) + html.table(*part) for title, part in tables.items() if part[1])
    worst = sorted((row for row in rows if row.errors.num_errors),
                   key=lambda row: (-row.errors.num_errors, row.utt_id))[:_WORST]
    yield html.heading(f"The {counted(len(worst), 'utterance')} with the most errors", level=3)
    aligned = [html.utterance(row.utt_id, str(row.errors), [(word_form(ref), word_form(hyp)) for ref, hyp in row.pairs])
               for row in worst]
    yield html.card("".join(aligned))


def time_spent(run: RunHistory) -> Iterator[str]:
    rows = run.workers()
    if not rows:
        return
    yield html.heading("Which worker was slow?")
    median = statistics.median(row.frames_per_s for row in rows)
    in_turn = run.config.cluster.kind == "in_process"
    if in_turn:
        yield html.note("cluster.kind is in_process: one process runs the jobs one after another, so no worker waits.")
    yield html.table(
        ("worker", "host", f"{run.curve.example}s/s", "of the median (%)", "jobs", "training (s)",
         "waiting (s)", "retried jobs", "failed jobs"), [(str(row.worker), row.host, f"{row.frames_per_s:,.0f}",
          f"{100 * row.frames_per_s / max(median, 1e-9):.0f}", str(row.num_jobs),
          f"{row.busy_s:.1f}", "" if in_turn else f"{row.waiting_s:.1f}", str(row.num_retried),
          str(row.num_failed)) for row in rows[:_MOST_WORKERS]])
    if len(rows) > _MOST_WORKERS:
        yield html.note(f"The slowest {_MOST_WORKERS} of {counted(len(rows), 'worker')}.")


def interruptions(run: RunHistory) -> Iterator[str]:
    yield html.heading("What interrupted the run?")
    stops = [(stop.outer_iter, stop.elapsed_s, f"after outer iteration {stop.outer_iter + 1}, {duration(stop.elapsed_s)}: "
              f"{stop.reason}; resumed") for stop in run.stops()]
    faults = [(event["outer_iter"], event["elapsed_s"],
               masked(f"outer iteration {event['outer_iter'] + 1}: {event['message']}")) for event in run.incidents]
    found = sorted([*stops, *faults], key=lambda one: one[:2])
    if not found:
        yield html.note("Nothing: no stop, no fault.")
        return
    yield html.bullets([text for *_, text in found[-_MOST_INCIDENTS:]])
    if bad := bad_examples(run.events):
        yield html.heading("Examples with a loss or gradient that is not finite", level=3)
        yield html.table(("example", "reason"), [*bad.items()][:_MOST_INCIDENTS])
        if len(bad) > _MOST_INCIDENTS:
            yield html.note(f"The first {_MOST_INCIDENTS} of {len(bad)}; ngsgd why --json lists all.")
    if len(found) > _MOST_INCIDENTS:
        yield html.note(f"The last {_MOST_INCIDENTS} of {len(found)}; all are in events.jsonl.")


def natural_gradient(run: RunHistory) -> Iterator[str]:
    """Each preconditioned layer at the last outer iteration, with the usual ranges."""
    rows = run.layers()
    if not rows:
        return
    yield html.heading("What did natural gradient do?")
    yield html.note(
        "Last outer iteration, mean over its jobs. Directions in which the Fisher matrix of the "
        "model is large get smaller steps. The first row has the usual ranges. The smallest e is "
        "advice on the rank, and no fault: below the range, a lower rank saves time; above it, a higher rank may help.")
    sides = list(dict.fromkeys(side for row in rows for side in row.sides))
    header = ["layer", "reading", *(f"{side}: {what}" for side in sides for what in ("effective rank", "smallest e")),
              "clipped updates (%)", "cosine to plain gradient", "parameter change (%)"]
    low, high = _USUAL_E
    ranges = ["usual range", "A cosine of 1 means that the step equals the plain gradient.",
              *(text for _ in sides for text in ("1 or more", f"{low:g} to {high:g}")),
              f"0 to {100 * _MAX_CLIPPED:.0f}", "0 to 1", ""]
    table = [ranges]
    for row in rows:
        found = [row.layer, _reading(row)]
        for side in sides:
            rank, e = row.sides.get(side, (math.nan, math.nan))
            found += [_shown(rank, ".1f"), _shown(e, ".3f")]
        table.append([*found, _shown(100 * row.clipped, ".0f"), _shown(row.cosine, ".2f"), _shown(100 * row.change, ".2g")])
    yield html.table(header, table)


def settings(run: RunHistory, config_yaml: str) -> Iterator[str]:
    """The user's settings first, all of them folded."""
    yield html.heading("Settings")
    recipe, changed = user_settings(run.config)
    basis = f"recipe={recipe}" if recipe else "the defaults"
    if changed:
        yield html.note(f"Settings that differ from {basis}.")
        yield html.table(("setting", "this run", basis), [(path, masked(str(value)), masked(str(base)))
                          for path, (value, base) in changed.items()])
    else:
        yield html.note(f"All settings are those of {basis}.")
    yield html.folded("All settings", config_yaml)


def _scores(run: RunHistory) -> list[tuple[str, str, str]]:
    last, final = run.iterations[-1], run.final
    if run.curve.is_speech:
        columns = [("", "", "") if event is None else (f"{event['train']['objf']:.4f}", f"{event['valid']['objf']:.4f}",
                    f"{100 * event['valid']['accuracy']:.1f}%") for event in (final, last)]
        names = ("objective, training subset (nats per frame)", "objective, validation subset (nats per frame)",
                 "frame accuracy, validation subset")
        return [*zip(names, *columns, strict=True)]
    metrics: Mapping[str, float] = (final or {}).get("metrics", {})
    of_last = {"train/loss": -last["train"]["objf"], "valid/loss": -last["valid"]["objf"],
               **{name: value for name, value in last["diagnostics"].items() if name.startswith(("train/", "valid/"))}}
    return [(name, f"{metrics[name]:.4g}" if name in metrics else "", f"{of_last[name]:.4g}" if name in of_last else "")
            for name in dict.fromkeys([*of_last, *metrics])]


def _pairs(wrong: Counter[tuple[str, str]], wanted: Any) -> list[tuple[str, str, str]]:
    found = sorted(((pair, count) for pair, count in wrong.items() if wanted(*pair)), key=lambda one: (-one[1], one[0]))
    return [(ref, hyp, str(count)) for (ref, hyp), count in found[:_MOST]]


def _words(found: Counter[tuple[str, str]]) -> list[tuple[str, ...]]:
    said, wrong = Counter[str](), Counter[str]()
    for (ref, hyp), count in found.items():
        if ref != NOTHING:
            said[ref] += count
            wrong[ref] += count if ref != hyp else 0
    worst = sorted((one for one in said if wrong[one]), key=lambda one: (-wrong[one], one))[:_MOST]
    return [(word, str(said[word]), str(wrong[word]), f"{100 * wrong[word] / said[word]:.1f}") for word in worst]


def _reading(row: LayerRow) -> str:
    low, high = _USUAL_E
    remarks = []
    if row.clipped > _MAX_CLIPPED:
        remarks.append("max_change sets the step: lower the learning rate")
    for side, (_, e) in row.sides.items():
        option = f"optimizer.{_RANK_OF.get(side, 'rank_in')}"
        if e > high:
            remarks.append(f"a higher {option} would still change the steps")
        elif e < low:
            remarks.append(f"a lower {option} would save time")
    return f"{'; '.join(remarks) or 'all values are in the usual range'}.".capitalize()


def _shown(value: float, form: str) -> str:
    return "" if math.isnan(value) else f"{value:{form}}"

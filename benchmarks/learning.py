"""Learning of optimizers on the frames of AN4: NG-SGD, plain SGD with clipping, and PyTorch's
optimizers.

    python benchmarks/learning.py run AN4_FOLDER RESULTS.jsonl --net relu --minibatch 128 --optimizer ngsgd --lr 0.002
    python benchmarks/learning.py sweep AN4_FOLDER RESULTS.jsonl --optimizers adam muon
    python benchmarks/learning.py table RESULTS.jsonl

`run` trains once and appends one line to RESULTS.jsonl.  `sweep` searches, for each network,
minibatch size and optimizer, the rate with the lowest training cross-entropy on seed 0, in factors
of 2 until a rate on either side is worse.  It runs the other seeds at that rate and skips runs that
are in RESULTS.jsonl.  `table` prints Markdown.

All optimizers share the network, its initial values, the order of the frames and the decay of the
rate.  Rates of ngsgd and sgd are per frame, on the loss summed over the minibatch; those of the
others are on its mean.

Letters: T frames of one set, P padded frames, D features of a frame, W = 15 D inputs of the
network.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ngsgd import NGSGD
from ngsgd.asr.kaldi_io.tables import read_ark
from ngsgd.config import ModelConfig
from ngsgd.files import read_json_lines
from ngsgd.models import build_model
from ngsgd.optim import SGD

CONTEXT = 7                     # frames on either side
MODELS = {"relu": ModelConfig(kind="relu", num_layers=4, hidden_dim=256),
          "pnorm": ModelConfig(kind="pnorm", num_layers=4, hidden_dim=500, pnorm_group=5)}
MINIBATCHES = (128, 512)        # frames
OPTIMIZERS = ("ngsgd", "ngsgd_low_alpha", "sgd", "momentum", "adam", "muon")
SUMMED_LOSS = ("ngsgd", "ngsgd_low_alpha", "sgd")  # the others use the mean over the minibatch
LOW_ALPHA = 0.25                # less smoothing of the Fisher estimates than Kaldi's 4
# first rate of the search
CENTRES = {"ngsgd": 0.002, "ngsgd_low_alpha": 0.004, "sgd": 0.004, "momentum": 0.05, "adam": 1e-3, "muon": 0.01}
PNORM_CENTRES = {"ngsgd": 0.004}
MUON_BIAS_LR = 1e-3             # AdamW, which trains all parameters except matrices
FINAL_LR_SHARE = 0.1            # of the first rate, at the end of the run
DIVERGED_LOSS = 10.0            # nats per frame; chance is log 102 = 4.6
CHECK_PERIOD = 100              # minibatches between two checks of the loss
# of the rate, either way from the center: a search that needs more fails
MAX_DOUBLINGS = 10


@dataclass(frozen=True)
class Setting:
    """The settings that identify a run."""

    net: str
    minibatch: int
    optimizer: str
    lr: float
    seed: int
    epochs: int


@dataclass(frozen=True)
class Result:
    """The result of a run; None where it diverged before, or where the optimizer has no clipping.
    """

    diverged: bool
    frames: int                         # seen in training
    cpu_s: float                        # process CPU time of training alone
    wall_s: float
    train_ce: float | None = None       # nats per frame, final model, complete set
    train_accuracy: float | None = None
    test_ce: float | None = None
    test_accuracy: float | None = None
    limited_layers: float | None = None  # fraction of layer updates shortened by max_change
    limited_model: float | None = None   # fraction of minibatches shortened by max_param_change


Results = dict[Setting, Result]


@dataclass(frozen=True)
class Frames:
    """One set in memory, unspliced."""

    windows_PW: Tensor    # a view: the windows of neighboring frames share memory
    first_rows_T: Tensor  # row of windows_PW that is centered on each frame
    pdfs_T: Tensor        # int64
    num_pdfs: int

    @classmethod
    def of(cls, x_TD: npt.NDArray[np.float32], pdfs_T: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64], num_pdfs: int, *,
           left: int = CONTEXT, right: int = CONTEXT) -> Frames:
        """Build windows of concatenated utterances; their edges repeat the first and last frame."""
        padded = [np.pad(x, ((left, right), (0, 0)), mode="edge") for x in np.split(x_TD, offsets[1:-1])]
        num_features = x_TD.shape[1]
        windows_PW = torch.from_numpy(np.concatenate(padded)).flatten().unfold(0, (left + 1 + right) * num_features, num_features)
        # utterance u starts (left + right) u rows later than without padding
        first_rows_T = np.arange(len(x_TD)) + np.repeat(np.arange(len(offsets) - 1) * (left + right), np.diff(offsets))
        return cls(windows_PW, torch.from_numpy(first_rows_T), torch.from_numpy(pdfs_T.astype(np.int64)), num_pdfs)

    def __len__(self) -> int:
        return len(self.pdfs_T)

    def minibatch(self, indices_N: Tensor) -> tuple[Tensor, Tensor]:
        """Spliced inputs and classes of these frames."""
        return self.windows_PW.index_select(0, self.first_rows_T[indices_N]), self.pdfs_T[indices_N]


def read_frames(folder: Path, set_name: str) -> Frames:
    """The frames of "train" or "test" with their states."""
    alignment = np.load(folder / f"ali_{set_name}.npz")
    features = read_ark(folder / f"feats_{set_name}.ark")
    utt_ids = alignment["utt_ids"].tolist()
    lengths = np.diff(alignment["offsets"])
    if [len(features[utt_id]) for utt_id in utt_ids] != lengths.tolist():
        raise SystemExit(f"{folder}: feats_{set_name}.ark and ali_{set_name}.npz differ in frames; are both of one release?")
    speaker_of = dict(line.split() for line in (folder / f"utt2spk_{set_name}").read_text().splitlines())
    speakers_T = np.repeat([speaker_of[utt_id] for utt_id in utt_ids], lengths)
    x_TD = _normalise(np.concatenate([features[utt_id] for utt_id in utt_ids]), speakers_T)
    return Frames.of(x_TD, alignment["pdf"], alignment["offsets"], int(alignment["num_pdfs"]))


def _normalise(x_TD: npt.NDArray[np.float32], speakers_T: npt.NDArray[np.str_]) -> npt.NDArray[np.float32]:
    """Zero mean and unit variance for each speaker."""
    y_TD = np.empty_like(x_TD)
    for speaker in np.unique(speakers_T):
        mine = speakers_T == speaker
        x = x_TD[mine].astype(np.float64)
        y_TD[mine] = (x - x.mean(axis=0)) / x.std(axis=0)
    return y_TD


def build_optimizers(name: str, model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """The optimizers that together update every parameter once; fused where torch supports it, for
    a fair comparison of times.
    """
    parameters = list(model.parameters())
    if name in ("ngsgd", "ngsgd_low_alpha"):
        return [NGSGD(model, lr, max_change=0.75, max_param_change=2.0, rank_in=20, rank_out=80, update_period=4,
                      alpha=4.0 if name == "ngsgd" else LOW_ALPHA)]
    if name == "sgd":
        return [SGD(model, lr, max_change=0.75, max_param_change=2.0)]
    if name == "momentum":
        return [torch.optim.SGD(parameters, lr, momentum=0.9, fused=True)]
    if name == "adam":
        return [torch.optim.Adam(parameters, lr, fused=True)]
    return [torch.optim.Muon([p for p in parameters if p.ndim == 2], lr, weight_decay=0.0),
            torch.optim.AdamW([p for p in parameters if p.ndim != 2], MUON_BIAS_LR, weight_decay=0.0, fused=True)]


def minibatches(train: Frames, setting: Setting) -> Iterator[tuple[Tensor, Tensor]]:
    """Every frame once an epoch, in an order that depends on seed and epoch alone."""
    for epoch in range(setting.epochs):
        order_T = torch.randperm(len(train), generator=torch.Generator().manual_seed(1000 * setting.seed + epoch))
        yield from map(train.minibatch, order_T.split(setting.minibatch))


def fit(model: nn.Module, optimizers: list[torch.optim.Optimizer], train: Frames, setting: Setting) -> tuple[int, bool]:
    """Train `model`; return the number of frames used and whether the loss diverged, which ends the
    run.
    """
    reduction = "sum" if setting.optimizer in SUMMED_LOSS else "mean"
    first_rates = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    num_steps = setting.epochs * math.ceil(len(train) / setting.minibatch)
    frames, recent_loss, recent_weight = 0, torch.zeros(()), 0
    for step, (x_NW, pdfs_N) in enumerate(minibatches(train, setting)):
        for group, first_rate in first_rates:
            group["lr"] = first_rate * FINAL_LR_SHARE ** (step / num_steps)
        loss = cross_entropy(model(x_NW), pdfs_N, reduction=reduction)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        frames += len(pdfs_N)
        recent_loss += loss.detach()
        recent_weight += len(pdfs_N) if reduction == "sum" else 1
        if (step + 1) % CHECK_PERIOD == 0:
            if not float(recent_loss) / recent_weight <= DIVERGED_LOSS:  # also catches NaN
                return frames, True
            recent_loss, recent_weight = torch.zeros(()), 0
    return frames, False


@torch.no_grad()
def evaluate(model: nn.Module, frames: Frames) -> tuple[float, float]:
    """Cross-entropy in nats per frame, and frame accuracy, over the complete set."""
    loss, hits = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
    for indices_N in torch.arange(len(frames)).split(2048):
        x_NW, pdfs_N = frames.minibatch(indices_N)
        logits = model(x_NW)
        loss += cross_entropy(logits, pdfs_N, reduction="sum")
        hits += (logits.argmax(dim=1) == pdfs_N).sum()
    return float(loss) / len(frames), int(hits) / len(frames)


def measure(setting: Setting, train: Frames, test: Frames) -> Result:
    """One run from initial values to results."""
    model = build_model(MODELS[setting.net], train.windows_PW.shape[1], train.num_pdfs, setting.seed)
    optimizers = build_optimizers(setting.optimizer, model, setting.lr)
    cpu_start, wall_start = time.process_time(), time.perf_counter()
    frames, diverged = fit(model, optimizers, train, setting)
    cpu_s, wall_s = time.process_time() - cpu_start, time.perf_counter() - wall_start
    limited_layers, limited_model = limited_shares(optimizers[0])
    if not diverged:
        train_ce, train_accuracy = evaluate(model, train)
        test_ce, test_accuracy = evaluate(model, test)
        if train_ce <= DIVERGED_LOSS:  # false for NaN
            return Result(False, frames, cpu_s, wall_s, train_ce, train_accuracy, test_ce, test_accuracy, limited_layers,
                          limited_model)
    return Result(True, frames, cpu_s, wall_s, limited_layers=limited_layers, limited_model=limited_model)


def limited_shares(optimizer: torch.optim.Optimizer) -> tuple[float | None, float | None]:
    """Fractions of layer updates and of minibatches that were clipped."""
    if not isinstance(optimizer, SGD):
        return None, None
    activity = optimizer.activity()
    return statistics.fmean(activity.layer_share.values()), activity.model_share


class Bench:
    """The data and the file of results; runs that are not in the file are executed."""

    def __init__(self, folder: Path, path: Path) -> None:
        self.train, self.test = read_frames(folder, "train"), read_frames(folder, "test")
        self.path = path
        self.results = read_results(path)

    def result(self, setting: Setting) -> Result:
        """The result from the file, or of a new run that is appended to it."""
        if setting not in self.results:
            result = measure(setting, self.train, self.test)
            line = json.dumps(asdict(setting) | asdict(result))
            with self.path.open("a") as file:
                file.write(line + "\n")
            print(line, flush=True)
            self.results[setting] = result
        return self.results[setting]

    def train_ce(self, setting: Setting) -> float:
        """The training cross-entropy, infinite if the run diverged."""
        return loss_or_infinity(self.result(setting))


def loss_or_infinity(result: Result) -> float:
    return math.inf if result.train_ce is None else result.train_ce


def read_results(path: Path) -> Results:
    lines = read_json_lines(path) if path.exists() else []
    names = Setting.__dataclass_fields__
    return {Setting(**{name: line[name] for name in names}): Result(**{k: v for k, v in line.items() if k not in names})
            for line in lines}


def best_rate(bench: Bench, net: str, minibatch: int, optimizer: str, seed: int, epochs: int) -> float:
    """The rate of the lowest training cross-entropy, with a worse rate on either side."""
    centre = (CENTRES | PNORM_CENTRES if net == "pnorm" else CENTRES)[optimizer]
    low, high = -1, 1  # doublings of the center
    while True:
        losses = {k: bench.train_ce(Setting(net, minibatch, optimizer, centre * 2.0**k, seed, epochs))
                  for k in range(low, high + 1)}
        best = min(losses, key=losses.__getitem__)
        if low < best < high:
            return float(centre * 2.0**best)
        if best == low:
            low -= 1
        else:
            high += 1
        if max(-low, high) > MAX_DOUBLINGS:
            raise SystemExit(f"{optimizer}, {net}, minibatch {minibatch}: no best rate within a factor of "
                             f"{2**MAX_DOUBLINGS} of {centre}; move its center")


def sweep(arguments: argparse.Namespace) -> None:
    bench = Bench(arguments.folder, arguments.results)
    search_seed, *other_seeds = arguments.seeds
    for net, minibatch, optimizer in itertools.product(arguments.nets, arguments.minibatches, arguments.optimizers):
        lr = best_rate(bench, net, minibatch, optimizer, search_seed, arguments.epochs)
        for seed in other_seeds:
            bench.result(Setting(net, minibatch, optimizer, lr, seed, arguments.epochs))


def run(arguments: argparse.Namespace) -> None:
    setting = Setting(arguments.net, arguments.minibatch, arguments.optimizer, arguments.lr, arguments.seed, arguments.epochs)
    if setting in read_results(arguments.results):
        raise SystemExit(f"{arguments.results} already holds this run")
    Bench(arguments.folder, arguments.results).result(setting)


def table(arguments: argparse.Namespace) -> None:
    results = read_results(arguments.results)
    cells = {(s.net, s.minibatch, s.epochs) for s in results}
    for net, minibatch, epochs in sorted(cells, key=lambda cell: (list(MODELS).index(cell[0]), cell[1:])):
        print(f"\n{net}, minibatch {minibatch}, {epochs} epochs\n")
        print("| optimizer | rate | seeds | train CE | test CE | test frame accuracy, % | CPU seconds | best test CE at any rate |")
        print("|" + "---|" * 8)
        for optimizer in OPTIMIZERS:
            mine = {s: r for s, r in results.items() if (s.net, s.minibatch, s.epochs, s.optimizer)
                    == (net, minibatch, epochs, optimizer)}
            if mine:
                print(f"| {' | '.join(row(optimizer, mine))} |")


def row(optimizer: str, results: Results) -> tuple[str, ...]:
    """The results of all seeds at the rate that was best on the first seed in the file."""
    search_seed = next(iter(results)).seed
    lr = min((s for s in results if s.seed == search_seed), key=lambda s: loss_or_infinity(results[s])).lr
    seeds = [r for s, r in results.items() if s.lr == lr]
    num_diverged = sum(r.diverged for r in seeds)
    best = min((s for s in results if s.seed == search_seed), key=lambda s: results[s].test_ce or math.inf)
    return (optimizer, f"{lr:.3g}", f"{len(seeds)}" + (f", {num_diverged} diverged" if num_diverged else ""),
            spread(r.train_ce for r in seeds), spread(r.test_ce for r in seeds),
            spread((None if r.test_accuracy is None else 100 * r.test_accuracy for r in seeds), digits=1),
            f"{statistics.median(r.cpu_s for r in seeds):.0f}", f"{results[best].test_ce:.3f} at {best.lr:.3g}")


def spread(values: Iterable[float | None], digits: int = 3) -> str:
    """Mean (lowest to highest) of the runs that did not diverge."""
    finite = [value for value in values if value is not None]
    if not finite:
        return "diverged"
    mean, low, high = (f"{value:.{digits}f}" for value in (statistics.fmean(finite), min(finite), max(finite)))
    return f"{mean} ({low} to {high})"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for command in (run, sweep, table):
        sub = commands.add_parser(command.__name__)
        sub.set_defaults(command=command)
        if command is not table:
            sub.add_argument("folder", type=Path, help="folder of AN4: feats_*.ark, ali_*.npz, utt2spk_*")
            sub.add_argument("--epochs", type=int, default=4)
            sub.add_argument("--threads", type=int, default=1)
        sub.add_argument("results", type=Path, help="a file of JSON lines")
        if command is run:
            sub.add_argument("--net", choices=MODELS, required=True)
            sub.add_argument("--minibatch", type=int, required=True, help="frames per minibatch")
            sub.add_argument("--optimizer", choices=OPTIMIZERS, required=True)
            sub.add_argument("--lr", type=float, required=True, help="the first rate; per frame for ngsgd and sgd")
            sub.add_argument("--seed", type=int, default=0)
        elif command is sweep:
            sub.add_argument("--nets", nargs="+", choices=MODELS, default=list(MODELS))
            sub.add_argument("--minibatches", nargs="+", type=int, default=MINIBATCHES)
            sub.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=OPTIMIZERS)
            sub.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2), help="seeds; the first one searches the rate")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if "threads" in arguments:
        torch.set_num_threads(arguments.threads)
    arguments.command(arguments)


if __name__ == "__main__":
    main()

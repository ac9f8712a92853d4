"""Train, decode and score Kaldi's yesno from Python, without Hydra, Ray or MLflow.

    python train_from_python.py waves_yesno.tar.gz     # https://openslr.org/1, or the folder of its wav files
"""

import sys

from ngsgd.pipeline import build_run, recipe


def main(source: str, output_dir: str = "runs") -> None:
    config = recipe("yesno", data={"source": source}, output_dir=output_dir,
                    cluster={"num_workers": 2, "threads_per_worker": 1})
    run = build_run(config)
    report = run.train()
    print("WER on test:     ", report.test_errors)
    print("frame accuracy:  ", round(run.metrics["frames"]["test"]["accuracy"], 3))
    print("parameters:      ", sum(parameter.numel() for parameter in run.model.parameters()))
    print("decoded again:   ", run.decode().test)
    print("run folder:      ", run.folder.path)


if __name__ == "__main__":   # worker processes import this file
    main(*sys.argv[1:])

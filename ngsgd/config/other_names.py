"""Names of other trainers for the options of this one, for suggestions and for `ngsgd.train`.

They are the names of PyTorch, Lightning, the Trainer of Hugging Face, Kaldi's scripts and icefall.
A name is written here with underscores, in lower case and without its section.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

from ngsgd.interface import is_command_line

_RESUME = "ngsgd resume RUN"
_SAME = {
    "schedule.lr_initial": (
        "lr", "learning_rate", "base_lr", "init_lr", "initial_lr", "lr_init", "initial_learning_rate",
        "initial_effective_lrate"),
    "schedule.lr_final": ("min_lr", "final_lr", "final_learning_rate", "final_effective_lrate"),
    "schedule.num_epochs": (
        "epochs", "epoch", "num_epochs", "max_epochs", "n_epochs", "num_train_epochs"),
    "schedule.minibatch_size": (
        "batch_size", "batch", "bsz", "minibatch_size", "mini_batch_size", "train_batch_size",
        "per_device_train_batch_size"),
    "schedule.num_jobs_initial": ("num_jobs_initial",),
    "schedule.num_jobs_final": ("jobs", "num_jobs", "num_jobs_final"),
    "cluster.num_workers": (
        "workers", "num_workers", "nj", "nproc", "nproc_per_node", "num_processes", "world_size"),
    "cluster.threads_per_worker": ("threads", "num_threads"),
    "cluster.device": ("device", "accelerator"),
    "cluster.precision": ("precision", "dtype"),
    "cluster.address": ("address", "ray_address"),
    "cluster.exchange": ("backend",),
    "model.num_layers": (
        "layers", "num_layers", "n_layers", "num_hidden_layers", "num_encoder_layers"),
    "model.hidden_dim": ("hidden_size", "hidden", "hidden_dim", "d_model", "encoder_dim", "relu_dim"),
    "model.dropout_schedule": ("dropout", "dropout_schedule"),
    "model.num_subclasses": ("mix_up",),
    "optimizer.weight_decay": ("l2", "l2_regularize", "weight_decay", "wd"),
    "optimizer.momentum": ("momentum",),
    "optimizer.beta1": ("beta1", "adam_beta1"),
    "optimizer.backstitch_scale": ("backstitch_training_scale",),
    "optimizer.backstitch_interval": ("backstitch_training_interval",),
    "output_dir": (
        "output", "out_dir", "exp_dir", "dir", "save_dir", "log_dir", "logging_dir", "work_dir",
        "default_root_dir"),
    "name": ("run_name", "exp_name", "job_name"),
    "seed": ("random_seed", "manual_seed", "rand_seed", "srand", "data_seed"),
    "init_model": ("pretrained_model", "from_pretrained", "model_name_or_path", "input_model"),
    "data.corpus": ("corpus", "dataset", "dataset_name"),
    "data.source": ("data_dir", "data_path", "manifest_dir", "train_data", "feat_dir"),
    "data.alignment": ("ali_dir",),
    "data.valid_fraction": ("val_split", "validation_split", "valid_fraction"),
    "egs.samples_per_iter": ("sync_every", "frames_per_iter", "sync_period"),
    "objective.ce_weight": ("xent_regularize",),
    "objective.frame_subsampling": ("frame_subsampling_factor",),
    "objective.tolerance_frames": ("left_tolerance", "right_tolerance"),
    "objective.leaky_hmm": ("leaky_hmm_coefficient",),
    "objective.chunk_frames": ("frames_per_chunk", "chunk_width"),
    "features.sample_rate_hz": ("sample_rate", "sampling_rate", "sample_frequency"),
    "features.num_mel_bins": ("n_mels", "num_filters"),
    "features.num_ceps": ("n_mfcc",),
    "combination.max_models": ("max_models_combine",),
    "checkpoint.num_to_keep": ("save_total_limit", "save_top_k", "keep_last_n"),
    "tracking.experiment_name": ("experiment", "experiment_name", "project"),
    "tracking.uri": ("tracking_uri", "mlflow_tracking_uri"),
}
# name -> option with the same meaning; ngsgd.train accepts these names
OTHER_NAMES = {name: path for path, names in _SAME.items() for name in names}

_RELATED = {
    "optimizer={}": ("optim", "opt", "optimizer_name", "optimizer_type"),
    "model={}": ("arch", "architecture", "network", "model_type"),
    "objective={}": ("loss", "loss_fn", "criterion"),
    "model.dropout_schedule=\"{0},{0}\"": ("dropout", "dropout_rate"),
    "cluster.device=cuda cluster.num_workers={}": ("gpus", "num_gpus", "n_gpu", "devices"),
    "cluster.device=cuda": ("use_gpu", "cuda", "gpu"),
    "cluster.device=cpu": ("no_cuda", "use_cpu"),
    "cluster.precision=bf16": ("fp16", "bf16", "amp", "use_fp16", "mixed_precision"),
    "cluster.num_workers=WORKERS": ("nnodes", "num_nodes", "nodes"),
    "optimizer.max_param_change=NORM": (
        "grad_clip", "max_grad_norm", "gradient_clip_val", "clip_grad_norm", "clip_grad"),
    "optimizer.damping={}": ("eps", "epsilon", "adam_epsilon"),
    "optimizer.ema_decay={}": ("beta2", "adam_beta2"),
    "optimizer.beta1=B1 optimizer.ema_decay=B2": ("betas",),
    "schedule.num_epochs=EPOCHS": (
        "max_steps", "max_iters", "num_iters", "total_steps", "max_updates", "train_steps"),
    "schedule.minibatch_size=FRAMES": (
        "accumulate_grad_batches", "gradient_accumulation_steps", "accum_grad", "max_duration"),
    "schedule.lr_schedule={}": ("scheduler", "lr_scheduler", "lr_scheduler_type"),
    "schedule.warm_up=FRACTION": ("warmup", "warmup_steps", "warmup_ratio", "warmup_epochs"),
    _RESUME: (
        "resume", "resume_from", "resume_from_checkpoint", "ckpt_path", "checkpoint",
        "load_checkpoint", "start_epoch", "start_batch", "stage"),
    "augment=spec": ("spec_augment", "specaugment", "specaug", "enable_spec_aug"),
    "augment.speed=all": ("speed_perturb", "perturb_speed"),
    "augment.noise=true": ("musan", "enable_musan"),
    "tracking.kind=mlflow": ("logger", "report_to", "wandb", "tensorboard", "use_wandb"),
    "features.cmvn=speaker": ("cmvn_opts",),
    "decode.acoustic_scales=[{}]": ("acwt", "acoustic_scale"),
}
# name -> settings with a similar meaning; {} is the value
SETTINGS_INSTEAD = {name: text for text, names in _RELATED.items() for name in names}

# values of device and precision
_VALUES = {"gpu": "cuda", "32": "float32", "fp32": "float32",
           **dict.fromkeys(("16", "fp16", "16-mixed", "bf16-mixed", "bfloat16"), "bf16")}


def _unquoted(key: str, value: str) -> str:
    return f"{key}={value}"


def instead_of(word: str, value: str = "", write: Callable[[str, str], str] = _unquoted) -> str:
    """Return the settings that another trainer's name stands for; empty where the name is unknown.

    `write` returns KEY=VALUE with the quotes that a command line needs, or KEY alone.

    >>> instead_of("trainer.optimization.minibatch-size", "512")
    'schedule.minibatch_size=512'
    """
    name = word.lower().lstrip("-+").replace("-", "_").rpartition(".")[2]
    if text := SETTINGS_INSTEAD.get(name):
        if text == _RESUME and not is_command_line():
            return "resume=RUN"
        words = [word.partition("=") for word in text.split()]
        return " ".join(write(key, part.format(value)) if value and "{" in part else f"{key}{sign}{part.format('VALUE')}"
                        for key, sign, part in words)
    path = OTHER_NAMES.get(name, "")
    if path in ("cluster.device", "cluster.precision"):
        value = _VALUES.get(value.lower(), value)
    return write(path, value) if path and value else path


def did_you_mean(word: str, known: Sequence[str], last: str, value: str = "",
                 write: Callable[[str, str], str] = _unquoted) -> str:
    """Return a question with the nearest known word; the last part of a path is enough.

    Args:
        word: the unknown word.
        known: the words to choose from.
        last: the last part of the word, such as lr of optimizer.lr.
        value: the value that was given, to be repeated in the question.
        write: see `instead_of`.
    """
    if instead := instead_of(last, value, write):
        return f" Did you mean {instead}?"
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    by_last = {path.rpartition(".")[2]: path for path in reversed(known)}
    near = near or [by_last[name] for name in difflib.get_close_matches(last, by_last, 1, 0.75)]
    return f" Did you mean {write(near[0], value) if value else near[0]}?" if near else ""

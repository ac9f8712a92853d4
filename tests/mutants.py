"""Whether the tests notice mistakes in the numerical code: `python tests/mutants.py [NAME ...]`, 0
if they notice all.

Each mutant is one change of one file: the formula of the paper where Kaldi does otherwise, a scale
forgotten, a floor skipped. In a copy the change is made and the tests that should fail are run; a
mutant that they let pass has survived. About two minutes on one core.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
PASSED, FAILED = 0, 1  # pytest's exit codes; the others mean that it could not run

# an editable install must not be tested
CONFTEST = """
from pathlib import Path
import ngsgd
assert Path(ngsgd.__file__).is_relative_to(Path(__file__).parent), ngsgd.__file__
"""

OPS = "ngsgd/ops/natural_gradient.py"
ONLINE = "ngsgd/optim/fisher/online.py"
KRONECKER = "ngsgd/optim/layers/kronecker.py"

GOLDEN = "tests/optim/test_online_golden.py"
PROPERTIES = "tests/optim/test_online_properties.py"
LIMIT = "tests/ops/test_row_product_limit.py"
ONE_CALL = f"{GOLDEN}::test_one_call_from_kaldis_state[small-float64]"
OWN_START = f"{GOLDEN}::test_from_our_own_start"
KALDIS_START = f"{GOLDEN}::test_from_kaldis_start"
SCHEDULE = f"{PROPERTIES}::test_calls_that_update_are_kaldis"
LAYER_STEPS = f"{LIMIT}::test_layer_steps_equal_kaldis_nnet2"

MANY_ROWS = "tests/optim/layers/test_kronecker.py::test_the_plain_gradient_of_many_rows_is_preconditioned[bias-dtype0]"

TRANSFORM = "ngsgd/models/statistics.py"
STAGES = "ngsgd/models/growing.py"
TRANSFORM_TEST = "tests/models/test_input_transform.py::test_the_transform_is_kaldis"
GROWTH = "tests/training/test_growth.py"
DEVICE_STEP = ("tests/device/test_audit.py::"
               "test_a_step_runs_on_the_device_and_waits_only_where_listed[NGSGD]")


class Mutant(NamedTuple):
    """`old`, which occurs exactly once in the file, becomes `new`; `tests` should fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = [
    # --------------------------------------------------- the estimate: where paper and Kaldi differ
    Mutant("start_from_eigenvectors", ONLINE,
           "self._state = ops.initial_state(dim, rank, self.smoothing, X64_ND)",
           """rows_ND = X64_ND if one64_N is None else torch.cat([X64_ND, one64_N[:, None]], dim=1)
        values, vectors = torch.linalg.eigh(rows_ND.T @ rows_ND / float(num_rows))
        top_R = values.flip(0)[:rank].numpy()
        rho = max(1e-10, (float(values.sum()) - float(top_R.sum())) / (dim - rank))
        d_R = (top_R - rho).clip(1e-10)
        e_R = torch.from_numpy(ops._e(d_R, rho, dim, self.smoothing.alpha))
        self._state = ops.FisherState(e_R.sqrt()[:, None] * vectors.T.flip(0)[:rank], d_R, rho)
        return""",
           (f"{OWN_START}[small-float64]",)),
    Mutant("delta_of_kaldis_comment", ONLINE, "delta: float = 5e-4", "delta: float = 1e-5", (f"{KALDIS_START}[low_rank-float64]",)),
    Mutant("d_floored_by_epsilon_only", OPS, "sqrt_c_BR - rho_next_B[:, None], floor_B[:, None]",
           "sqrt_c_BR - rho_next_B[:, None], epsilon_B[:, None]",
           (f"{KALDIS_START}[low_rank-float64]",)),
    Mutant("d_from_the_floored_rho", OPS, "sqrt_c_BR - rho_next_B[:, None], floor_B[:, None]",
           "sqrt_c_BR - np.maximum(rho_next_B, floor_B)[:, None], floor_B[:, None]",
           (f"{KALDIS_START}[n_gt_d-float64]",)),
    Mutant("rho_without_floor", OPS, "rho_next_B = np.maximum(rho_next_B, floor_B)",
           "rho_next_B = np.maximum(rho_next_B, epsilon_B)", (f"{KALDIS_START}[n_gt_d-float64]",)),
    Mutant("rho_without_trace_preservation", OPS, "(trace_T_B - sqrt_c_BR.sum(axis=1)) / (dim_B - d_BR.shape[1])", "rho_B.copy()",
           (f"{KALDIS_START}[small-float64]",)),
    Mutant("alpha_off_by_one_percent", ONLINE, "ops.Smoothing(alpha, ", "ops.Smoothing(1.01 * alpha, ", (ONE_CALL,)),
    Mutant("no_cap_of_eta", OPS, "min(0.9, 1.0 - math.exp(-num_rows / num_samples_history))",
           "1.0 - math.exp(-num_rows / num_samples_history)", (f"{OWN_START}[eta_cap-float64]",)),
    Mutant("always_three_initial_passes", ONLINE, "3 if self.schedule == \"nnet2\" or float(num_rows) > rank else 1", "3",
           (f"{OWN_START}[first_small_n-float64]",
            f"{PROPERTIES}::test_the_start_passes_over_the_first_minibatch_three_times_or_once_if_it_has_no_more_rows_than_the_rank")),
    Mutant("reorthogonalization_left_out", OPS, "if step.must_reorthogonalize:", "if False:",
           (f"{PROPERTIES}::test_a_long_run_of_the_same_degenerate_minibatch_stays_sound[rank_1-float32]",)),
    Mutant("fourth_powers_overflow", OPS, "J64_RD = J_RD.double()", "J64_RD = J_RD",
           (f"{PROPERTIES}::test_huge_rows_in_float32_move_the_estimate_as_they_do_in_float64",)),
    # -------------------------------------------------------------------------------- when it moves
    Mutant("updates_at_multiples_of_the_period", ONLINE, "past_first % self.update_period", "self.num_calls % self.update_period",
           (f"{SCHEDULE}[nnet3-expected0-False]",)),
    Mutant("nnet2s_schedule_for_nnet3", ONLINE, "_NNET3_FIRST_UPDATES = 11", "_NNET3_FIRST_UPDATES = 10",
           (f"{SCHEDULE}[nnet3-expected0-False]",)),
    Mutant("nnet3s_schedule_for_nnet2", ONLINE, "_NNET2_FIRST_UPDATES = 10", "_NNET2_FIRST_UPDATES = 11",
           (f"{LAYER_STEPS}[s01-float64]",)),
    Mutant("frozen_calls_count", ONLINE, "self.num_calls += not self.frozen", "self.num_calls += 1",
           (f"{SCHEDULE}[nnet3-expected0-True]",)),
    Mutant("the_new_estimate_meets_its_own_minibatch", ONLINE, "self.finish(call)\n        return Xhat_ND",
           """self.finish(call)
        Xhat_ND, _, scale = call._replace(
            W_RD=self.state.W_RD, projection=fisher_projection.project(X_ND, self.state.W_RD)).preconditioned()
        return Xhat_ND""",
           (ONE_CALL,)),
    Mutant("gram_matrix_of_the_old_estimate", ONLINE, " or self._derived.state is not self._state", "",
           (f"{PROPERTIES}::test_the_gram_matrix_follows_every_change_of_the_estimate",)),
    # ------------------------------------------------------ the plain gradient of many rows
    Mutant("expected_scale_without_rho", OPS, "rescaling(sum_d + rho * dim, sum_hat)", "rescaling(sum_d, sum_hat)", (MANY_ROWS,)),
    Mutant("expected_scale_in_updates", ONLINE, "        if moments is not None:\n            # |X - H W|^2",
           "        if False:\n            # |X - H W|^2", (MANY_ROWS,)),
    # -------------------------------------------------------------- samples skipped by the estimate
    Mutant("loss_scale_in_the_estimate", OPS, "one.num_rows / one.scale**2", "one.num_rows",
           (f"{LIMIT}::test_a_loss_scale_that_changes_enters_neither_the_limit_nor_the_estimates",)),
    Mutant("loss_scale_in_the_limit", KRONECKER, " * scale / loss_scale", " * scale",
           (f"{LIMIT}::test_a_loss_scale_that_changes_enters_neither_the_limit_nor_the_estimates",)),
    Mutant("masked_rows_counted", ONLINE, "float(X_ND.shape[0]) if num_rows is None else num_rows", "float(X_ND.shape[0])",
           (f"{LIMIT}::test_frames_that_do_not_count_neither_raise_the_limit_nor_enter_the_estimates",)),
    Mutant("mask_ignored", KRONECKER, "if not self.context.ignore_zero_rows:", "if True:",
           (f"{LIMIT}::test_frames_that_do_not_count_neither_raise_the_limit_nor_enter_the_estimates",)),
    # --------------------------------------------------------------------------------- the gradient
    Mutant("scale_applied_twice", KRONECKER, "scale = input_scale * output_scale", "scale = (input_scale * output_scale) ** 2",
           (f"{LAYER_STEPS}[s01-float64]",)),
    Mutant("scale_not_applied", KRONECKER, "scale = input_scale * output_scale", "scale = 1.0", (f"{LAYER_STEPS}[s01-float64]",)),
    Mutant("gradient_averaged_over_rows", KRONECKER, "scale = input_scale * output_scale",
           "scale = input_scale * output_scale / len(X_NI)", (f"{LAYER_STEPS}[s01-float64]",)),
    Mutant("hold_one_out_left_out", "ngsgd/ops/simple_natural_gradient.py", "b_N = 1.0 + a_N / (len(X_ND) - 1 - a_N)",
           "b_N = torch.ones_like(a_N)", ("tests/ops/test_simple_natural_gradient.py::test_equals_kaldi[c00-float64]",)),
    # ----------------------------------------------------------------------------------- the limits
    Mutant("nan_passes_max_change", "ngsgd/ops/max_change.py", "return self.total == self.total",
           "return ~torch.isinf(self.total)",
           ("tests/ops/test_max_change.py::test_a_norm_that_is_not_finite_is_reported_even_with_component_limits",)),
    Mutant("limit_not_per_sample", "ngsgd/ops/max_change.py", "num_rows * max_change_per_sample", "max_change_per_sample",
           (f"{LAYER_STEPS}[s06-float64]",)),
    Mutant("floating_scale_at_full_speed", "ngsgd/ops/orthonormal.py", "torch.where(ratio > _VERY_WIDE, speed / 4.0,",
           "torch.where(ratio > _VERY_WIDE, speed,",
           ("tests/ops/test_orthonormal.py::test_a_floating_scale_goes_slower_where_singular_values_differ",)),
    # ----------------------------------------------------------------------------------- the models
    Mutant("transform_without_a_floor", TRANSFORM, "(within_class_factor + l_K)", "l_K", (TRANSFORM_TEST,)),
    Mutant("transform_without_its_limit", TRANSFORM, "np.minimum(singular, max_singular_value)", "singular", (TRANSFORM_TEST,)),
    Mutant("offset_forgotten", TRANSFORM, "-(M_KD @ mean_D)[:, None]", "0.0 * M_KD[:, :1]", (TRANSFORM_TEST,)),
    Mutant("a_full_class_gets_one_more", STAGES, "(targets[pdf] + 1) * min_count", "targets[pdf] * min_count",
           ("tests/models/test_stages.py::test_the_numbers_of_subclasses_are_kaldis",)),
    Mutant("a_split_doubles_the_class", STAGES, "offsets[chosen] += math.log(0.5) / scale", "pass",
           ("tests/models/test_stages.py::test_splitting_without_perturbation_changes_no_posterior",)),
    Mutant("a_split_forgets_the_scale", STAGES, "math.log(0.5) / scale", "math.log(0.5)",
           ("tests/models/test_stages.py::test_the_split_hardly_changes_a_posterior",)),
    Mutant("no_derivative_below_the_floor", STAGES, "(log_y_NP.clamp(min=math.log(_MIN_POSTERIOR)) - log_y_NP).detach()",
           "(log_y_NP.clamp(min=math.log(_MIN_POSTERIOR)) - log_y_NP)",
           ("tests/models/test_stages.py::test_a_distant_class_has_the_floor_as_value_and_a_useful_gradient",)),
    Mutant("layers_an_outer_iteration_late", STAGES, "2 + (outer_iter - 1) // self", "1 + outer_iter // self",
           ("tests/models/test_stages.py::test_layers_are_added_in_kaldis_iterations",)),
    Mutant("split_an_outer_iteration_early", STAGES, "// 2 + 1 if", "// 2 if",
           ("tests/models/test_stages.py::test_the_split_comes_halfway_between_the_last_layer_and_the_end",)),
    Mutant("bypass_of_the_frame_before", "ngsgd/models/tdnn.py", "_splice(needed, times, (0,))", "_splice(needed, times - 1, (0,))",
           ("tests/models/test_tdnn.py::test_windows_and_utterances_match_the_reference_frame_by_frame",)),
    Mutant("momentum_of_what_was_there_before", "ngsgd/optim/outer/optimizer.py", "self.rule.buffers.get(name, values)",
           "array[part] if name in self.rule.buffers else values",
           (f"{GROWTH}::test_values_written_into_a_model_have_no_momentum",)),
    Mutant("nothing_made_for_a_stage_after_a_resume", "ngsgd/training/averaging/averaged_model.py",
           "self.stage = self.task.growth.stage(start.progress.outer_iter)",
           "self.stage = self.task.growth.stage(start.progress.outer_iter + 1)",
           (f"{GROWTH}::test_resuming_between_any_two_stages_is_bitwise_identical",)),
    Mutant("a_tensor_made_without_its_device", "ngsgd/ops/device/limited_update.py",
           "numbers = constants_2C.new_empty(2 * constants_2C.shape[1] + 3)",
           "numbers = torch.empty(2 * constants_2C.shape[1] + 3)", (DEVICE_STEP,)),
    Mutant("a_number_read_back_in_each_step", "ngsgd/optim/sgd.py",
           "        others = minibatch.others_finite\n",
           "        constants_2C.max().item()\n        others = minibatch.others_finite\n", (DEVICE_STEP,))]


class BrokenRunError(Exception):
    """Neither killed nor survived: the change does not apply, or pytest could not run."""


def main(names: list[str]) -> int:
    if unknown := sorted(set(names) - {mutant.name for mutant in MUTANTS}):
        print(f"no mutant is called {', '.join(unknown)}; there are {', '.join(mutant.name for mutant in MUTANTS)}")
        return 2
    mutants = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    start = time.monotonic()
    try:
        code, last_lines = run(None, sorted({test for mutant in mutants for test in mutant.tests}))
        if code != PASSED:
            print(f"the tests do not pass on the unchanged code:\n{last_lines}")
            return 2
        survivors = [mutant.name for mutant in mutants if not is_killed(mutant)]
    except BrokenRunError as error:
        print(error)
        return 2
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} killed in {time.monotonic() - start:.0f} s"
          + (f"; survived: {', '.join(survivors)}" if survivors else ""))
    return 1 if survivors else 0


def is_killed(mutant: Mutant) -> bool:
    code, last_lines = run(mutant, list(mutant.tests))
    reason = re.search(r"^E  +(.*)", last_lines, re.MULTILINE)
    if code == FAILED:
        print(f"killed    {mutant.name:42} {reason[1][:78] if reason else ''}", flush=True)
    else:
        print(f"SURVIVED  {mutant.name}", flush=True)
    return code == FAILED


def run(mutant: Mutant | None, tests: list[str]) -> tuple[int, str]:
    """(exit code, output) of the tests in a copy, with the mutant if there is one."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        for part in ("ngsgd", "tests"):
            shutil.copytree(REPOSITORY / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(REPOSITORY / "pyproject.toml", copy)
        (copy / "conftest.py").write_text(CONFTEST)
        if mutant is not None:
            apply(mutant, copy)
        # plugins of other packages take longer to load than these tests to run
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "--import-mode=importlib", "-p", "pytest_timeout",
                   "-p", "no:cacheprovider", *tests]
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (PASSED, FAILED):
        raise BrokenRunError(f"{mutant.name if mutant else 'unchanged code'}: pytest could not run the tests:\n"
                             f"{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.returncode, done.stdout


def apply(mutant: Mutant, copy: Path) -> None:
    path = copy / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise BrokenRunError(f"{mutant.name}: {mutant.old!r} occurs {text.count(mutant.old)} times in {mutant.file}, not once; "
                             "bring the mutant up to date with the code.")
    path.write_text(text.replace(mutant.old, mutant.new))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

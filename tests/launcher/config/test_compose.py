"""Overrides to RunConfig: correct ones are accepted, all wrong ones are reported together."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ngsgd.config import ModelConfig, RunConfig, build, check, choices_of, types_of
from ngsgd.config import problems_of as config_problems
from ngsgd.config.build import flatten, paths, plain, with_defaults
from ngsgd.config.other_names import OTHER_NAMES, SETTINGS_INSTEAD, instead_of
from ngsgd.errors import ConfigError
from ngsgd.launcher import cli
from ngsgd.launcher.config import compose
from ngsgd.launcher.config.sources import OURS, Sources, conf_dir
from ngsgd.runs import config_file
from ngsgd.runs.config_file import read_config


def problems_of(*overrides: str, sources: Sources = OURS) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose.compose(list(overrides), sources)
    return caught.value.problems


def check_sweep(overrides: list[str]) -> None:
    list(compose.jobs_of_sweep(compose.normalized(overrides, OURS), OURS))


@pytest.mark.parametrize(("overrides", "settings"), [
    (["cluster.num_workers=two"], ["cluster.num_workers"]),
    (["cluster.num_workers=0"], ["cluster.num_workers"]),
    (["cluster.num_workers=two", "schedule.num_jobs_final=two"], ["schedule.num_jobs_final", "cluster.num_workers"]),
    (["schedule.num_jobs_initial=two"], ["schedule.num_jobs_initial"])])
def test_a_wrong_value_is_reported_for_the_setting_and_not_for_its_copies(overrides: list[str], settings: list[str]) -> None:
    assert [problem.partition(" ")[0] for problem in problems_of(*overrides)] == settings


def test_without_overrides_only_the_jobs_differ_from_the_dataclass_defaults() -> None:
    composed, default = flatten(compose.compose([])), flatten(RunConfig())
    changed = {key for key in default if composed[key] != default[key]}
    assert changed <= {"schedule.num_jobs_initial"}
    assert composed["schedule.num_jobs_initial"] == composed["cluster.num_workers"]
    schedule = compose.compose(["cluster.num_workers=4"]).schedule
    assert (schedule.num_jobs_initial, schedule.num_jobs_final) == (4, 4)


def test_recipe_sets_its_values_and_keeps_the_users_groups() -> None:
    config = compose.compose(["model=pnorm", "optimizer=sgd", "recipe=fsdd", "data.snr_db_high=5"])
    assert (config.data.corpus, config.data.snr_db_high) == ("fsdd", 5.0)
    assert (config.model.kind, config.optimizer.kind) == ("pnorm", "sgd")


@pytest.mark.slow
@pytest.mark.parametrize("group", sorted(compose.groups()))
def test_every_choice_of_every_group_is_printed_as_it_would_be_trained(group: str, tmp_path: Path,
                                                                       capsys: pytest.CaptureFixture[str]) -> None:
    for choice in compose.groups()[group]:
        assert cli.main(["train", "--cfg", "job", "--resolve", f"{group}={choice}"]) == 0
        (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
        assert read_config(tmp_path / "printed.yaml") == compose.compose([f"{group}={choice}"])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", compose.groups()["recipe"])
def test_a_model_and_an_optimizer_on_the_command_line_win_over_a_recipe(recipe: str) -> None:
    for model, optimizer in zip(compose.groups()["model"], ("sgd", "kfac", "adam", "ngsgd"), strict=True):
        composed = compose.compose([f"recipe={recipe}", f"model={model}", f"optimizer={optimizer}"])
        assert (composed.model.kind, composed.optimizer.kind) == (model, optimizer)


@pytest.mark.parametrize(("override", "sentence"), [
    ("optimizer.max_chnage=1", "optimizer.max_chnage is not a setting. Did you mean optimizer.max_change=1?"),
    ("max_change=1", "max_change is not a setting. Did you mean optimizer.max_change=1?"),
    ("optimzer=sgd", "optimzer is not a setting. Did you mean optimizer=sgd?"),
    ("augment=rain", "augment=rain is not a choice; choose one of kaldi, none, robust, rooms, spec."),
    ("lr=0.1", "lr is not a setting. Did you mean schedule.lr_initial=0.1?"),
    ("optimizer.lr=0.1", "optimizer.lr is not a setting. Did you mean schedule.lr_initial=0.1?"),
    ("epochs=3", "epochs is not a setting. Did you mean schedule.num_epochs=3?"),
    ("batch_size=64", "batch_size is not a setting. Did you mean schedule.minibatch_size=64?"),
    ("workers=4", "workers is not a setting. Did you mean cluster.num_workers=4?"),
    ("+optimizer.max_change=1",
     "+optimizer.max_change=1: settings can be changed, not added or deleted; write optimizer.max_change=VALUE."),
    ("~optimizer", "~optimizer: settings can be changed, not added or deleted; write optimizer=VALUE."),
    ("schedule.num_epochs=abc", "schedule.num_epochs is 'abc'; it must be a number."),
    ("seed=1.5", "seed is 1.5; it must be an integer."),
    ("seed=true", "seed is true; it must be an integer."),
    ("schedule.lr_initial=inf", "schedule.lr_initial is inf; it must be a finite number."),
    ("schedule.lr_initial=nan", "schedule.lr_initial is nan; it must be a finite number."),
    ("decode.acoustic_scales=[1,x]",
     "decode.acoustic_scales is [1, 'x']; it must be a list of finite numbers, such as [0.1,0.2]."),
    ("optimizer.max_change=-1", "optimizer.max_change is -1.0; it must be at least 0."),
    ("seed=${no.such.key}", "seed is ${no.such.key}, an unresolved interpolation; give a value."),
    ("seed=1,2", "seed=1,2 lists several values; add --multirun to run them one after another."),
    ("trian", "'trian' is not a setting; write key=value, such as seed=1. Did you mean train?"),
])
def test_one_wrong_override_gives_one_sentence(override: str, sentence: str) -> None:
    assert problems_of(override) == [sentence]


@pytest.mark.parametrize(("overrides", "start"), [
    (["objective=mmi", "optimizer=kfac"], "optimizer.kind is kfac, which needs the loss of single frames"),
    (["objective=lfmmi", "augment=spec"], "augment.spec masks windows of single frames"),
    (["objective=mmi", "objective.chunk_frames=150"], "objective.chunk_frames is 150, but objective.kind=mmi does not use it"),
    (["objective=lfmmi", "model.num_subclasses=200"], "objective.kind is lfmmi, and the model changes during training"),
    (["init_model=runs/x", "model.add_layers_period=2"], "init_model is runs/x with model.add_layers_period 2"),
])
def test_settings_incompatible_with_sequence_objectives_are_reported(overrides: list[str], start: str) -> None:
    [problem] = problems_of(*overrides)
    assert problem.startswith(start)


def test_an_unknown_key_without_a_neighbour_lists_its_section() -> None:
    assert problems_of("model.foo=1") == [
        "model.foo is not a setting. model has " + ", ".join(field.name for field in fields(ModelConfig)) + "."]


def test_names_of_other_trainers_lead_to_settings_that_exist() -> None:
    assert set(OTHER_NAMES.values()) <= set(paths())
    words = {word for name in SETTINGS_INSTEAD for word in instead_of(name, "1").split() if "=" in word}
    # an argument of ngsgd.train
    keys = {word.partition("=")[0] for word in words} - {"resume"}
    assert keys <= {*paths(), *compose.groups()}


def test_all_mistakes_are_reported_at_once() -> None:
    [problem] = problems_of("name=[1")
    assert problem.startswith("'name=[1' cannot be read") and "\n" not in problem
    problems = problems_of("optimizer=adma", "model.fo=1", "schedule.num_epochs=abc", "optimizer.max_change=-1", "+x=1")
    assert len(problems) == 5


@pytest.mark.parametrize("overrides", [
    ["schedule.lr_initial=1e-5", "schedule.lr_final=abc"], ["schedule.lr_initial=-1", "schedule.lr_final=2"],
    ["model.kind=pnorm", "model.pnorm_group=0"], ["tune.proxy.outer_iters=0"], ["data.lm={a: 1}", "data.lm_order=3"]])
def test_a_wrong_value_causes_no_second_sentence_from_a_rule(overrides: list[str]) -> None:
    assert len(problems_of(*overrides)) == 1


@pytest.mark.entry("C3", "a command line has a wrong value and, elsewhere, settings that do not go together", "error",
                   "ConfigError reports both: a rule is dropped only if it is about the option with the wrong value")
@pytest.mark.parametrize("wrong", ["data.lm={a: 1}", "optimizer.max_change=-1", "seed=x", "model.args=3", "data={lm: [1]}"])
def test_a_rule_about_other_options_is_reported_with_a_wrong_value(wrong: str) -> None:
    rule = ["decode.graph=given", "data.lm_order=3"]
    [alone] = problems_of(*rule)
    both = problems_of(*rule, wrong)
    assert alone in both and len(both) == 2


@pytest.mark.entry("C3")
def test_a_stored_configuration_reports_both(tmp_path: Path) -> None:
    values = plain(asdict(RunConfig()))
    values["decode"]["graph"], values["data"]["lm_order"], values["data"]["lm"] = "given", 3, {"a": 1}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError) as caught:
        read_config(tmp_path / "config.yaml")
    assert len(caught.value.problems) == 2


@pytest.mark.entry("C3")
@pytest.mark.parametrize("overrides", [
    {"decode": {"graph": "given"}, "data": {"lm_order": 3}}, {"model": {"kind": "pnorm", "hidden_dim": 7}},
    {"objective": {"kind": "mmi"}, "augment": {"spec": True}, "optimizer": {"kind": "kfac"}}, {"outer": {"gain": 9.0}},
    {"cluster": {"exchange": "nccl"}, "outer": {"overlap": True}}, {"sites": {"jobs": {"a": 1}}},
    {"name": "/"}, {"model": {"dropout_schedule": "x"}}])
def test_a_problem_names_options_that_exist(overrides: dict[str, Any]) -> None:
    config, wrong = build(with_defaults(overrides))
    found = config_problems(config, wrong)
    assert found and not wrong
    assert {option for problem in found for option in problem.options} <= {*paths(), "augment"}


def test_a_users_file_is_used_and_its_mistakes_are_named(tmp_path: Path) -> None:
    file = tmp_path / "recipe" / "mine.yaml"
    file.parent.mkdir()
    file.write_text("# @package _global_\nschedule:\n  num_epochs: 2\n")
    assert compose.compose(["recipe=mine"], sources=Sources(tmp_path)).schedule.num_epochs == 2.0
    file.write_text("# @package _global_\nschedule:\n  num_epoch: 2\n")
    assert problems_of("recipe=mine", sources=Sources(tmp_path)) == [
        "schedule.num_epoch is not a setting. Did you mean schedule.num_epochs?"]
    file.write_text("schedule:\n  num_epochs: [2\n  seed: 3\n")
    [problem] = problems_of("recipe=mine", sources=Sources(tmp_path))
    assert f"{file}:3: this is not valid YAML" in problem


@pytest.mark.slow
def test_sweep_is_checked_value_by_value() -> None:
    check_sweep(["optimizer=ngsgd,sgd", "seed=range(0,3)"])
    with pytest.raises(ConfigError) as caught:
        check_sweep(["augment=none,rain", "schedule.num_epochs=1,abc"])
    assert caught.value.problems == ["augment=rain is not a choice; choose one of kaldi, none, robust, rooms, spec.",
                                     "schedule.num_epochs is 'abc'; it must be a number."]


def test_yaml_round_trip_is_exact(tmp_path: Path) -> None:
    config = compose.compose(["schedule.lr_initial=0.1234567890123", "schedule.lr_final=1e-7", "name='a: b #c'"])
    (tmp_path / "config.yaml").write_text(config_file.to_yaml(config))
    assert read_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(("text", "told"), [
    ("seed: [1\n", "YAML"), ("", "settings"), ("- 1\n", "settings"), ("seed: 1\n", "output_dir"),
    # cut off, and not filled with defaults
    (config_file.to_yaml(RunConfig()).partition("tracking:")[0], "tracking")])
def test_damaged_stored_configuration_is_reported(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_config(tmp_path / "config.yaml")


def test_a_complete_file_has_the_defaults_of_settings_that_it_lacks(tmp_path: Path) -> None:
    config = compose.compose(["seed=3"])
    old = {name: value for name, value in plain(asdict(config)).items() if name != "ivectors"}
    del old["features"]["num_ceps"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(old, sort_keys=False, explicit_end=True))
    assert read_config(tmp_path / "config.yaml") == config
    old["features"]["colour"] = "red"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(old, sort_keys=False, explicit_end=True))
    with pytest.raises(ConfigError, match=r"features\.colour"):
        read_config(tmp_path / "config.yaml")


def test_flatten_has_every_leaf_once() -> None:
    flat = flatten(RunConfig())
    assert flat["decode.word_penalties"] == RunConfig().decode.word_penalties

    def count(node: object) -> int:
        return sum(map(count, node.values())) if isinstance(node, dict) else 1
    assert len(flat) == count(asdict(RunConfig()))


def test_a_kind_has_no_file_with_settings() -> None:
    for group in ("model", "optimizer", "outer", "cluster", "objective"):
        files = {file.stem for file in (conf_dir() / group).glob("*.yaml")}
        assert not files & set(choices_of(types_of(RunConfig)[group], "kind"))


@pytest.mark.parametrize("name", ["exp/a1", "../../x", "/tmp/x", "..", ".hidden", "-flag", "a\\b", "a" * 300, "ü" * 101, "a\nb",
                                  "a\x1b[2Jb", " a", "a "])
def test_a_name_that_is_no_part_of_a_folders_name_is_rejected(name: str) -> None:
    problems = check(replace(RunConfig(), name=name))
    assert len(problems) == 1 and problems[0].startswith("name ")


@pytest.mark.parametrize("name", ["", "first", "exp.a1_b-2", "größe 3", "run@home", "a=1,b=2", "x" * 200])
def test_names_that_are_taken(name: str) -> None:
    assert check(replace(RunConfig(), name=name)) == []


@pytest.mark.parametrize("digits", [25, 400, 5000])
@pytest.mark.parametrize("key", ["seed", "decode.max_active", "model.hidden_dim", "egs.samples_per_iter", "schedule.num_epochs"])
def test_numbers_that_nothing_can_hold_are_rejected(key: str, digits: int) -> None:
    problems = problems_of(f"{key}={'1' * digits}")
    assert len(problems) == 1 and len(problems[0]) < 400


@pytest.mark.slow
@pytest.mark.parametrize("text", ["[" * 5000, "a: " + "[" * 5000 + "]" * 5000, "a: {1: {[2]: 3}}", "? [a]\n: b", "\x00"])
def test_a_stored_configuration_that_no_parser_takes_is_one_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config(tmp_path / "config.yaml")
    assert len(caught.value.problems) == 1 and "config.yaml" in str(caught.value)

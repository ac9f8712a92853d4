"""Settings without effect are refused, and the settings of a recipe are composed."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from ngsgd.config import METHODS, OptimizerConfig, RunConfig, TaskConfig, choices_of, unused
from ngsgd.config.build import build, flatten, leaves, plain, with_defaults
from ngsgd.config.unused import of_speech
from ngsgd.errors import ConfigError
from ngsgd.launcher import cli
from ngsgd.launcher.commands.train import train
from ngsgd.launcher.config import compose, config_builder
from ngsgd.launcher.config.sources import Sources, conf_dir
from ngsgd.pipeline import api
from ngsgd.pipeline.recipes import recipe
from tests.launcher.config.test_compose import problems_of
from tests.launcher.records import Command


def recipe_file(folder: Path, content: dict[str, Any]) -> Path:
    (folder / "recipe").mkdir()
    (folder / "recipe" / "mine.yaml").write_text("# @package _global_\n" + yaml.safe_dump(content))
    return folder


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Hydra and its configuration files, once for all tests of the file."""
    compose.compose([])


# Settings without effect --------------------------------------------------------------------------


@pytest.mark.parametrize("overrides", [["data.store=s3://bucket/data"], ["data.node_cache_gb=3"]])
@pytest.mark.parametrize("kind", ["local", "in_process"])
def test_options_of_other_nodes_need_other_nodes(overrides: list[str], kind: str) -> None:
    [problem] = problems_of(*overrides, f"cluster={kind}")
    assert overrides[0].split("=")[0] in problem
    compose.compose([*overrides, "cluster=ray", "cluster.address=head:6379"])
    # a run of `ngsgd train` without an address; `ngsgd submit` adds one
    with pytest.raises(ConfigError):
        train(compose.compose([*overrides, "cluster=ray"]), quiet=True)


@pytest.mark.entry("Nc15", "`ngsgd train` with and without `cluster.address`, `RAY_ADDRESS` and `cluster=`", "works",
                   "without an address workers are processes of this machine, and Ray is not imported; with one, or with "
                   "`RAY_ADDRESS`, they are actors on that Ray cluster. `cluster=ray` without either starts a Ray instance here, "
                   "and `cluster=local` ignores `RAY_ADDRESS`. Jobs of `ngsgd submit` join the cluster that runs them")
@pytest.mark.parametrize("variable", ["", "local", "auto", "10.0.0.1:6379"])
@pytest.mark.parametrize(("overrides", "kind", "address"), [
    ([], "", ""), (["cluster=ray"], "ray", ""), (["cluster.kind=ray"], "ray", ""), (["cluster.address="], "local", ""),
    (["cluster=local"], "local", ""), (["cluster=in_process"], "in_process", ""), (["cluster=slurm"], "slurm", ""),
    (["cluster.address=head:6379"], "ray", "head:6379"), (["cluster=ray", "cluster.address=auto"], "ray", "auto")])
def test_an_address_makes_a_run_of_ray_and_nothing_else_does(overrides: list[str], kind: str, address: str, variable: str,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", variable)
    # auto reads the variable
    named = "auto" if variable not in ("", "local") and (kind, address) in (("", ""), ("ray", "")) else address
    found = compose.compose(overrides).cluster
    assert (found.kind, found.address) == (kind or ("ray" if named else "local"), named)


@pytest.mark.entry("Nc15")
def test_a_recipe_may_name_the_cluster(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    for name, section in (("there", "address: head:6379"), ("here", "kind: local"), ("ray", "kind: ray")):
        (tmp_path / "recipe" / f"{name}.yaml").write_text(f"# @package _global_\ncluster:\n  {section}\n")
    found = {name: compose.compose([f"recipe={name}"], Sources(tmp_path)).cluster for name in ("there", "here", "ray")}
    assert [(one.kind, one.address) for one in found.values()] == [("ray", "head:6379"), ("local", ""), ("ray", "")]


@pytest.mark.parametrize("url", ["/data", "http://host/data", "s3://user:word@bucket/data", "s3://"])
def test_the_store_of_archives_is_object_storage_without_credentials(url: str) -> None:
    [problem] = problems_of(f"data.store='{url}'", "cluster.address=head:6379")
    assert "data.store" in problem and "word@" not in problem


@pytest.mark.entry("R4", "you give an option that the chosen kind or switch does not use, such as `outer.lr=0.5` with "
                   "`outer.kind=bmuf`", "error",
                   "ConfigError before anything is made: it names the option, the kind and the options of that kind; the column "
                   "`used with` of the settings page lists all conditions")
@pytest.mark.parametrize(("overrides", "sentence"), [
    (["outer.lr=0.5"], "outer.lr is 0.5, but outer.kind=bmuf does not use it; remove it. Options of bmuf: "
     "gain, overlap, ema_decay."),
    (["outer=average", "outer.gain=2"], "outer.gain is 2.0, but outer.kind=average does not use it; remove it. Options of "
     "average: overlap, ema_decay."),
    (["optimizer=sgd", "optimizer.rank_in=40"], "optimizer.rank_in is 40, but optimizer.kind=sgd does not use it; remove it. "
     "Options of sgd: momentum, max_change, max_param_change, weight_decay, backstitch_scale, layer_options."),
    (["optimizer=kfac", "optimizer.beta1=0.5"], "optimizer.beta1 is 0.5, but optimizer.kind=kfac does not use it; "
     "remove it. Options of kfac: momentum, max_change, max_param_change, weight_decay, layer_options, "
     "curvature_state, damping, curvature_interval, inverse_interval, ema_decay, fisher, graft, kl_clip, skip."),
    (["optimizer.damping=0.1"], "optimizer.damping is 0.1, but optimizer.kind=ngsgd does not use it; remove it. "),
    (["model.pnorm_group=2"], "model.pnorm_group is 2, but model.kind=relu does not use it"),
    (["model=tdnn", "model.bottleneck_dim=32"], "model.bottleneck_dim is 32, but model.kind=tdnn does not use it"),
    (["objective=mmi", "objective.chunk_frames=9"], "objective.chunk_frames is 9, but objective.kind=mmi does not use it; "
     "remove it. Options of mmi: acoustic_scale, ce_weight."),
    (["cluster=local", "cluster.address=auto"], "cluster.address is auto, but cluster.kind=local does not use it"),
    (["data.oov_word=x"], "data.oov_word is x, but data.corpus=digits does not use it"),
    (["features.num_ceps=20"], "features.num_ceps is 20, but features.kind=fbank does not use it"),
    (["augment.noise_dir=here"], "augment.noise_dir is here, but it has no effect with augment.noise=false; remove it, or set "
     "augment.noise=true."),
    (["schedule.sync_interval_s=5"], "schedule.sync_interval_s is 5.0, but it has no effect with "
     "schedule.load_balancing=none; remove it, or set schedule.load_balancing=time."),
    (["tracking.kind=none", "tracking.uri=x"], "tracking.uri is x, but tracking.kind=none does not use it"),
    (["model._target_=nets:Net", "model.hidden_dim=64"], "model.hidden_dim is 64, but model._target_=nets:Net does not use it; "
     "remove it."),
    (["model=pnorm", "model._target_=nets:Net"], "model.kind is pnorm, but model._target_=nets:Net does not use it; remove it."),
])
def test_an_option_that_is_not_used_is_refused_by_name(overrides: list[str], sentence: str) -> None:
    [problem] = problems_of(*overrides)
    assert problem.startswith(sentence)


@pytest.mark.entry("P1", "you set an option of another method in the library or with `optimizer.*`", "error",
                   "ConfigError names the method and its options, from the library and from the command line")
@pytest.mark.parametrize("kind", METHODS)
def test_every_option_of_another_method_is_refused(kind: Any) -> None:
    # empty, these two are no mistake
    dead = [spec.name for spec in fields(OptimizerConfig) if spec.name not in (*options_of(kind), "args", "search_path")]
    given = config_builder.Given(frozenset(f"optimizer.{name}" for name in dead))
    config = replace(RunConfig(), optimizer=OptimizerConfig(kind))
    refused = [setting.path for setting in unused(config)
               if setting.path.startswith("optimizer.") and config_builder.is_refused(setting, given)]
    assert refused == [f"optimizer.{name}" for name in dead] and "kind" not in dead
    assert len(dead) >= 8


def options_of(kind: Any) -> list[str]:
    dead = {setting.path for setting in unused(RunConfig(optimizer=OptimizerConfig(kind)))}
    return [spec.name for spec in fields(OptimizerConfig) if f"optimizer.{spec.name}" not in dead]


@pytest.mark.entry("R4")
def test_an_unused_option_is_refused_at_its_default_too_and_on_the_command_line_before_data_is_made(
        tmp_path: Path, command: Command) -> None:
    assert problems_of("outer.lr=0.7")
    told = command("train", f"output_dir={tmp_path / 'runs'}", "outer=average", "outer.gain=2", code=2).err
    assert "outer.gain is 2.0, but outer.kind=average" in told
    assert not (tmp_path / "runs").exists()


@pytest.mark.entry("R4")
def test_a_recipe_may_set_options_that_another_choice_on_the_command_line_makes_unused(tmp_path: Path) -> None:
    folder = recipe_file(tmp_path, {"model": {"kind": "pnorm", "pnorm_group": 4, "hidden_dim": 400},
                                    "outer": {"kind": "diloco", "lr": 0.5}, "optimizer": {"rank_in": 30}})
    assert compose.compose(["recipe=mine"], sources=Sources(folder)).outer.lr == 0.5
    chosen = compose.compose(["recipe=mine", "model=relu", "outer=average", "optimizer=kfac"], sources=Sources(folder))
    assert (chosen.model.kind, chosen.outer.kind, chosen.optimizer.kind) == ("relu", "average", "kfac")
    assert compose.compose(["recipe=mine", "model._target_=nets:Net"], sources=Sources(folder)).model.label == "Net"


@pytest.mark.entry("R4")
def test_a_recipe_that_sets_an_option_of_another_kind_than_its_own_is_refused(tmp_path: Path) -> None:
    folder = recipe_file(tmp_path, {"outer": {"kind": "average", "lr": 0.5}})
    [problem] = problems_of("recipe=mine", sources=Sources(folder))
    assert problem.startswith("outer.lr is 0.5, but outer.kind=average does not use it")


@pytest.mark.entry("R4")
@pytest.mark.parametrize("recipe", compose.groups()["recipe"])
def test_other_choices_than_a_recipe_was_written_for_are_no_mistake(recipe: str) -> None:
    others = ["model=pnorm", "optimizer=soap", "outer=average", "augment=spec", "cluster=local"]
    assert not refusals([f"recipe={recipe}", *others])
    assert not refusals([f"recipe={recipe}", "model._target_=nets:Net", "objective=mmi"])


def refusals(overrides: list[str]) -> list[str]:
    try:
        compose.compose(overrides)
    # rules about values that do not go together, such as too little context
    except ConfigError as error:
        return [problem for problem in error.problems if "not use" in problem or "no effect" in problem]
    return []


@pytest.mark.entry("R4")
def test_every_condition_names_a_switch_of_its_section_and_values_that_it_can_have() -> None:
    run = RunConfig()
    for section in (getattr(run, spec.name) for spec in fields(run) if is_dataclass(getattr(run, spec.name))):
        specs = {spec.name: spec for spec in fields(section)}
        for spec in specs.values():
            for term in filter(None, spec.metadata.get("used", "").split(" & ")):
                name, _, wanted = term.lstrip("!").partition("=")
                assert name in specs and name != spec.name, term
                assert not wanted or set(wanted.split("|")) <= set(choices_of(type(section), name)), term
    assert not [setting.path for setting in unused(run) if setting.is_set]


# Kinds and their defaults -------------------------------------------------------------------------


OF_KINDS = {name: choices_of(type(section), "kind") for name, section in vars(RunConfig()).items()
            if is_dataclass(section) and hasattr(section, "kind")}
# a group chooses the kind of these sections
GROUPS = [name for name in OF_KINDS if name in compose.groups()]
# kinds that a run without further settings refuses
ALONE = {"combination": ("generalized",), "features": ("given",)}


def in_all_ways(section: str, kind: str, folder: Path) -> dict[str, RunConfig]:
    """The settings of a kind chosen in each way, without the defaults of the entry point."""
    place = {"cluster.kind": "local", "tracking.kind": "none"}
    fixed = [f"{path}={value}" for path, value in place.items() if not path.startswith(f"{section}.")]
    ways = {"kind": compose.compose([*fixed, f"{section}.kind={kind}"])}
    if section in GROUPS:
        ways["group"] = compose.compose([*fixed, f"{section}={kind}"])
    file = folder / "recipe" / "one.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"# @package _global_\n{section}: {{kind: {kind}}}\n")
    ways["recipe"] = compose.compose(["recipe=one", *fixed], sources=Sources(folder))
    ways["Python recipe"] = recipe("digits", **{section: {"kind": kind}})
    if not of_speech(section):
        given = {"cluster": kind} if section == "cluster" else {"cluster": "local", section: kind}
        config = api._config({name: one for name, one in given.items() if name != "cluster"}, 2, given["cluster"], "f")
        ways["ngsgd.train"] = replace(config, task=TaskConfig())
    return ways


# defaults of a kind -> a setting and its value
OF_ONE_KIND = {("optimizer", "adam"): ("schedule.lr_initial", 0.001), ("model", "pnorm"): ("model.hidden_dim", 1000),
               ("objective", "mmi"): ("combination.kind", "none")}


@pytest.mark.entry("C1", "you choose a kind as `optimizer=adam`, as `optimizer.kind=adam`, in a recipe or in `ngsgd.train`",
                   "works", "one table of defaults: all ways compose the same settings, for every kind of every section")
@pytest.mark.entry("P3", "you choose a method by `optimizer.kind=soap` instead of `optimizer=soap`", "works",
                   "both compose the same settings, the learning rate included")
@pytest.mark.parametrize(("section", "kind"), [
    pytest.param(section, kind, marks=() if (section, kind) in OF_ONE_KIND else pytest.mark.slow)
    for section, kinds in OF_KINDS.items() for kind in kinds if kind not in ALONE.get(section, ())])
def test_every_kind_has_the_same_settings_in_all_ways(section: str, kind: str, tmp_path: Path) -> None:
    ways = {way: flatten(config) for way, config in in_all_ways(section, kind, tmp_path).items()}
    chosen = ways["kind"]
    assert chosen[f"{section}.kind"] == kind
    for way, flat in ways.items():
        assert flat == chosen, way
    if (section, kind) in OF_ONE_KIND:
        path, value = OF_ONE_KIND[section, kind]
        assert chosen[path] == value != flatten(RunConfig())[path]


@pytest.mark.entry("C1")
def test_a_kind_on_the_command_line_replaces_what_a_recipe_set_for_another(tmp_path: Path) -> None:
    content = {"optimizer": {"kind": "adam"}, "model": {"hidden_dim": 512}, "schedule": {"num_epochs": 3}}
    folder = recipe_file(tmp_path, content)
    assert compose.compose(["recipe=mine"], sources=Sources(folder)).schedule.lr_initial == 0.001
    for word in ("kind=", "="):
        name = "{}." if word == "kind=" else "{}"
        lines = [f"{name.format(section)}{word}{kind}" for section, kind in (("optimizer", "ngsgd"), ("model", "pnorm"))]
        chosen = compose.compose(["recipe=mine", *lines], sources=Sources(folder))
        # the rate was the default of adam alone; the number of epochs is that of the recipe
        assert (chosen.schedule.lr_initial, chosen.model.hidden_dim, chosen.schedule.num_epochs) == (0.005, 1000, 3.0)
    assert recipe("an4", data={"source": "here"}, model={"kind": "pnorm"}).model.hidden_dim == 1000


@pytest.mark.entry("P3")
def test_defaults_of_a_kind_are_printed_and_may_be_changed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--cfg", "job", "--resolve", "optimizer=soap", "optimizer.ema_decay=0.9"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)["optimizer"]
    assert (printed["damping"], printed["ema_decay"], printed["curvature_state"]) == (1e-8, 0.9, "keep")


@pytest.mark.parametrize(("words", "rates"), [
    (["optimizer=adam"], (0.001, 0.0001)),
    (["optimizer=muon", "schedule.lr_final=0.005"], (0.01, 0.005)),
    (["optimizer.kind=adam"], (0.001, 0.0001)),
    (["optimizer.kind=adam", "schedule.lr_initial=0.004"], (0.004, 0.0001)),
    (["optimizer=kfac"], (0.002, 0.0002)),
    ([], (0.002, 0.0002)),
])
def test_optimizers_with_steps_of_a_fixed_length_set_their_learning_rate(words: list[str], rates: tuple[float, float]) -> None:
    schedule = compose.compose(["recipe=fsdd", *words]).schedule
    assert (schedule.lr_initial, schedule.lr_final) == rates


# Recipes ------------------------------------------------------------------------------------------


def leaves_of(file: Path) -> dict[str, Any]:
    content = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(content, dict)
    return dict(leaves(content, ""))


@pytest.mark.entry("S1", "your recipe sets `model.kind`, `outer.kind`, `optimizer.kind` or any other setting", "works",
                   "the settings of a recipe are composed; a group or a setting on the command line wins over it")
@pytest.mark.parametrize("recipe", compose.groups()["recipe"])
def test_settings_of_a_recipe_are_composed(recipe: str) -> None:
    composed = plain(flatten(compose.compose([f"recipe={recipe}"])))
    if composed["data.corpus"] != "digits":
        composed = plain(flatten(compose.compose([f"recipe={recipe}", "data.source=here"])))
    for path, value in leaves_of(conf_dir() / "recipe" / f"{recipe}.yaml").items():
        wanted = value.replace("${data.source}", "here") if isinstance(value, str) else value
        assert composed[path] == wanted, path


@pytest.mark.entry("S1")
@pytest.mark.parametrize("content", [
    {"model": {"kind": "tdnn", "tdnn_offsets": "-2,0,2 -1,1 0 0"}, "optimizer": {"kind": "sgd"},
     "outer": {"kind": "diloco", "lr": 0.5}, "cluster": {"kind": "local"}, "augment": {"speed": "all"}},
    {"optimizer": {"kind": "soap", "beta1": 0.8}, "outer": {"kind": "average"}},
    {"objective": {"kind": "mmi", "acoustic_scale": 0.2}, "combination": {"kind": "none"}, "model": {"kind": "tdnnf"}},
])
def test_settings_of_an_artificial_recipe_are_composed(content: dict[str, Any], tmp_path: Path) -> None:
    folder = recipe_file(tmp_path, content)
    composed = flatten(compose.compose(["recipe=mine"], sources=Sources(folder)))
    assert {path: composed[path] for path in dict(leaves(content, ""))} == dict(leaves(content, ""))


@pytest.mark.entry("S1")
def test_the_command_line_wins_over_a_recipe(tmp_path: Path) -> None:
    folder = recipe_file(tmp_path, {"model": {"kind": "tdnn"}, "outer": {"kind": "diloco"}})
    chosen = compose.compose(["recipe=mine", "model=pnorm", "outer.kind=average"], sources=Sources(folder))
    assert (chosen.model.kind, chosen.outer.kind) == ("pnorm", "average")


def test_skipped_layers_may_be_a_list() -> None:
    """As the `skip` of the library classes."""
    config, problems = build(with_defaults({"optimizer": {"kind": "kfac", "skip": ["embed", "*.gamma"]}}))
    assert config.optimizer.skip == "embed,*.gamma" and not problems

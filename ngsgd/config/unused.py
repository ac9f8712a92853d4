"""Options that have no effect with the other options of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

from ngsgd.config.build import flatten, kinds_in
from ngsgd.config.option import default_of, shown
from ngsgd.config.run import RunConfig

# sections and options of speech recognition, which a custom task does not have
_OF_SPEECH = ("init_model", "data", "features", "adaptation", "ivectors", "align", "egs", "augment", "model", "objective",
              "decode", "tune", "tracking.curvature_frames", "tracking.registered_model_name")


@dataclass(frozen=True)
class Unused:
    """An option that has no effect with the other options of a run."""

    path: str  # such as outer.lr
    value: Any
    is_set: bool  # to another value than its default
    switches: tuple[str, ...]  # the options that decide whether it is used
    # the one of them that decides against it, its value, and the values that would use the option
    switch: str
    is_now: Any
    wanted: str
    options: tuple[str, ...]  # options of the same section that have an effect

    @property
    def sentence(self) -> str:
        """The error message for the person who set it."""
        given = f"{self.path} is {shown(self.value)}, but"
        now = f"{self.switch}={shown(self.is_now)}"
        if self.switch.rpartition(".")[2] in ("kind", "corpus") and self.wanted:
            options = (f"Options of {self.is_now}: {', '.join(self.options)}." if self.options
                       else f"{self.is_now} has no options.")
            return f"{given} {now} does not use it; remove it. {options}"
        if self.wanted == "!":
            return f"{given} {now} does not use it; remove it."
        needed = self.wanted.replace("|", " or ") or ("true" if self.is_now is False else "VALUE")
        return f"{given} it has no effect with {now}; remove it, or set {self.switch}={needed}."


def unused(config: RunConfig) -> Iterator[Unused]:
    """Yield all options of a run that have no effect in it, whatever their value."""
    task, kinds = config.task._target_, kinds_in(asdict(config))
    if task:
        default = flatten(RunConfig())
        for path, value in flatten(config).items():
            if of_speech(path):
                yield Unused(path, value, value != default.get(path), switches=("task._target_",),
                             switch="task._target_", is_now=task, wanted="!", options=())
    for spec in fields(config):
        section = getattr(config, spec.name)
        if is_dataclass(section):
            yield from (one for one in unused_in(section, f"{spec.name}.", kinds) if not (task and of_speech(one.path)))


def of_speech(path: str) -> bool:
    """Whether a section or an option is of speech recognition."""
    return any(f"{path}.".startswith(f"{one}.") for one in _OF_SPEECH)


def unused_in(section: Any, prefix: str = "", kinds: Sequence[str] = ()) -> Iterator[Unused]:
    """Yield those of one section of a run with these kinds; paths begin with `prefix`."""
    terms = {spec.name: [term for term in spec.metadata.get("used", "").split(" & ") if term] for spec in fields(section)}
    broken = {name: next((term for term in of_it if not _holds(term, section)), "") for name, of_it in terms.items()}
    for spec in fields(section):
        if term := broken[spec.name]:
            name, _, wanted = term.lstrip("!").partition("=")
            value = getattr(section, spec.name)
            options = tuple(other for other in broken if not broken[other] and other not in (name, "_target_")
                            and not is_dataclass(getattr(section, other)))
            yield Unused(path=f"{prefix}{spec.name}", value=value,
                         is_set=value != default_of(spec, [getattr(section, "kind", ""), *kinds]),
                         switches=tuple(prefix + other.lstrip("!").partition("=")[0] for other in terms[spec.name]),
                         switch=prefix + name, is_now=getattr(section, name),
                         wanted="!" if term.startswith("!") else wanted, options=options)


def _holds(term: str, section: Any) -> bool:
    name, _, wanted = term.lstrip("!").partition("=")
    value = getattr(section, name)
    return (value in wanted.split("|") if wanted else bool(value)) != term.startswith("!")

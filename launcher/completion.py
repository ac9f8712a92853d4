"""Shell completion: commands, flags, runs, settings and their values, without importing Hydra."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from ngsgd.errors import EXIT_OK, ConfigError
from ngsgd.launcher import help as texts

# a word that ends with = or . continues; bash treats = as the end of a word
_SCRIPTS = {
    "bash": """\
_ngsgd() {
    local IFS=$'\\n' line="${COMP_LINE:0:$COMP_POINT}"
    COMPREPLY=($(COMP_LINE="$line" ngsgd completion --words 2>/dev/null))
    [[ ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace
    local last="${line##* }"
    if [[ $last == *=* && $COMP_WORDBREAKS == *=* ]]; then
        COMPREPLY=("${COMPREPLY[@]#"${last%%=*}="}")
    fi
}
complete -o bashdefault -o default -F _ngsgd ngsgd
""",
    "zsh": """\
_ngsgd() {
    local -a found
    found=(${(f)"$(COMP_LINE="$LBUFFER" ngsgd completion --words 2>/dev/null)"})
    compadd -S '' -- ${(M)found:#*[=.]}
    compadd -- ${found:#*[=.]}
    (( $#found )) || _files
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _ngsgd ngsgd
""",
    "fish": """\
function __ngsgd_words
    COMP_LINE=(commandline --cut-at-cursor) ngsgd completion --words 2>/dev/null
end
complete --command ngsgd --no-files --condition __fish_is_first_arg --arguments '(__ngsgd_words)'
complete --command ngsgd --condition 'not __fish_is_first_arg' --arguments '(__ngsgd_words)'
""",
}
_INSTALL = {
    "bash": 'eval "$(ngsgd completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(ngsgd completion zsh)" in ~/.zshrc',
    "fish": "ngsgd completion fish | source, in ~/.config/fish/config.fish",
}
_TAKE_A_RUN = ("resume", "stop", "transcribe", "decode", "evaluate", "status", "logs", "report", "compare", "info", "why",
               "verify", "export")
_TAKE_SETTINGS = ("train", "tune", "align", "submit", "doctor", "plan", "simulate")
_PARTS_OF_TUNE = ("probe", "check", "run", "transfer")
Help = Callable[[str], object]


def command(arguments: list[str], print_help: Help) -> int:
    """`ngsgd completion SHELL`, and the query of the shells' scripts."""
    # install=bash and query=bash: the notation of Hydra
    word = arguments[0].removeprefix("install=") if arguments else ""
    if word in ("-h", "--help"):
        print(f"usage: ngsgd completion {{{','.join(_SCRIPTS)}}}\n\nPrint the completion script "
              "of a shell. To use it:\n"
              + "\n".join(f"  {shell:6}{how}" for shell, how in _INSTALL.items()))
    elif word == "--words" or word.startswith("query="):
        print("\n".join(words(os.environ.get("COMP_LINE", ""), print_help)))
    elif word in _SCRIPTS:
        print(_SCRIPTS[word], end="")
    else:
        raise ConfigError(f"ngsgd completion needs a shell; choose {', '.join(_SCRIPTS)}.")
    return EXIT_OK


def words(line: str, print_help: Help) -> list[str]:
    """Return the words that can complete the last word of a command line.

    Args:
        line: the command line up to the cursor, with the name of the program.
        print_help: prints the help of a command.
    """
    *before, last = line.split(" ")
    before = [word for word in before[1:] if word]
    return [word for word in _offered(before, last, print_help) if word.startswith(last)]


def _offered(before: list[str], last: str, print_help: Help) -> Iterable[str]:
    """The words after `before`; they need not begin like `last`."""
    command, previous = (before[0], before[-1]) if before else ("", "")
    if not before or (before == ["help"]):
        return texts.COMMANDS
    if command == "completion":
        return _SCRIPTS
    if command == "settings" or (command == "train" and previous in ("-h", "--help")):
        from ngsgd.config.build import section_names
        from ngsgd.launcher.config import compose

        return dict.fromkeys([*compose.groups(), *section_names()])
    if last.startswith("-") or (len(before) > 1 and previous.startswith("-")):
        text = _help_of(command, print_help)
        if last.startswith("-"):
            return sorted(set(re.findall(r"--[a-z][a-z-]+", text)))
        if choices := re.search(rf"{re.escape(previous)} \{{([\w,-]+)\}}", text):
            return choices[1].split(",")
        if re.search(rf"{re.escape(previous)} RUN", text):
            return _runs()
    offered = _runs() if command in _TAKE_A_RUN else []
    if command == "tune" and len(before) == 1:
        return _PARTS_OF_TUNE
    return [*offered, *(_settings(last) if command in _TAKE_SETTINGS else [])]


def _settings(last: str) -> list[str]:
    """Groups, sections and keys; after = the choices."""
    # not needed to complete commands, flags and runs
    from ngsgd.config.build import section_names
    from ngsgd.launcher.config import compose, describe

    key, is_value, values = last.partition("=")
    groups = compose.groups()
    options = {one.path: one for one in describe.options()}
    if is_value:
        start = last[:len(last) - len(values.rpartition(",")[2])]
        return [f"{start}{choice}" for choice in groups.get(key, options[key].choices if key in options else ())]
    inner = [f"{path}=" for path in options if "." not in path or last.startswith(f"{path.partition('.')[0]}.")]
    sections = [f"{name}." for name in section_names() if not last.startswith(f"{name}.")]
    return [*(f"{group}=" for group in groups), *sections, *inner]


def _help_of(command: str, print_help: Help) -> str:
    """The help of a command; it lists the flags, so that there is no second list of them."""
    if command not in texts.COMMANDS:
        return ""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        print_help(command)
    return printed.getvalue()


def _runs() -> list[str]:
    """The runs under runs/, the newest first."""
    found = sorted(Path("runs").glob("*/config.yaml"), key=lambda file: file.stat().st_mtime, reverse=True)
    return [file.parent.name for file in found]

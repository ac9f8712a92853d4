"""Shell completion: commands, flags, runs, settings and their values, without importing Hydra."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from ngsgd.errors import EXIT_OK, ConfigError
from ngsgd.launcher import registry
from ngsgd.launcher.arguments import Parser

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
"""}
_INSTALL = {"bash": 'eval "$(ngsgd completion bash)" in ~/.bashrc', "zsh": 'eval "$(ngsgd completion zsh)" in ~/.zshrc',
            "fish": "ngsgd completion fish | source, in ~/.config/fish/config.fish"}


def command(arguments: Sequence[str]) -> int:
    """`ngsgd completion SHELL`, and the query of the shells' scripts."""
    word = arguments[0] if arguments else ""
    if word in ("-h", "--help"):
        print(f"usage: ngsgd completion {{{','.join(_SCRIPTS)}}}\n\nPrint the completion script of a shell. To use it:",
              *(f"  {shell:6}{how}" for shell, how in _INSTALL.items()), sep="\n")
    elif word == "--words":
        # the command line up to the cursor, with the name of the program
        *before, last = os.environ.get("COMP_LINE", "").split(" ")
        offered = _offered([one for one in before[1:] if one], last)
        print("\n".join(one for one in offered if one.startswith(last)))
    elif word in _SCRIPTS:
        print(_SCRIPTS[word], end="")
    else:
        raise ConfigError(f"ngsgd completion needs a shell; choose {', '.join(_SCRIPTS)}.")
    return EXIT_OK


def _offered(before: list[str], last: str) -> Iterable[str]:
    """The words after `before`; they need not begin like `last`."""
    name, previous = (before[0], before[-1]) if before else ("", "")
    commands = {one.name: one for one in registry.COMMANDS}
    if not before or (before == ["help"]):
        return commands
    if name == "completion":
        return _SCRIPTS
    if name == "settings" or (name == "train" and previous in ("-h", "--help")):
        from ngsgd.config.build import section_names
        from ngsgd.launcher.config import compose
        return dict.fromkeys([*compose.groups(), *section_names()])
    if name not in commands:
        return ()
    if last.startswith("-") or (len(before) > 1 and previous.startswith("-")):
        # its own parser has the flags
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            commands[name].run(["--help"])
        flags = Parser.newest.flags
        if last.startswith("-"):
            return sorted(flag for flag in flags if flag.startswith("--"))
        if previous in flags and flags[previous].choices:
            return map(str, flags[previous].choices or ())
        if previous in flags and flags[previous].metavar == "RUN":
            return _runs()
    takes = commands[name].takes
    return [*(_runs() if "runs" in takes else ()), *(_settings(last) if "settings" in takes else ())]


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
        choices = groups.get(key, options[key].choices if key in options else ())
        return [f"{start}{choice}" for choice in choices]
    inner = [f"{path}=" for path in options if "." not in path or last.startswith(f"{path.partition('.')[0]}.")]
    sections = [f"{name}." for name in section_names() if not last.startswith(f"{name}.")]
    return [*(f"{group}=" for group in groups), *sections, *inner]


def _runs() -> list[str]:
    found = sorted(Path("runs").glob("*/config.yaml"), reverse=True, key=lambda file: file.stat().st_mtime)
    return [file.parent.name for file in found]

"""``completion``: scripts with which shells complete command lines.

They are generated from the tables of commands and options, and call the program only to complete
names of journals.
"""

from __future__ import annotations

import importlib
import shlex
import sys
from typing import TYPE_CHECKING

from gazette_sdk.cli.program import Command, Invocation
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.server.options import BoundOption

if TYPE_CHECKING:
    from gazette_sdk.cli.program import Program


SHELLS = ("bash", "zsh", "fish")

NAMES = '%s journals list -o table --timeout 3s 2>/dev/null | tail -n +2 | cut -d" " -f1'
"""Command that prints names of journals."""


def completion_command(program: str) -> Command:
    """Return the command of a program that prints its scripts."""
    return Command(
        "completion",
        "Print a script with which a shell completes command lines",
        "gazette_sdk.cli.completion:run",
        details="The script is for bash, zsh or fish.",
        examples=(
            (f"source <({program} completion bash)", "in ~/.bashrc, or in ~/.zshrc with zsh"),
            (
                f"{program} completion fish > ~/.config/fish/completions/{program}.fish",
                "once, for fish",
            ),
        ),
        arguments="|".join(SHELLS),
        arguments_min=1,
        arguments_max=1,
    )


def run(invocation: Invocation) -> None:
    """Write the script of a shell to standard output."""
    module = importlib.import_module(f"gazette_sdk.cli.{invocation.program}")
    sys.stdout.write(script(getattr(module, invocation.program.upper()), invocation.arguments[0]))


def script(program: Program, shell: str) -> str:
    """Return the script of a program for a shell.

    Raises:
        ConfigurationError: there is none for the shell.
    """
    if shell not in SHELLS:
        raise ConfigurationError(f"no completion for {shell!r}; use one of: {', '.join(SHELLS)}")
    lines = _fish(program) if shell == "fish" else _bash(program, is_zsh=shell == "zsh")
    return "\n".join([f"# Completion of {program.name} for {shell}.", *lines, ""])


def _next_words(program: Program) -> dict[str, dict[str, str]]:
    """Return the words that may follow each beginning of commands, with their help.

    The beginnings are all commands, too. Words that are no command themselves have no help.
    """
    found: dict[str, dict[str, str]] = {}
    for command in program.commands:
        words = command.name.split()
        for place, word in enumerate(words):
            found.setdefault(" ".join(words[:place]), {}).setdefault(word, "")
        found[" ".join(words[:-1])][words[-1]] = command.summary
        found.setdefault(command.name, {})
    return found


def _arguments(command: Command) -> str:
    """Return the words that a command's argument may be, or the kind of them after a plus sign."""
    if "|" in command.arguments:
        return command.arguments.replace("|", " ")
    return f"+{command.completes or 'none'}"


def _values(command: Command, bound: BoundOption) -> str:
    """Return the choices of an option's values, or the kind of them after a plus sign."""
    if bound.field == "name" and command.completes == "journals":
        return "+journals"
    if bound.kind == "choice":
        return " ".join(bound.choices)
    return "+files" if bound.kind in {"text", "list"} else "+none"


# ----------------------------------------------------------------------- bash, zsh

_BASH = """\
_@NAME@() {
    local cur option='' word command='' skip='' head='' options='' values='' arguments='' i
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        word="${COMP_WORDS[i]}"
        if [[ "$word" == '=' ]]; then skip=1; continue; fi
        if [[ -n "$skip" ]]; then skip=''; continue; fi
        case "$word" in
            @VALUED@) skip=1 ;;
            -*) ;;
            *)
                case "${command:+$command }$word" in
                    @COMMANDS@) command="${command:+$command }$word" ;;
                    *) break ;;
                esac ;;
        esac
    done
    cur="${COMP_WORDS[COMP_CWORD]}"
    word="${COMP_WORDS[COMP_CWORD-1]}"
    if [[ "$cur" == '=' ]]; then option="$word"; cur=''
    elif [[ "$word" == '=' ]]; then option="${COMP_WORDS[COMP_CWORD-2]}"
    elif [[ "$cur" == --*=* ]]; then option="${cur%%=*}"; head="$option="; cur="${cur#*=}"
    elif [[ "$word" == -* ]]; then option="$word"
    fi
    case "$command" in
@CASES@
    esac
    [[ -z "$values" && "$cur" != -* ]] && values="$arguments"
    case "$values" in
        '') values="$options" ;;
        +none) return ;;
        +files)
            compopt -o default 2>/dev/null || COMPREPLY=($(compgen -f -P "$head" -- "$cur"))
            return ;;
        +journals) values="$(@JOURNALS@)" ;;
    esac
    COMPREPLY=($(compgen -W "$values" -P "$head" -- "$cur"))
}
complete -F _@NAME@ @NAME@
"""


def _bash(program: Program, *, is_zsh: bool) -> list[str]:
    commands = {command.name: command for command in program.commands}
    next_words = _next_words(program)
    valued: dict[str, None] = {}
    cases: list[str] = []
    for begin, words in next_words.items():
        options, values, arguments = ["--version"], dict[str, list[str]](), " ".join(words)
        if command := commands.get(begin):
            options, arguments = [], arguments or _arguments(command)
            for each in program.options_of(command):
                options += each.names
                if each.kind != "flag":
                    values.setdefault(_values(command, each), []).extend(each.names)
                    valued[each.names[0]] = None
        cases += [
            f"        '{begin}') options='{' '.join(options)} --help' arguments='{arguments}'",
            '            case "$option" in',
            *(f"            {'|'.join(names)}) values='{of}' ;;" for of, names in values.items()),
            "            esac ;;",
        ]
    text = _BASH.replace("@VALUED@", "|".join(valued)).replace("@CASES@", "\n".join(cases))
    text = text.replace("@COMMANDS@", "|".join(f"'{begin}'" for begin in next_words if begin))
    text = text.replace("@JOURNALS@", NAMES % program.name).replace("@NAME@", program.name)
    zsh = ["autoload -U +X compinit && compinit", "autoload -U +X bashcompinit && bashcompinit"]
    return [*(zsh if is_zsh else []), text.rstrip()]


# ----------------------------------------------------------------------- fish

_FISH = """\
function __@NAME@_words
    for word in (commandline -opc)[2..]
        string match -q -- '-*' $word; or echo $word
    end
end
function __@NAME@_in
    set -l words (__@NAME@_words)
    set -l length (count $argv)
    test (count $words) -ge $length; and test "$words[1..$length]" = "$argv"
end
function __@NAME@_at
    set -l words (__@NAME@_words)
    test "$words" = "$argv"
end
complete -c @NAME@ -f
complete -c @NAME@ -n '__@NAME@_at' -l version -d 'Print the version'
complete -c @NAME@ -l help -s h -d 'Print help'"""


def _fish(program: Program) -> list[str]:
    name = program.name
    lines = [_FISH.replace("@NAME@", name)]
    for begin, words in _next_words(program).items():
        start = f"complete -c {name} -n '{f'__{name}_at {begin}'.rstrip()}'"
        lines += [f"{start} -a {word} -d {shlex.quote(text)}" for word, text in words.items()]
    for command in program.commands:
        start = f"complete -c {name} -n '__{name}_in {command.name}'"
        if arguments := _fish_values(program, _arguments(command)):
            lines.append(f"{start} {arguments}")
        for each in program.options_of(command):
            parts = [start, "-l", each.long]
            if each.option.short:
                parts += ["-s", each.option.short]
            if each.kind != "flag":
                values = _fish_values(program, _values(command, each))
                parts += ["-r" if values == "-F" else "-x", values]
            lines.append(" ".join([*parts, "-d", shlex.quote(each.option.description)]))
    return lines


def _fish_values(program: Program, values: str) -> str:
    """Return the arguments of fish's ``complete`` for the values of an option or argument."""
    journals = f"({NAMES % program.name})"
    special = {"+files": "-F", "+none": "", "+journals": f"-a '{journals}'"}
    return special.get(values, f"-a '{values}'")

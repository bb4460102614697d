"""``completion``: scripts with which shells complete command lines.

They are generated from the tables of commands and options, and call the program only to complete
names of journals.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

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


def _options(program: Program, command: Command) -> Iterator[BoundOption]:
    for group in (*command.groups, *program.shared.get(command.name.split()[0], ())):
        yield from group.options


def _parents(program: Program) -> dict[str, list[Command]]:
    """Return the commands below each first word; directly below the program, for an empty one."""
    found: dict[str, list[Command]] = {"": []}
    for command in program.commands:
        parent, _, last = command.name.rpartition(" ")
        assert last
        found.setdefault(parent, []).append(command)
    return found


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
    every = [each for command in program.commands for each in _options(program, command)]
    valued = dict.fromkeys(f"--{each.long}" for each in every if each.kind != "flag")
    parents = _parents(program)
    cases: list[str] = []
    for parent, commands in parents.items():
        words = " ".join(dict.fromkeys(_next_word(each, parent) for each in commands))
        if not parent:
            words = " ".join(dict.fromkeys(each.name.split()[0] for each in program.commands))
        cases.append(f"        '{parent}') options='--help --version' arguments='{words}' ;;")
    for command in program.commands:
        cases += _bash_case(command, list(_options(program, command)))
    known = [*filter(None, parents), *(command.name for command in program.commands)]
    text = _BASH.replace("@VALUED@", "|".join(valued)).replace("@CASES@", "\n".join(cases))
    text = text.replace("@COMMANDS@", "|".join(f"'{name}'" for name in known))
    text = text.replace("@JOURNALS@", NAMES % program.name).replace("@NAME@", program.name)
    zsh = ["autoload -U +X compinit && compinit", "autoload -U +X bashcompinit && bashcompinit"]
    return [*(zsh if is_zsh else []), text.rstrip()]


def _next_word(command: Command, parent: str) -> str:
    return command.name.removeprefix(parent).split()[0]


def _bash_case(command: Command, options: Sequence[BoundOption]) -> list[str]:
    names = " ".join(name for each in options for name in _names(each))
    arguments = f"+{command.completes}" if command.completes else _fixed_arguments(command)
    by_values: dict[str, list[str]] = {}
    for each in options:
        if each.kind != "flag":
            by_values.setdefault(_values(command, each), []).extend(_names(each))
    cases = [
        f"                {'|'.join(names)}) values='{values}' ;;"
        for values, names in by_values.items()
    ]
    inner = ['            case "$option" in', *cases, "            esac"] if cases else []
    first = f"            options='{names} --help' arguments='{arguments}'"
    return [f"        '{command.name}')", first, *inner, "            ;;"]


def _fixed_arguments(command: Command) -> str:
    """Return the words that a command's argument may be, separated by blanks."""
    return command.arguments.replace("|", " ") if "|" in command.arguments else "+none"


def _names(bound: BoundOption) -> list[str]:
    short = [f"-{bound.option.short}"] if bound.option.short else []
    return [f"--{bound.long}", *short]


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
    for parent, commands in _parents(program).items():
        if parent:
            lines.append(f"complete -c {name} -n '__{name}_at' -a {parent}")
        for command in commands:
            word, at = _next_word(command, parent), f"__{name}_at {parent}".rstrip()
            lines.append(f"complete -c {name} -n '{at}' -a {word} -d {_quoted(command.summary)}")
    for command in program.commands:
        start = f"complete -c {name} -n '__{name}_in {command.name}'"
        if command.completes == "journals":
            lines.append(f"{start} -a '({NAMES % name})'")
        elif command.completes == "files":
            lines.append(f"{start} -F")
        elif "|" in command.arguments:
            lines.append(f"{start} -a '{_fixed_arguments(command)}'")
        for each in _options(program, command):
            values = _values(command, each).replace("+journals", f"({NAMES % name})")
            lines.append(f"{start} {_fish_option(each, values)}")
    return lines


def _fish_option(bound: BoundOption, values: str) -> str:
    parts: list[Any] = [f"-l {bound.long}"]
    if bound.option.short:
        parts.append(f"-s {bound.option.short}")
    if bound.kind != "flag":
        parts.append({"+files": "-r -F", "+none": "-x"}.get(values, f"-x -a '{values}'"))
    return " ".join([*parts, f"-d {_quoted(bound.option.description)}"])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"

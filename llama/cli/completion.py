"""`llama completion`: scripts with which a shell completes the commands, their flags and values.

In: the table of commands. Out: a script for bash, zsh or fish. The scripts are complete in
themselves, so that a shell starts no Python process to complete a word.
"""

from collections.abc import Iterator, Mapping

from llama.cli.flags import FLAGS, REQUIRED, Command, Flag

_PATHS = ("DIR", "FILE", "IN", "OUT", "MODEL")  # metavars of flags whose value is a path
_HELP = "Show this help"
_VERSION = "Show the version"

_BASH = """\
# Completion of the command llama in bash, written by `llama completion bash`.
# Put into ~/.bashrc: source <(llama completion bash)
_llama() {
    local IFS=$' \\t\\n' values paths
    local word=${COMP_WORDS[COMP_CWORD]} flag=${COMP_WORDS[COMP_CWORD - 1]}
    if [[ $word == = ]]; then  # bash splits --flag=value at the equals sign.
        word=
    elif [[ $flag == = ]]; then
        flag=${COMP_WORDS[COMP_CWORD - 2]}
    fi
    case $COMP_CWORD:${COMP_WORDS[1]} in
        1:*) values='COMMANDS --help --version' ;;
CASES
    esac
    COMPREPLY=($(compgen -W "$values" -- "$word"))
    [[ $paths ]] || compopt +o default 2> /dev/null
}
complete -o default -F _llama llama
"""

_ZSH = """\
#compdef llama
# Completion of the command llama in zsh, written by `llama completion zsh`.
# Put into ~/.zshrc, after compinit: source <(llama completion zsh)
_llama_value_or_path() {
    compadd -- "$@"
    _files
}

_llama() {
    local -a commands=(
COMMANDS
    )
    if ((CURRENT == 2)); then
        _describe command commands
        compadd -- --help --version
        return
    fi
    local command=$words[2]
    shift words
    ((CURRENT--))
    case $command in
CASES
    esac
}

if [[ $funcstack[1] == _llama ]]; then
    _llama "$@"
else
    compdef _llama llama
fi
"""

_FISH = """\
# Completion of the command llama in fish, written by `llama completion fish`.
# Put into ~/.config/fish/config.fish: llama completion fish | source
function __llama_is
    set -l words (commandline -opc)
    test "$words[2]" = "$argv[1]"
end

complete -c llama -f
"""


def completion_script(shell: str, commands: Mapping[str, Command]) -> str:
    """Return the script that completes the command `llama` in "bash", "zsh" or "fish"."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands)


def _is_path(flag: Flag) -> bool:
    """Return whether the value may be a path; that of --speculate may be a model's folder."""
    return flag.metavar in _PATHS or flag is FLAGS["speculate"]


def _flags(command: Command) -> dict[str, Flag]:
    return {name: command.flags[name] for name in command.defaults}


def _bash(commands: Mapping[str, Command]) -> str:
    cases = []
    for name, command in commands.items():
        cases += [f"        *:{name})", "            case $flag:$word in"]
        cases += [f"                {line} ;;" for line in _bash_patterns(command)]
        cases += ["            esac", "            ;;"]
    script = _BASH.replace("COMMANDS", " ".join(commands))
    return script.replace("CASES", "\n".join(cases))


def _bash_patterns(command: Command) -> Iterator[str]:
    """Yield the cases of a command: values of its flags, its flags, and its arguments."""
    flags = _flags(command)
    patterns: dict[str, list[str]] = {}
    for name, flag in flags.items():
        if flag.kind is not bool:
            patterns.setdefault(_bash_values(flag), []).append(f"--{name}:*")
    for values, names in patterns.items():
        yield f"{' | '.join(names)}) {values}".rstrip()
    yield f"*:-*) values='{' '.join(f'--{name}' for name in ('help', *flags))}'"
    for values in dict.fromkeys(_bash_values(flags[name]) for name in command.positional):
        yield f"*) {values}".rstrip()


def _bash_values(flag: Flag) -> str:
    """Return the assignments for what may follow a flag."""
    values = [f"values='{' '.join(flag.choices)}'"] if flag.choices else []
    return " ".join([*values, "paths=yes"] if _is_path(flag) else values)


def _zsh(commands: Mapping[str, Command]) -> str:
    summaries = []
    cases = []
    for name, command in commands.items():
        summaries.append(f"        {_quoted(f'{name}:{command.summary}')}")
        arguments = [f"(- *)--help[{_HELP}]", *_zsh_arguments(command)]
        cases += [f"        {name})", "            _arguments -S \\"]
        cases += [f"                {_quoted(argument)} \\" for argument in arguments]
        cases[-1] = cases[-1].removesuffix(" \\")
        cases.append("            ;;")
    script = _ZSH.replace("COMMANDS", "\n".join(summaries))
    return script.replace("CASES", "\n".join(cases))


def _zsh_arguments(command: Command) -> Iterator[str]:
    for name, flag in _flags(command).items():
        meaning = flag.meaning
        for character in "\\[]:":
            meaning = meaning.replace(character, f"\\{character}")
        if flag.kind is bool:
            yield f"--{name}[{meaning}]"
        else:
            yield f"--{name}=[{meaning}]:{flag.metavar}:{_zsh_values(flag)}"
    for index, name in enumerate(command.positional, 1):
        flag = command.flags[name]
        colon = ":" if command.defaults[name] is REQUIRED else "::"
        yield f"{index}{colon}{flag.metavar}:{_zsh_values(flag)}"


def _zsh_values(flag: Flag) -> str:
    """Return the action of `_arguments` for what may follow a flag."""
    choices = " ".join(flag.choices)
    if _is_path(flag):
        # The blank keeps `_arguments` from inserting arguments of its own.
        return f" _llama_value_or_path {choices}" if choices else "_files"
    return f"({choices})" if choices else " "


def _quoted(text: str) -> str:
    """Quote a text for bash and zsh."""
    return "'" + text.replace("'", "'\\''") + "'"


def _fish(commands: Mapping[str, Command]) -> str:
    lines = []
    for name, command in commands.items():
        lines.append(f"complete -c llama -n '__llama_is \"\"' -a {name} -d {_fish_quoted(command)}")
    for name, meaning in (("help", _HELP), ("version", _VERSION)):
        lines.append(f"complete -c llama -n '__llama_is \"\"' -l {name} -d '{meaning}'")
    for name, command in commands.items():
        start = f"complete -c llama -n '__llama_is {name}'"
        lines.append(f"{start} -l help -d '{_HELP}'")
        for flag_name, flag in _flags(command).items():
            values = "" if flag.kind is bool else f" {_fish_values(flag) or '-x'}"
            lines.append(f"{start} -l {flag_name}{values} -d {_fish_quoted(flag)}")
        for positional in command.positional:
            values = _fish_values(command.flags[positional])
            if values:
                lines.append(f"{start} {values}")
    return _FISH + "\n".join(dict.fromkeys(lines)) + "\n"


def _fish_values(flag: Flag) -> str:
    """Return the options of `complete` for what may follow a flag."""
    choices = f"-a '{' '.join(flag.choices)}'" if flag.choices else ""
    if _is_path(flag):
        return f"-r -F {choices}".rstrip()
    return f"-x {choices}" if choices else ""


def _fish_quoted(item: Command | Flag) -> str:
    """Quote the description of a command or a flag for fish."""
    text = item.summary if isinstance(item, Command) else item.meaning
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

# Run before a user's script by scripts/translation_input.py. It makes bash expand the script and execute no program.
#
# PATH is an empty folder, so the name of a program is never found and command_not_found_handle records its words.
# `set -r` at the end makes the shell restricted before the user's first line is read: bash itself then rejects
# command names with a slash, exec, assignments to PATH, `command -p`, `hash -p`, loading of builtins, and redirections
# that write to files. None of these can be switched back on. Each command goes to descriptor 3: NUL after a word,
# \1 and NUL after the last one.
__record() { printf '%s\0' "$@" >&3; printf '\1\0' >&3; return 0; }
command_not_found_handle() { __record "$@"; }
cd() { return 0; } # also inside $(...) of a command that is only expanded
# Programs that scripts use to build words.
basename() { local word=${1%/}; word=${word##*/}; printf '%s\n' "${word%"${2-}"}"; }
dirname() { local word=${1%/}; [[ $word == */* ]] && printf '%s\n' "${word%/*}" || printf '.\n'; }
date() { local form='+%Y-%m-%d' word; for word in "$@"; do [[ $word == +* ]] && form=$word; done; printf "%(${form#+})T\n" -1; }
realpath() { printf '%s\n' "${!#}"; }
readlink() { printf '%s\n' "${!#}"; }
hostname() { printf 'localhost\n'; }
whoami() { printf '%s\n' "${USER-user}"; }
cat() { local line; [[ $# -eq 0 ]] && while IFS= read -r line; do printf '%s\n' "$line"; done; return 0; }
seq() { local i a=1 b=${!#}; [[ $# -ge 2 ]] && a=$1; for ((i = a; i <= b; i++)); do printf '%s\n' "$i"; done; }
# Before each command: one whose name has a slash is recorded here and skipped, since a restricted shell only rejects it.
# So is what follows exec. Builtins that would leave the script or reach outside it are skipped; a file that is sourced
# is not read. Redirections at the end of a command are left out. Status 1 makes bash skip the command (extdebug).
__words() {
    local replaces=
    while [[ $# -gt 0 ]]; do
        case $1 in
        [A-Za-z_]*=*) ;;
        set) [[ ${2-} == -- || $# -eq 1 ]] && return 0 || return 1 ;; # no errexit: status 1 below would end the script
        exec | command | builtin) replaces=$1 ;;
        cd | pushd | popd | exit | kill | trap | ulimit | umask | suspend | source | . | enable | logout) return 1 ;;
        *) [[ $1 == */* || $replaces == exec ]] && { __record "$@"; return 1; }
            return 0 ;;
        esac
        shift
    done
    [[ $replaces == exec ]] && return 1
    return 0
}
__before() {
    case ${FUNCNAME[1]-} in __* | command_not_found_handle | basename | dirname | date | cat | seq) return 0 ;; esac
    [[ $1 =~ ^(__|\[\[|\(\(|for |case |select |while |until |if |function |local ) ]] && return 0
    [[ $1 =~ ^[A-Za-z_][A-Za-z_0-9]*(\[[^]]*\])?\+?=\( ]] && return 0
    [[ $1 =~ ^(export\ |declare\ (-x\ )?)?PATH= ]] && return 1
    local text=$1 whole=$1
    set -- "${__given[@]}" # the words of the script, for its own "$@"
    while [[ $text =~ $__redirection ]]; do text=${BASH_REMATCH[1]}; done
    [[ $text != "$whole" ]] && { eval "__record $text"; return 1; }
    eval "__words $whole"
}
__given=("$@")
__redirection='^(.*[^[:space:]])[[:space:]]+([0-9]*|&)>[>|]?[[:space:]]?(>\(.*\)|"[^"]*"|[^[:space:]">]+)$'
readonly -f __record __words __before command_not_found_handle
readonly PATH BASH_CMDS BASH_ENV ENV
set -r
shopt -s extdebug
trap '__before "$BASH_COMMAND"' DEBUG

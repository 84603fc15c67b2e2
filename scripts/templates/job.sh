#!/usr/bin/env bash
# {{run_id}}: commit {{commit}}
# The script of one node, from scripts/templates/job.sh.
set -u
cd {{workdir}} || exit 1
export RUN_ID={{run_id}} RUN_DIR={{run_dir}} WANDB_RESUME=allow
export CODE_COMMIT={{code_commit}} # a copy of the code has no .git
export {{env}}
mkdir -p "$RUN_DIR"
RUN_DIR=$(cd "$RUN_DIR" && pwd) || exit 1
MARKS="$RUN_DIR/{{submitted}}" # of this submission: which commands have begun and finished, and how the nodes ended
mkdir -p "$MARKS"
{{copy}}

{{functions}}

export NUM_NODES={{num_nodes}} NODE_RANK={{rank}} MASTER_ADDR={{address}} MASTER_PORT={{port}}

set_up() {
{{setup}}
}
begin_command() { # begin_command WORDS...: replace this shell by the command
    touch "$begun"
    exec "$@"
}
{{commands}}

run() { # run NUMBER: run command_NUMBER, unless it finished before a restart of this submission
    local number=$1 attempt=0 code
    local mark="$MARKS/finished.$number.${NODE_RANK:-0}" begun="$MARKS/begun.$number.${NODE_RANK:-0}"
    [ ! -e "$mark" ] || return 0
    export WANDB_RUN_ID="$RUN_ID-{{submitted}}-$number"
    while :; do
        [ "$stopping" = 0 ] || return 75
        [ "$attempt" = 0 ] || echo "exit code 75: start $((attempt + 1))" >&2
        rm -f "$begun"
        { # set +u: few set-up scripts work with unset variables as errors
            set +u
            set_up && "command_$number"
        } &
        child=$!
        finish
        code=$?
        case $code in
        0 | 2 | 3 | 73 | 75) ;; # wrong arguments (2), nothing learned (3), another process has its folder (73)
        *)
            if [ -e "$begun" ] && [ "$RUN_DIR/saved" -nt "$begun" ]; then # it came further than at its last start
                echo "exit code $code after a checkpoint: counts as 75" >&2
                code=75
            fi
            ;;
        esac
        if [ "$stopping" = 1 ] && [ ! -e "$begun" ]; then # in its set-up, when there is nothing to save yet
            return 75
        elif [ "$code" = 0 ] && [ ! -e "$begun" ]; then
            echo "command $number was not started: its set-up ended the shell with exit code 0" >&2
            return 1
        elif [ "$code" = 0 ]; then
            mv "$begun" "$mark"
            return 0
        elif [ "$code" != 75 ] || [ "$attempt" -ge {{restarts}} ]; then
            return "$code"
        fi
        attempt=$((attempt + 1))
    done
}
leave() { # leave CODE: nodes that saved wait for the others where the first to leave ends them all
    echo "$1" >"$MARKS/exit.${NODE_RANK:-0}"
    {{bring_back}}
    if [ "$1" = 75 ]; then
        for _ in {1..{{grace}}}; do
            [ "$(cat "$MARKS"/exit.* | wc -l)" -lt {{together}} ] || break
            sleep 1
        done
    fi
    exit "$1"
}

for number in {{numbers}}; do
    run "$number" || leave $?
done
leave 0

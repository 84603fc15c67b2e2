# Common to the sweeps: source it with their arguments, then call `run ARGUMENTS...` in loops.
#   --seeds 1..5    or 1,3,8; other arguments go to every run
#   RUN=...         words to put before every command: echo, or a submission that ends in --; RUN=lines prints the arguments
#                   of all runs instead, a line for each, quoted as for a shell
#   ARRAY=8         one submission of all runs as an array of jobs, of which 8 run at a time, by RUN (default: Slurm, a GPU each)
#   SCRIPT=mine.py  the script to run (grpo.py); PYTHON=.venv/bin/python  OUTPUT_DIR=runs
# A run that is finished or running is skipped (scripts/is_finished.py says which are); an interrupted one resumes from its
# last checkpoint. --overwrite starts what is not finished from scratch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python)}
SCRIPT=${SCRIPT:-grpo.py}
suffix= # of --exp_name, so that the runs of another script do not share folders with those of grpo.py
[[ $SCRIPT == grpo.py ]] || suffix=_$(basename "$SCRIPT" .py)
seeds=(1 2 3)
common=()
runs=() # the arguments of each, as a line
apostrophe=\' # in lines every word stands in apostrophes: what ${word@Q} makes of a tab, bash alone can read
escaped="'\\''"
overwrite=0
started=0
skipped=0
failed=0

while (($#)); do
    case $1 in
    --seeds=*) set -- --seeds "${1#*=}" "${@:2}" ;;
    --seeds)
        if [[ ${2:-} =~ ^([0-9]+)\.\.([0-9]+)$ ]] && ((BASH_REMATCH[1] <= BASH_REMATCH[2])); then
            mapfile -t seeds < <(seq "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}")
        elif [[ ${2:-} =~ ^[0-9]+(,[0-9]+)*$ ]]; then
            IFS=, read -ra seeds <<<"$2"
        else
            echo "error: --seeds ${2:-}: write 1..5 or 1,3,8" >&2
            exit 2
        fi
        shift 2
        ;;
    --run[_-]name | --run[_-]name=*)
        echo "error: $1: a sweep's runs have names of their own; give --exp_name, or --output_dir for the folder" >&2
        exit 2
        ;;
    *)
        [[ $1 != --overwrite ]] || overwrite=1
        common+=("$1")
        shift
        ;;
    esac
done

# Explicit, or a submitted run would write into its job's folder, where neither this loop nor a plot looks for it.
[[ " ${common[*]-} " == *" --output"[_-]"dir"[=\ ]* ]] || common+=(--output_dir "${OUTPUT_DIR:-runs}")

run() { # note a run; `end` starts all of them
    if [[ "$* ${common[*]-}" == *$'\n'* ]]; then
        echo "error: a run is a line; take the line break out of: $* ${common[*]-}" >&2
        exit 2
    fi
    runs+=("$(printf "'%s' " "${@//$apostrophe/$escaped}" "${common[@]//$apostrophe/$escaped}")")
}

end() { # start what is to be run, and print the totals; exit code 1 if a run failed, which does not stop the others
    if [[ ${RUN:-} == lines ]]; then
        printf '%s\n' "${runs[@]}"
        return
    fi
    local found states words state i
    local tasks=() # what ARRAY submits
    found=$(printf '%s\n' "${runs[@]}" | "$PYTHON" scripts/is_finished.py "$SCRIPT" -) || exit $?
    mapfile -t states <<<"$found"
    for i in "${!runs[@]}"; do
        state=${states[i]%% *}
        eval "words=(${runs[i]})"
        if ((state == 0 || (state == 3 && !overwrite))); then
            echo "skipped, ${states[i]#* }"
            skipped=$((skipped + 1))
        elif [[ -n ${ARRAY:-} ]]; then
            tasks+=("'$PYTHON' '$SCRIPT' ${runs[i]}")
            started=$((started + 1))
        elif ${RUN:-} "$PYTHON" "$SCRIPT" "${words[@]}"; then # RUN is several words
            started=$((started + 1))
        elif state=$? && ((state == 73)); then # a process or a job has it, and has said so
            skipped=$((skipped + 1))
        else
            echo "failed with exit code $state: ${runs[i]}" >&2
            failed=$((failed + 1))
        fi
    done
    if ((${#tasks[@]})); then
        local submission=${RUN:-"$PYTHON scripts/submit.py --backend slurm --gpus 1"}
        ${submission% --} --array_parallelism "$ARRAY" --tasks <(printf '%s\n' "${tasks[@]}") || failed=$started started=0
    fi
    local done="started"
    [[ " ${RUN:-} ${common[*]} " != *" --dry_run "* && ${RUN:-} != echo ]] || done="would be started"
    echo "$started $done, $skipped skipped, $failed failed" >&2
    ((failed == 0))
}

#!/usr/bin/env bash
# {{run_id}}: the batch script, which runs on the first node, from scripts/templates/slurm.sh.
set -u
cd {{workdir}} || exit 1
MARKS={{run_dir}}/{{submitted}}

{{functions}}

cancelled=0 # a SIGTERM to this script is a plain scancel, or a preemption after which Slurm requeues the job itself
trap '[ "$stopping" = 1 ] || cancelled=1; stopping=1 again=1; ask' TERM
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$(free_port)
export MASTER_ADDR MASTER_PORT STOP_REACHES_ALL=1
rm -f "$MARKS"/exit.*
{{srun}} &
child=$!
finish
code=$?
# srun returns the highest code of all nodes: 75 counts only if no node ended with another code.
if [ "$code" = 75 ] && [ "$cancelled" = 0 ] && ! cat "$MARKS"/exit.* | grep -qvx 75; then
    if ! scontrol show job {{job}} | grep -q 'PreemptTime=[0-9]'; then # a preemption does not count as a retry
        echo retry >>"$MARKS/retries"
    fi
    if [ "$(cat "$MARKS/retries" 2>/dev/null | wc -l)" -le {{max_retries}} ]; then
        scontrol requeue {{job}}
    fi
fi
exit "$code"

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
limit=${SLURM_JOB_END_TIME:-0} # Slurm since 22.05 has it; 0: no limit is known
{{srun}} &
child=$!
finish
code=$?
# srun returns the highest code of all nodes: 75 counts only if no node ended with another code.
if [ "$code" = 75 ] && [ "$cancelled" = 0 ] && ! cat "$MARKS"/exit.* | grep -qvx 75; then
    # Asked to stop long before the time limit: preempted, which does not count as a retry.
    if [ "$stopping" = 0 ] || [ $((limit - $(date +%s))) -le {{preempted_before}} ]; then
        echo retry >>"$MARKS/retries"
    fi
    if [ "$(cat "$MARKS/retries" 2>/dev/null | wc -l)" -le {{max_retries}} ]; then
        scontrol requeue {{job}}
    fi
fi
exit "$code"

#!/usr/bin/env bash
# The KL study of docs/evidence/kl_study.md, on the test bed or on the quickstart's model.
#   make testbed && studies/run_kl_study.sh    the test bed: 1420 runs of 10 CPU seconds each, the decisive ones first
#   studies/run_kl_study.sh --real             the quickstart's model: 150 runs of 2 CPU minutes each
#   studies/run_kl_study.sh --seeds 1..3       a part of it; other arguments go to every run
#   LANES=8 studies/run_kl_study.sh            so many runs side by side (2); OUTPUT_DIR=... where they go
# Repeat the command to continue. What is in docs/evidence/data/kl_study.csv.gz is not repeated, unless TABLE= names another one.
# A seed is finished before the next begins, so that whatever is there at any time can be compared. For the results:
#   python studies/kl_study.py --add runs/study_kl runs/study_kl_real
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export PYTHON=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python)}
lanes=${LANES:-2}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
loss="loss/k1/naive loss/k2/naive loss/k3/naive loss/k3/unbiased loss/k4/naive"
sums="reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1" # results may be negative
flags=(--num_unique_prompts_rollout 4 --save_minutes 0 --dataset "$sums" --max_prompt_length 64)
if [[ ${1:-} == --real ]]; then
    shift
    export EXP_NAME=study_real OUTPUT_DIR=${OUTPUT_DIR:-runs/study_kl_real} MINI_BATCHES=2
    decisive="$loss loss/full/naive reward/k1/naive"
    betas=("0 0.3 0.1")
    samples=1
    # --max_logprob_diff 0: naive k1 leads to where bf16 is not precise enough for this check of the engine.
    flags+=(
        --dtype bfloat16
        --num_samples_per_prompt_rollout 4 --total_steps 20 --learning_rate 2e-5 --lr_scheduler_type constant
        --max_response_length 24 --eval_samples 1 --max_logprob_diff 0
    )
else
    export EXP_NAME=study OUTPUT_DIR=${OUTPUT_DIR:-runs/study_kl} MINI_BATCHES="4 1"
    decisive="$loss loss/full/naive reward/k1/naive reward/k3/naive"
    betas=("0 0.3 3" "0.03" "1 0.1")
    samples=4
    flags+=(
        --model_name_or_path models/testbed-1
        --max_response_length 32
        --dtype float32 --total_steps 40 --learning_rate 2e-4 --lr_min_ratio 0 --eval_prompts 64 --vllm_args '{"kv_cache_memory_bytes":107374182}'
    )
fi

mkdir -p "$OUTPUT_DIR"
skip="$OUTPUT_DIR/skip.txt"
side_by_side() { # the runs of a sweep, whose arguments come in lines
    "$PYTHON" studies/run_many.py grpo.py --lanes "$lanes" --skip "$skip"
}
"$PYTHON" studies/kl_study.py --names ${TABLE:+--table "$TABLE"} >"$skip"
code=0
for part in "${betas[@]}"; do
    RUN=lines SETTINGS=$decisive BETAS=$part scripts/sweeps/kl.sh --seeds 1..10 "${flags[@]}" "$@" | side_by_side || code=$?
done
if [[ $EXP_NAME == study ]]; then
    RUN=lines ESTIMATORS="k1 k2 k3 k4 full" GRADIENTS="naive unbiased" BETAS="0.03 0.1 0.3 1 3" \
        scripts/sweeps/kl.sh --seeds 1..10 "${flags[@]}" "$@" | side_by_side || code=$?
fi
mapfile -t finished < <(find "$OUTPUT_DIR" -mindepth 3 -maxdepth 3 -path '*/model/config.json' -printf '%h\n' | sort)
if ((${#finished[@]})); then
    "$PYTHON" studies/measure_kl.py --samples "$samples" "${finished[@]%/model}"
fi
exit "$code"

#!/usr/bin/env bash
# The KL study on the test bed: every estimator, gradient and placement, five betas and none, fresh and stale samples.
#   make testbed && scripts/study_kl.sh                    1420 runs of about a minute; repeat it to go on with the rest
#   scripts/study_kl.sh --seeds 1 --total_steps 40         a part of it; other arguments go to every run
#   OUTPUT_DIR=... MODEL=... ESTIMATORS=... BETAS=... MINI_BATCHES=... as in scripts/sweep_kl.sh
# A seed is finished before the next begins, so that whatever is there at any time can be compared.
# Every finished run is measured at the end by scripts/measure_kl.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export OUTPUT_DIR=${OUTPUT_DIR:-runs/study_kl}
export ESTIMATORS=${ESTIMATORS:-k1 k2 k3 k4 full}
export GRADIENTS=${GRADIENTS:-naive unbiased}
export MINI_BATCHES=${MINI_BATCHES:-1 4}
export BETAS=${BETAS:-0 0.01 0.03 0.1 0.3 1}
flags=(
    --model_name_or_path "${MODEL:-models/testbed-1}"
    --dataset "reasoning_gym:chain_sum?min_terms=2&max_terms=3&min_digits=1&max_digits=1"
    --dtype float32 --num_samples_per_prompt_rollout 16 --total_steps 100
    --learning_rate 2e-4 --lr_min_ratio 0 --eval_prompts 128
    --vllm_kv_cache_gb 0.1 --save_minutes 0 --log_samples_every 0
)

mkdir -p "$OUTPUT_DIR"
code=0
scripts/sweep_kl.sh --seeds 1..10 "${flags[@]}" "$@" || code=$?
mapfile -t finished < <(find "$OUTPUT_DIR" -mindepth 3 -maxdepth 3 -path '*/model/config.json' -printf '%h\n' | sort)
if ((${#finished[@]})); then
    PYTHON=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python)}
    "$PYTHON" scripts/measure_kl.py "${finished[@]%/model}"
fi
exit "$code"

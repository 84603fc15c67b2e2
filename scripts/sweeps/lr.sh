#!/usr/bin/env bash
# Learning rate x seed; see scripts/sweeps/common.sh for --seeds, RUN and what is skipped.
#   scripts/sweeps/lr.sh --seeds 1..5
#   LEARNING_RATES="1e-5 3e-5" RUN="python scripts/submit.py --backend slurm --gpus 1 --" scripts/sweeps/lr.sh
# Then: python scripts/plot.py runs --x learning_rate --y eval/pass@1 --output lr.png
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

for seed in "${seeds[@]}"; do
    for learning_rate in ${LEARNING_RATES:-3e-6 1e-5 3e-5 1e-4 3e-4}; do
        run --exp_name "sweep_lr$suffix" --learning_rate "$learning_rate" --seed "$seed"
    done
done
end

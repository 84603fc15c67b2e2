#!/usr/bin/env bash
# KL estimator x placement x beta x seed, with several optimizer steps per batch, where the gradients of the estimators
# differ.
#   scripts/sweep_kl.sh                                                      on this machine, one after the other
#   scripts/sweep_kl.sh --seeds 1..5 --total_steps 100                       other arguments go to every run
#   RUN="python scripts/submit.py --backend slurm --gpus 1 --" scripts/sweep_kl.sh
#   RUN=echo scripts/sweep_kl.sh                                             print the commands
#   ESTIMATORS="k1 k3" BETAS="0 0.1" scripts/sweep_kl.sh                     a part of it
# Then: python scripts/plot.py runs --x beta --y final:kl/sequence --by kl_estimator kl_placement --output kl.png
. "$(dirname "${BASH_SOURCE[0]}")/sweep.sh"

for seed in "${seeds[@]}"; do
    for beta in ${BETAS:-0 0.03 0.1 0.3}; do
        if [[ $beta == 0 ]]; then # one run for all estimators; 1e-9 has no effect, but the KL is measured
            run --exp_name "sweep_kl$suffix" --num_mini_batches 4 --beta 1e-9 --seed "$seed"
            continue
        fi
        for placement in ${PLACEMENTS:-loss reward}; do
            for estimator in ${ESTIMATORS:-k1 k2 k3 k4}; do
                run --exp_name "sweep_kl$suffix" --num_mini_batches 4 --beta "$beta" --kl_placement "$placement" \
                    --kl_estimator "$estimator" --kl_gradient "${GRADIENT:-naive}" --seed "$seed"
            done
        done
    done
done
end

#!/usr/bin/env bash
# KL estimator x placement x beta x optimizer steps per batch x seed. With several optimizer steps per batch
# the gradients of the estimators differ most; with one, the samples are fresh.
#   scripts/sweeps/kl.sh                                                     on this machine, one after the other
#   scripts/sweeps/kl.sh --seeds 1..5 --total_steps 100                      other arguments go to every run
#   RUN="python scripts/submit.py --backend slurm --gpus 1 --" scripts/sweeps/kl.sh
#   RUN=echo scripts/sweeps/kl.sh                                            print the commands
#   ARRAY=8 scripts/sweeps/kl.sh                                             one Slurm array, eight runs at a time
#   ESTIMATORS="k1 k3" BETAS="0 0.1" scripts/sweeps/kl.sh                    a part of it
#   ESTIMATORS="k1 k3 k3+" MINI_BATCHES="1 4" scripts/sweeps/kl.sh           more of it; a + is for the loss alone
#   SETTINGS="loss/k1 loss/k3+ reward/k1" scripts/sweeps/kl.sh               instead of placements x estimators
# Then: python scripts/plot.py runs --x beta --y kl/sequence --by kl_estimator kl_placement --output kl.png
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

settings=()
for placement in ${PLACEMENTS:-loss reward}; do
    for estimator in ${ESTIMATORS:-k1 k2 k3 k4}; do
        if [[ $placement == loss || $estimator != *+ ]]; then # a + changes a gradient, and a reward has none
            settings+=("$placement/$estimator")
        fi
    done
done

for seed in "${seeds[@]}"; do
    for mini_batches in ${MINI_BATCHES:-4}; do
        for beta in ${BETAS:-0 0.03 0.1 0.3}; do
            same=(--exp_name "${EXP_NAME:-sweep_kl}$suffix" --num_mini_batches "$mini_batches" --seed "$seed")
            if [[ $beta == 0 ]]; then # one run for all settings
                run "${same[@]}" --load_ref_policy
                continue
            fi
            for setting in ${SETTINGS:-${settings[@]}}; do
                IFS=/ read -r placement estimator <<<"$setting"
                own=(--kl_placement "$placement" --kl_estimator "$estimator")
                if [[ $placement == reward ]]; then
                    own=(--kl_placement reward --kl_reward_estimator "$estimator")
                fi
                run "${same[@]}" --beta "$beta" "${own[@]}"
            done
        done
    done
done
end

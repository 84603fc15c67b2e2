#!/usr/bin/env bash
# Prompts x group x mini-batches x seed, all with the same number of samples. Every run prints at its start what follows
# from it (steps, optimizer steps, epochs). See scripts/sweeps/common.sh for --seeds, RUN and what is skipped.
#   scripts/sweeps/batch.sh --seeds 1..5
#   PROMPTS="4 16" GROUPS_OF=8 MINI_BATCHES=1 EPISODES=5120 scripts/sweeps/batch.sh
# Then: python scripts/plot.py runs --x num_unique_prompts_rollout --y eval/pass@1 \
#           --by num_samples_per_prompt_rollout num_mini_batches --output batch.png
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

for seed in "${seeds[@]}"; do
    for prompts in ${PROMPTS:-4 8 16}; do
        for group in ${GROUPS_OF:-4 8 16}; do
            for mini_batches in ${MINI_BATCHES:-1 4}; do
                run --exp_name "sweep_batch$suffix" --num_unique_prompts_rollout "$prompts" \
                    --num_samples_per_prompt_rollout "$group" --num_mini_batches "$mini_batches" \
                    --total_episodes "${EPISODES:-2560}" --seed "$seed"
            done
        done
    done
done
end

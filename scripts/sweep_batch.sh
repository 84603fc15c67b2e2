#!/usr/bin/env bash
# Prompts x group x mini-batches x seed, all with the same number of samples; what follows from it (steps, optimizer
# steps, passes over the data) every run prints at its start. See scripts/sweep.sh for --seeds, RUN and what is skipped.
#   scripts/sweep_batch.sh --seeds 1..5
#   PROMPTS="4 16" GROUPS_OF=8 MINI_BATCHES=1 EPISODES=5120 scripts/sweep_batch.sh
# Then: python scripts/plot.py runs --by num_unique_prompts_rollout num_samples_per_prompt_rollout --x episode
. "$(dirname "${BASH_SOURCE[0]}")/sweep.sh"

for seed in "${seeds[@]}"; do
    for prompts in ${PROMPTS:-4 8 16}; do
        for group in ${GROUPS_OF:-4 8 16}; do
            for mini_batches in ${MINI_BATCHES:-1 4}; do
                run --exp_name sweep_batch --num_unique_prompts_rollout "$prompts" \
                    --num_samples_per_prompt_rollout "$group" --num_mini_batches "$mini_batches" \
                    --total_episodes "${EPISODES:-2560}" --seed "$seed"
            done
        done
    done
done
end

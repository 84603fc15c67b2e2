#!/bin/bash
# Submit an evaluation of each checkpoint while a run trains: examples/evaluate_saves.sh runs/NAME
# Edit the job for your cluster. The copies of the models outlive --keep_checkpoints.
run=$1
mkdir -p $run/evals
until [ -d $run/model ]; do
    for saved in $run/checkpoints/step_*[0-9]; do
        copy=$run/evals/${saved##*/}
        [ -d $saved ] && [ ! -d $copy ] || continue
        cp -r $saved/model $copy
        python scripts/submit.py --backend slurm --gpus 1 --name eval-${saved##*/} -- python scripts/evaluate.py \
            --run $run --model_name_or_path $copy --output $copy.jsonl
    done
    sleep 60
done

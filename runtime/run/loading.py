"""Load the policy, and reject before the engine is built what would end the run later."""

from __future__ import annotations

from runtime.data import rendering
from runtime.run import saving
from runtime.system.process import print_on_rank_0, refuse
from runtime.training import pretrained


def load_policy(args, run):
    """Return the policy's model and the ids that end a response. Exits with code 2 for what would fail later.

    That is: weights that are missing in the files, prompts with ids that the model has no embeddings for, and a config
    or a tokenizer that cannot be saved. ``run``: ``utils.Run``.
    """
    model = pretrained.load_model(args, run.dtype, run.attention)
    stop_ids = pretrained.stop_token_ids(model, run.tokenizer)
    model.generation_config.eos_token_id = stop_ids
    check_prompt_ids(model.get_input_embeddings().num_embeddings, args, run)
    saving.check_saving(model, run.tokenizer, "--model_name_or_path")
    end = rendering.turn_end(run.problems[0].messages, run.tokenizer, args)
    if end is not None and end not in stop_ids:
        print_on_rank_0(
            f"warning: the chat template ends a turn by {run.tokenizer.decode([end])!r} (id {end}), which ends no "
            f"response: the model's EOS ids are {stop_ids}; add {end} to eos_token_id in its generation_config.json"
        )
    return model, stop_ids


def check_prompt_ids(rows: int, args, run) -> None:
    """Reject token ids beyond the ``rows`` of the model's embeddings, with exit code 2."""
    given = args.tokenizer_name_or_path
    tokenizer = f"--model_name_or_path {args.model_name_or_path}: its tokenizer"
    if given is not None:
        tokenizer = f"--tokenizer_name_or_path {given}"
    largest = max(run.tokenizer.get_vocab().values())
    if largest >= rows:  # of all ids that there can be: look at those that there are
        largest = max(max(problem.prompt_ids) for problem in (*run.problems, *run.eval_problems))
    if largest >= rows or (given is not None and len(run.tokenizer) > rows):
        found = f"a prompt holds {run.tokenizer.decode([largest])!r} (id {largest}); " if largest >= rows else ""
        refuse(
            f"{tokenizer} has {len(run.tokenizer)} tokens, but {args.model_name_or_path} has {rows} embeddings; {found}"
            f"give the tokenizer that this model was trained with, or resize and train its embeddings first"
        )

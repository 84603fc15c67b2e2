"""What scoring costs a step: the quickstart's 64 samples with and without it, on the real model and engine."""

from __future__ import annotations

import threading
import time
from statistics import median

import pytest
from helpers import ROOT, end_engine

import grpo
from rewards import RewardPool, truth_error
from runtime import data, watchdog

ROUNDS = 3  # each has both ways once forwards and once backwards: a drift of the machine hits both alike


@pytest.mark.slow
def test_scoring_adds_less_than_five_percent(monkeypatch, tmp_path):
    """Against generation alone, which is shorter than a step."""
    from transformers import AutoTokenizer

    import utils

    monkeypatch.chdir(ROOT)
    args = grpo.Args(output_dir=str(tmp_path))
    if not (ROOT / args.model_name_or_path).is_dir():
        pytest.skip(f"no {args.model_name_or_path}: scripts/setup.sh prepares it")
    problems = data.load_problems(args, truth_error)[0][: args.num_unique_prompts_rollout]
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    data.render_prompts(problems, tokenizer, args)
    _, dtype, attention = utils.resolve_device(args)
    stop_ids = utils.stop_token_ids(utils.load_model(args, dtype, attention), tokenizer)
    pool = RewardPool(1, args.reward_timeout, {p.verifier for p in problems})
    inbox, outbox = watchdog.Mailbox(), watchdog.Mailbox()
    thread = threading.Thread(target=grpo.vllm_thread, args=(args, dtype, 0, 1, stop_ids, inbox, outbox), daemon=True)
    thread.start()

    def receive() -> tuple:
        message = outbox.get(timeout=120)
        if message[0] == "error":
            raise message[1]
        return message

    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop": [], "ignore_eos": False}
    sampling["max_tokens"] = args.max_response_length
    group = args.num_samples_per_prompt_rollout
    wanted = [((i, k), p.prompt_ids, group * i + k) for i, p in enumerate(problems) for k in range(group)]

    def generate(scored: bool) -> tuple[float, list[str]]:
        """(seconds, responses): phases 2 and 3 as in the script, or phase 2 alone."""
        start, futures, said = time.perf_counter(), [], []
        inbox.put(("generate", 0, wanted, sampling))
        for _ in wanted:
            _, _, (place, _), ids, *_ = receive()
            said.append(tokenizer.decode(ids, skip_special_tokens=True))
            if scored:
                problem = problems[place]
                futures.append(pool.submit(problem.verifier, said[-1], problem.truth, problem.row))
        assert [pool.result(future).status for future in futures] == ["ok"] * (len(wanted) * scored)
        return time.perf_counter() - start, sorted(said)

    receive()
    assert generate(True)[1] == generate(False)[1], "not the same work"  # and the first use of each allocates
    seconds = {True: [], False: []}
    for scored in (True, False, False, True) * ROUNDS:
        seconds[scored].append(generate(scored)[0])
    end_engine(inbox, thread)
    pool.close()
    added = median(seconds[True]) / median(seconds[False]) - 1
    print(f"\n{len(wanted)} samples, seconds, alternating: generated {seconds[False]}, and scored {seconds[True]}")
    print(f"scoring adds {100 * added:+.1f} % to {median(seconds[False]):.2f} s of generation")
    assert added < 0.05

"""What scoring costs a step: the quickstart's 64 samples with and without it, on the real model and engine."""

from __future__ import annotations

import queue
import threading
import time
from statistics import median

import pytest
from conftest import ROOT

import data
import grpo
from rewards import RewardPool

ROUNDS = 4  # each has every way once forwards and once backwards: a drift of the machine hits all alike


@pytest.mark.slow
def test_scoring_adds_less_than_five_percent(monkeypatch, tmp_path):
    """Against generation alone, which is shorter than a step. `math` is timed as well, on the same texts."""
    from transformers import AutoTokenizer

    import utils

    monkeypatch.chdir(ROOT)
    args = grpo.Args(output_dir=str(tmp_path))
    if not (ROOT / args.model_name_or_path).is_dir():
        pytest.skip(f"no {args.model_name_or_path}: scripts/setup.sh prepares it")
    problems = data.load_problems(args)[0][: args.num_unique_prompts_rollout]
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    data.render_prompts(problems, tokenizer, args)
    _, dtype, attention = utils.resolve_device(args)
    stop_ids = utils.stop_token_ids(utils.load_model(args, dtype, attention), tokenizer)
    pool, inbox, outbox = RewardPool(1, args.reward_timeout, ("last_number", "math")), queue.Queue(), queue.Queue()
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

    def generate(verifier: str) -> tuple[float, list[str], list[str]]:
        """(seconds, responses, statuses): phases 2 and 3 as in the script; without a verifier phase 2 alone."""
        start, futures, said = time.perf_counter(), [], []
        inbox.put(("generate", wanted, sampling))
        for _ in wanted:
            _, (place, _), ids, *_ = receive()
            said.append(tokenizer.decode(ids, skip_special_tokens=True))
            if verifier:
                futures.append(pool.submit(verifier, said[-1], problems[place].truth, problems[place].row))
        statuses = [pool.result(future).status for future in futures]
        return time.perf_counter() - start, said, statuses

    receive()
    ways = ["", "last_number", "math"]
    texts = {way: sorted(generate(way)[1]) for way in ways}  # the first use of each allocates
    assert texts[""] == texts["last_number"] == texts["math"], "not the same work"
    seconds = {way: [] for way in ways}
    for way in (ways + ways[::-1]) * ROUNDS:
        took, _, statuses = generate(way)
        seconds[way].append(took)
        assert statuses == ["ok"] * (len(wanted) if way else 0)
    inbox.put(("stop",))
    thread.join(timeout=60)
    pool.close()
    added = {way: median(seconds[way]) / median(seconds[""]) - 1 for way in ways[1:]}
    print(
        f"\n{len(wanted)} samples generated in {median(seconds['']):.2f} s (median of {2 * ROUNDS}); scored meanwhile:"
    )
    for way, share in added.items():
        print(f"  {way:12s} {median(seconds[way]):.2f} s, {100 * share:+.1f} %")
    assert added["last_number"] < 0.05

"""Cost of scoring a step: the quickstart's 64 samples on the real model and engine, in CPU seconds."""

from __future__ import annotations

import time

import psutil
import pytest
from helpers import ROOT, answer, end_engine, start_engine

import grpo
from rewards import RewardPool, truth_error
from runtime.data import problem_set, rendering


@pytest.mark.slow
def test_scoring_adds_less_than_five_percent(monkeypatch, tmp_path):
    """Of verifiers, decoding and what hands them on, against generation alone, which is less than a step."""
    from transformers import AutoTokenizer

    from runtime.training import pretrained

    monkeypatch.chdir(ROOT)
    args = grpo.Args(output_dir=str(tmp_path))
    if not (ROOT / args.model_name_or_path).is_dir():
        pytest.skip(f"no {args.model_name_or_path}: scripts/setup.sh prepares it")
    problems = problem_set.load_problems(args, truth_error)[0][: args.num_unique_prompts_rollout]
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    rendering.render_prompts(problems, tokenizer, args)
    _, dtype, attention = pretrained.resolve_device(args)
    stop_ids = pretrained.stop_token_ids(pretrained.load_model(args, dtype, attention), tokenizer)
    pool = RewardPool(1, args.call_timeout, {p.verifier for p in problems})
    inbox, outbox, thread = start_engine(grpo, args, stop_ids, dtype)
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop": [], "ignore_eos": False}
    sampling["max_tokens"] = args.max_response_length
    group = args.num_samples_per_prompt_rollout
    wanted = [((i, k), p.prompt_ids, group * i + k) for i, p in enumerate(problems) for k in range(group)]

    def spent() -> list[float]:
        """CPU seconds of the verifiers' processes, of this thread, and of all threads of this process."""
        children = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
        return [sum(c.user + c.system for c in children), time.thread_time(), time.process_time()]

    def generate() -> list[float]:
        """Return the time of phases 2 and 3, as in the script."""
        before, futures = spent(), []
        inbox.put(("generate", 0, wanted, sampling))
        for _ in wanted:
            _, _, (place, _), ids, *_ = answer(outbox)
            problem = problems[place]
            said = tokenizer.decode(ids, skip_special_tokens=True)
            futures.append(pool.submit(problem.verifier, said, problem.truth, problem.row))
        assert [pool.result(future).status for future in futures] == ["ok"] * len(wanted)
        return [now - then for now, then in zip(spent(), before, strict=True)]

    generate()  # the first use of each allocates
    verifiers, thread_of_this, process = generate()
    end_engine(inbox, thread)
    pool.close()
    added = (verifiers + thread_of_this) / (process - thread_of_this)
    print(f"\n{len(wanted)} samples: scoring adds {100 * added:.1f} % to {process - thread_of_this:.2f} CPU s")
    assert verifiers > 0
    assert added < 0.05

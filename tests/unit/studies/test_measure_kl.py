"""studies/measure_kl.py against the exact KL, found by going through every sequence."""

from __future__ import annotations

import dataclasses
import json

import measure_kl
import pytest
import torch
from helpers import ROOT, tiny_args

import grpo


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    """The folder of a run as far as it is read here: its arguments, and a model that has moved away from ``tiny``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("runs") / "run"
    args = tiny_args(tiny, folder.parent, max_response_length=2, eval_prompts=2)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder / "model")
    (folder / "config.json").write_text(json.dumps({"args": dataclasses.asdict(args)}))
    return folder


@torch.no_grad()
def enumerated(policy, start, prompt: list[int], stop: int) -> float:
    """KL of sequences of at most two tokens: that of the first token, and that of the second after each first one."""

    def logp(model, rows: list[list[int]]):
        return model(torch.tensor(rows)).logits[:, -1].float().log_softmax(-1)

    first_V, ref_V = logp(policy, [prompt])[0], logp(start, [prompt])[0]
    rows = [[*prompt, token] for token in range(len(first_V))]
    second_VV, ref_VV = logp(policy, rows), logp(start, rows)
    after_V = (second_VV.exp() * (second_VV - ref_VV)).sum(-1)
    after_V[stop] = 0.0
    return (first_V.exp() * (first_V - ref_V + after_V)).sum().item()


@pytest.mark.integration
def test_the_measure_is_the_exact_kl_of_sequences(finished):
    """But for the noise that sampling the first token leaves."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rewards import truth_error
    from runtime.data import problem_set, rendering

    args = measure_kl.run_args(finished)
    assert isinstance(args, grpo.Args)
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    problems = rendering.render_prompts(problem_set.load_problems(args, truth_error)[1], tokenizer, args)
    policy = AutoModelForCausalLM.from_pretrained(finished / "model", dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=torch.float32)
    exact = [enumerated(policy, start, problem.prompt_ids, tokenizer.eos_token_id) for problem in problems]
    found = measure_kl.measure(finished, count=256)
    assert found["problems"] == 2 and sum(exact) / 2 > 0.01
    assert found["kl/exact"] == pytest.approx(sum(exact) / 2, rel=0.1)


def test_a_run_that_is_not_finished_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        measure_kl.run_args(tmp_path)
    assert left.value.code == 2 and "no config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "edit", "accepted"),
    [
        ("ppo", ("", ""), True),
        ("grpo", ("            busy += time", "            busy += 0 * time"), False),
        ("grpo", ("ratio_T.clamp(", "ratio_T.clip("), True),
        ("grpo", ("def vllm_thread(", "def another("), False),
    ],
)
def test_a_run_whose_script_samples_in_a_way_of_its_own_is_refused(name, edit, accepted, tmp_path, capsys):
    """A tool's answers would be missing from the sequences; an edit elsewhere does not matter here."""
    copy = tmp_path / "copy.py"
    copy.write_text((ROOT / f"{name}.py").read_text().replace(*edit))
    if accepted:
        measure_kl.check_engine(tmp_path, {"script": str(copy)})
        return
    with pytest.raises(SystemExit) as left:
        measure_kl.check_engine(tmp_path, {"script": str(copy)})
    assert left.value.code == 2 and "not that of grpo.py" in capsys.readouterr().err

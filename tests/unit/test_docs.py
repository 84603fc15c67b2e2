"""docs/metrics.md against a real run: whatever is logged is documented, whatever is documented is logged."""

from __future__ import annotations

import dataclasses
import json
import re
from types import SimpleNamespace

import psutil
import pytest
from helpers import ROOT, messages, read_jsonl, run_here, tiny_args


def documented(section: str) -> list[str]:
    """The names in the first column of the table under one heading."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    body = text.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\| `([^`]+)` \|", body, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """A run that logs all there is: a reference, an evaluation and a checkpoint between steps, a format score."""
    out = tmp_path_factory.mktemp("documented")
    options = {
        "beta": 0.1,
        "entropy_coef": 0.01,  # moves the policy whatever the rewards are
        "kl_placement": "both",
        "eval_every": 1,
        "save_every": 1,
        "filter_zero_std_samples": False,
        "verifier": None,
    }
    options |= {"dynamic_sampling_rounds": 1}
    options |= {"generation_size": 5, "dataset_filter": (0.01, 1.0), "truncated_importance_sampling_ratio_cap": 2.0}
    options |= {"importance_sampling_mask": (0.5, 5.0)}
    run_here(tiny_args(tiny, out, run_name="run", eval_prompts=4, **options))
    return out / "run"


@pytest.mark.parametrize("file", ["metrics.jsonl", "eval.jsonl", "samples.jsonl"])
def test_logged_and_documented_are_the_same(folder, file):
    logged = {key for record in read_jsonl(folder / file) for key in record}
    elsewhere = (
        "perf/gpu_peak_gib",
        "env/",
        "turns",
        "reward/control_",
        "reward/echo",
    )  # with a GPU, an environment, a control, --verifier math
    names = [name for name in documented(file) if not name.startswith(elsewhere)]
    assert len(names) == len(set(names)), "a name is documented twice"
    assert logged - set(names) == set(), "logged, but not in docs/metrics.md"
    assert set(names) - logged == set(), "in docs/metrics.md, but never logged"


def test_every_name_that_a_script_writes_down_is_documented():
    """Also what no test run logs: names in the source of the scripts, found without running them."""
    names = set(documented("metrics.jsonl")) | set(documented("eval.jsonl"))
    groups = {name.split("/")[0] for name in names if "/" in name}
    source = (ROOT / "grpo.py").read_text() + (ROOT / "utils.py").read_text()
    written = set(re.findall(rf'"((?:{"|".join(groups)})/[\w@]+)"', source))
    assert len(written) > 25
    assert written - names == set()


def test_config_and_files(folder):
    config = json.loads((folder / "config.json").read_text())
    assert set(config) == set(documented("config.json"))
    assert config["args"]["batch_layout"] == "auto" and config["args"]["vllm_args"] is None
    resolved = {"dtype": "float32", "batch_layout": "shared", "attn_implementation": "sdpa", "micro_batch_tokens": 256}
    resolved |= {
        "logprob_chunk": 512,
        "vllm_gpu_memory_utilization": 0.4,
        "vllm_max_num_seqs": 256,
        "vllm_max_num_batched_tokens": 8192,
    }
    assert config["resolved"] == resolved
    tree = (ROOT / "docs" / "metrics.md").read_text().split("```")[1]
    for path in folder.iterdir():
        assert path.name in tree, f"{path.name} is left by a run, but not in docs/metrics.md"
    assert (folder / "model" / "config.json").exists()
    assert (folder / "checkpoints" / "step_000001" / "model" / "config.json").exists()


def test_defined_denominators(folder):
    """The relations between metrics that the page states, on the numbers of a run."""
    for record in read_jsonl(folder / "metrics.jsonl"):
        tokens = 16 * record["completions/length_mean"]  # nothing is left out in this run
        assert record["episode"] == record["step"] * 16
        assert record["kl/sequence"] == pytest.approx(record["kl/k1"] * tokens / 16, abs=1e-9)
        assert record["kl/k4"] == pytest.approx(record["kl/k1"], abs=1e-9)
        assert record["perf/tokens_per_second"] == pytest.approx(tokens / record["time/step"])
        assert record["perf/update_tokens_per_second"] == pytest.approx(tokens / record["time/update"])
        assert (record["sampler/staleness"], record["sampler/staleness_max"], record["sampler/fresh_frac"]) == (0, 0, 1)
        # The run was in this process, which has given hardly anything back since.
        assert record["perf/resident_gib"] == pytest.approx(psutil.Process().memory_info().rss / 2**30, rel=0.3)
        assert record["sampler/versions"] == 1 and 0 < record["sampler/ess"] <= 1 + 1e-9


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    raise ValueError("x")\nValueError: x',
            2,
        ),
        ('  File "a.py", line 3, in f\n    g(x)\n    ^^^^\n  File "b.py", line 4, in g\n    h("x")\nKeyError: x', 1),
        ("no traceback\n  indented", 2),
    ],
)
def test_frames_of_a_traceback_are_no_messages(text, expected):
    assert len(messages(text)) == expected


def test_the_loss_on_the_page_is_gspo():
    """The ratio of docs/grpo.md: exp of the mean log-ratio of each response, and its gradient."""
    import torch

    text = (ROOT / "docs" / "grpo.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -3.0], requires_grad=True)
    tokens = SimpleNamespace(
        logprobs_T=logprobs, old_T=torch.tensor([-1.2, -1.6, -0.5, -2.0]), response_T=torch.tensor([0, 0, 0, 2])
    )
    names = {"torch": torch, "t": tokens}
    exec(code, names)  # a page of this project
    expected = torch.tensor([(0.2 - 0.4 + 0.0) / 3] * 3 + [-1.0]).exp()
    torch.testing.assert_close(names["ratio_T"].detach(), expected)
    torch.testing.assert_close(torch.autograd.grad(names["ratio_T"].sum(), logprobs)[0], expected)


def test_the_page_s_way_to_allow_a_negative_flag():
    """Without it a copy's number below 0 is rejected, with the flag's name; the words are those of the page."""
    from runtime.arguments import checks

    (line,) = [x for x in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if "MAY_BE_NEGATIVE" in x]
    names = {"non_stop_penalty": 0.0, "seed": 1, "slope_bias": -1.0}
    args = dataclasses.make_dataclass("Args", names)(**names)
    before = checks.MAY_BE_NEGATIVE
    with pytest.raises(SystemExit):
        checks.check_numbers(args)
    try:
        exec(line, {"checks": checks})  # a page of this project
        checks.check_numbers(args)
    finally:
        checks.MAY_BE_NEGATIVE = before

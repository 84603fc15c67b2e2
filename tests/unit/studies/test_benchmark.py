"""studies/benchmark.py: its numbers, its floors, and that it notices a layout that computes something else."""

from __future__ import annotations

import json
import math
import subprocess
from types import SimpleNamespace

import benchmark
import pytest
import torch
from helpers import ROOT, script


def small(tiny, out, **changes) -> benchmark.Args:
    """Arguments of a benchmark of the tiny model without the engine."""
    values = {
        "model_name_or_path": str(tiny),
        "dtype": "float32",
        "num_unique_prompts_rollout": 2,
        "num_samples_per_prompt_rollout": 4,
        "max_response_length": 16,
        "repeats": 2,
        "skip_engine": True,
        "json": str(out / "numbers.json"),
    }
    return benchmark.Args(**values | changes)


@pytest.fixture
def quick_rates(monkeypatch):
    """Smaller matrices and copies; the rates are measured all the same."""
    monkeypatch.setattr(benchmark, "PRODUCT_SIZE", {"cpu": 128, "cuda": 128})
    monkeypatch.setattr(benchmark, "COPY_BYTES", 10**6)


def check_operators(rows: dict[str, float]) -> None:
    """All rows but the last are the parts of a whole, and products were found."""
    *parts, alone = rows.values()
    assert next(iter(rows)) == "matrix products"
    assert 0 < rows["matrix products"] < sum(parts)
    assert alone == rows["products alone"] > 0


def check_numbers(numbers: dict, phases: set[str], repeats: int) -> None:
    """Every phase has a floor and positive times, and every ratio is that of its two times."""
    seconds = numbers["seconds"]
    assert phases <= set(numbers["floor_seconds"])
    for phase in phases:
        assert len(seconds[phase]) == (max(5, repeats) if phase in ("optimizer", "push", "one token") else repeats)
        assert all(value > 0 for value in seconds[phase])
        assert numbers["floor_seconds"][phase] > 0
    padded_over_shared = [a / b for a, b in zip(seconds["padded"], seconds["shared"], strict=True)]
    assert numbers["ratios"]["padded / shared"] == padded_over_shared
    assert 0 < numbers["gradient_error"] < benchmark.LIMIT["float32"]


def test_the_update_is_timed_without_an_engine(tiny, tmp_path, quick_rates, capsys):
    """Both layouts, the optimizer and the floors are measured and written; nothing is said of the engine."""
    benchmark.main(small(tiny, tmp_path))
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    phases = {"shared", "padded", "optimizer", "late update"}
    check_numbers(numbers, phases, repeats=2)
    assert set(numbers["seconds"]) == phases
    assert set(numbers["ratios"]) == {"padded / shared"}
    assert set(numbers["operator_seconds"]) == {"update"}
    check_operators(numbers["operator_seconds"]["update"])
    assert 8 <= numbers["response_tokens"] <= 8 * 16
    output = capsys.readouterr().out
    assert "same result      yes" in output
    assert "engine" not in output
    assert "push" not in output


def test_a_layout_that_computes_something_else_is_noticed(tiny, tmp_path, quick_rates, capsys, monkeypatch):
    """Shared rows without their subtrees, so that responses see each other: exit code 1."""
    make = benchmark.batching.micro_batches

    def unmasked(*args, **options):
        batches = list(make(*args, **options))
        if options["layout"] == "shared":
            for batch in batches:
                batch.ends.fill_(batch.ends.shape[1])
        return batches

    monkeypatch.setattr(benchmark.batching, "micro_batches", unmasked)
    with pytest.raises(SystemExit) as ended:
        benchmark.main(small(tiny, tmp_path, repeats=1))
    assert ended.value.code == 1
    assert "same result      NO" in capsys.readouterr().out


def test_flops_of_a_forward_pass_are_those_that_torch_counts(tiny_model):
    """torch counts the attention of all n^2 pairs of tokens, the formula the half that causal tokens see."""
    from torch.utils.flop_counter import FlopCounterMode

    n = 40
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        tiny_model(input_ids=torch.arange(n)[None])
    sizes = benchmark.ModelSizes.of(tiny_model)
    unseen = 2 * sizes.attention * n**2
    assert sizes.forward_flops([n], [], n) + unseen == pytest.approx(counter.get_total_flops(), rel=1e-3)
    split = sizes.forward_flops([30], [(30, 10)], n)
    assert split == sizes.forward_flops([n], [], n), "a prompt and its continuation cost what the whole row costs"


def test_a_decode_step_reads_the_weights_once_and_each_cache(tiny_model):
    """At a bandwidth that limits it: more sequences add their caches, shorter ones stop to read theirs."""
    sizes = benchmark.ModelSizes.of(tiny_model)
    problems = [SimpleNamespace(prompt_ids=[1] * 10) for _ in range(2)]
    samples = benchmark.fixed_samples(problems, 2, 32, 100, benchmark.LATE)
    weights = sizes.weight_bytes * (sizes.blocks + sizes.head)
    rates = benchmark.Rates(flops=1e30, bandwidth=1.0, slots=64)

    def seconds(lengths):
        return benchmark.sampling_floor(sizes, samples[: len(lengths)], lengths, rates)

    assert seconds([5]) == pytest.approx(4 * weights + sizes.cache_bytes * (4 * 10 + 4**2 / 2))
    assert seconds([5, 5]) - seconds([5]) == pytest.approx(sizes.cache_bytes * 48)
    assert seconds([9, 5]) - seconds([9]) == pytest.approx(sizes.cache_bytes * 48)
    found = benchmark.late_floors(sizes, samples, rates)
    assert found["decode 1"] == pytest.approx(weights + sizes.cache_bytes * (10 + 1.5))
    adamw = benchmark.floors(sizes, samples, 32, rates)["optimizer"]
    assert found["one token"] == pytest.approx(adamw + 3 * weights)
    assert [s.prompt_id for s in benchmark.with_gradient(samples)] == [0, 0]


def test_products_are_found_with_their_flops(tiny_model):
    """Forward and backward of a model, and each kind of product, against torch's own count."""
    from torch.utils.flop_counter import FlopCounterMode

    three, square = torch.randn(3, 8, 8), torch.randn(8, 8)

    def work():
        tiny_model(input_ids=torch.arange(40)[None]).logits.sum().backward()
        torch.addmm(square, square, square)
        torch.baddbmm(three, three, three)

    with FlopCounterMode(display=False) as counter:
        work()
    seconds, operators = benchmark.profiled(work, lambda call: call())
    tiny_model.zero_grad()
    flops = 0
    for operator in operators:
        if product := operator.product():
            flops += 2 * math.prod(product) * operator.calls
    assert flops == pytest.approx(counter.get_total_flops(), rel=1e-6)
    assert 0 < sum(operator.seconds for operator in operators) <= seconds


def test_rows_of_the_operators_are_the_whole(capsys):
    """Time without a row or an operator of its own has rows, too; no product is known in the second table."""
    rest = [benchmark.Operator(f"other::{k}", [[k]], calls=1, seconds=0.01 * k) for k in range(1, 15)]
    twice = benchmark.Operator("other::14", [[1]], calls=1, seconds=0.02)
    product = benchmark.Operator("aten::mm", [[8, 8], [8, 8]], calls=2, seconds=0.5)
    rows = benchmark.print_operators("this", 2.0, [product, twice, *rest], torch.float32)
    assert rows.pop("products alone") > 0
    assert sum(rows.values()) == pytest.approx(2.0)
    assert rows["matrix products"] == 0.5 and rows["other::14"] == pytest.approx(0.16)
    assert rows["other operators"] == pytest.approx(0.01 * (1 + 2 + 3 + 4))
    assert "GFLOP/s" in capsys.readouterr().out
    rows = benchmark.print_operators("that", 2.0, rest, torch.float32)
    assert rows["matrix products"] == rows["products alone"] == 0
    assert "GFLOP/s" not in capsys.readouterr().out


def test_products_of_the_engine_are_found():
    """As the profiler shows vLLM's linear layers on CPUs, 64 tokens from 576 to 3072: packed weights have no sizes."""
    operator = benchmark.Operator("_C::onednn_mm", [[64, 3072], [64, 576], [], []], calls=30, seconds=0.1)
    assert operator.product() == (1, 64, 576, 3072)


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"repeats": 0}, "--repeats 0"),
        ({"json": "nowhere/numbers.json"}, "--json nowhere/numbers.json"),
        ({"num_samples_per_prompt_rollout": 1}, "--num_samples_per_prompt_rollout 1"),
        ({"micro_batch_tokens": 10}, "--micro_batch_tokens 10"),
    ],
)
def test_bad_arguments_are_refused(tiny, tmp_path, capsys, changes, flag):
    with pytest.raises(SystemExit) as ended:
        benchmark.main(small(tiny, tmp_path, **changes))
    assert ended.value.code == 2
    assert flag in capsys.readouterr().err


@pytest.mark.slow
def test_the_engine_is_timed_both_ways(tiny, tmp_path):
    """The command on a real vLLM engine: sampling by token ids and by chat, and the push, are timed as well."""
    path = tmp_path / "numbers.json"
    words = {
        "--model_name_or_path": tiny,
        "--dtype": "float32",
        "--num_unique_prompts_rollout": 2,
        "--num_samples_per_prompt_rollout": 4,
        "--max_response_length": 16,
        "--repeats": 2,
        "--json": path,
    }
    line = script("studies/benchmark.py", *(str(word) for pair in words.items() for word in pair))
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = json.loads(path.read_text())
    late = {"late update", "late generate", "one token", "decode 1"}
    check_numbers(numbers, {"generate", "shared", "padded", "optimizer", "push", *late}, repeats=2)
    seconds = numbers["seconds"]
    assert seconds["generate"] == seconds["token ids"]
    chat_over_ids = [a / b for a, b in zip(seconds["llm.chat"], seconds["token ids"], strict=True)]
    assert numbers["ratios"]["chat / ids"] == chat_over_ids
    assert all(math.isfinite(ratio) for ratio in chat_over_ids)
    assert "8 responses of exactly 16 tokens" in done.stdout
    assert set(numbers["operator_seconds"]) == {"update", "generate"}
    for rows in numbers["operator_seconds"].values():
        check_operators(rows)


def test_cpus_with_and_without_amx_have_two_names(monkeypatch):
    """Their rates differ so much that what was measured on one must not be compared with the other."""
    names = set()
    for amx in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        names.add(benchmark.machine_name(torch.device("cpu")))
    assert len(names) == 2

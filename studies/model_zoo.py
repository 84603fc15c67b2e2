"""Train one small random model of each architecture with the default engine, and print the table of what works.

    python studies/model_zoo.py                     all models; continues where it was stopped
    python studies/model_zoo.py --only smollm3      one model (its name in the table below), printed as JSON
    python studies/model_zoo.py --write             all, and the list and table in docs/models.md

Each model has two layers, random weights and a tokenizer of 260 bytes. It goes through real commands, in fp32:

1. ``grpo.py``, two steps: sample, train, push, sample again. The largest difference between a log-prob of the engine
   and of the trainer is below 1e-4 nats in both steps. Then the saved model answers the evaluation problems.
2. ``grpo.py --resume`` of the checkpoint of step 1: metrics and weights of step 2 are equal to the bit.
3. vLLM alone, on the saved model: the tokens of the evaluation, greedily, are those that the run's engine gave.
4. The log-probs in rows of each layout are those of plain forward passes, and a critic gives finite values.
5. Where the default engine cannot serve a model, ``--rollout hf`` trains it.

Each part is a fork of a process that has imported the libraries, and is killed after ``--limit`` seconds. Results are
lines of ``--out``; a finished row is not computed again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]  # the scripts are not a package

PAGE = ROOT / "docs" / "models.md"
MARKS = ("<!-- model_zoo.py writes from here -->\n", "<!-- to here -->\n")
LIMIT = 1e-4  # nats
LAYOUT = re.compile(r"rejected: --batch_layout .*use (--batch_layout) (\w+)")
WINDOW = 16
VOCABULARY = 320  # 260 tokens, and rows that no token has
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
BOTH = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
WHOLE_HEADS = {"num_key_value_heads": 2}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
ROUTED |= {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32}
LINEAR |= {"linear_value_head_dim": 32, "layer_types": ["linear_attention", "full_attention"]}
MAMBA = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_heads": 4, "mamba_d_head": 32}
TEXT = SIZES | {"head_dim": 32}
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14}
PIXTRAL = TOWER | {"model_type": "pixtral", "head_dim": 16, "image_size": 28}
QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
QWEN |= {"deepstack_visual_indexes": [0]}
EXAONE = QWEN | {"num_key_value_heads": 2, "fullatt_block_indexes": [0]}
KIMI = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_head_dim": 32,
    "linear_num_heads": 2,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_token": 2,
}
MROPE = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default", "mrope_section": [8, 4, 4]}}
# name -> (model type, fields of its config besides SIZES), the most used first
ZOO: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {"rope_theta": 5e5, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "gemma2": ("gemma2", {"head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 32}),
    "gemma3": ("gemma3_text", {"head_dim": 32, "query_pre_attn_scalar": 32, **BOTH}),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "phi4_mini": ("phi3", {"partial_rotary_factor": 0.75, "tie_word_embeddings": True, "sliding_window": None}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", BOTH),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt2": ("gpt2", GPT),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 32, **EXPERTS}),
    "qwen3_next": ("qwen3_next", {"head_dim": 32, "shared_expert_intermediate_size": 32, **EXPERTS, **LINEAR}),
    "qwen3_5": ("qwen3_5_text", {"head_dim": 32, **LINEAR}),
    "qwen2_moe": ("qwen2_moe", {"shared_expert_intermediate_size": 32, **EXPERTS, **WHOLE_HEADS}),
    "mixtral": ("mixtral", LOCAL_EXPERTS | {"sliding_window": None}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": ("gpt_oss", {"head_dim": 32, **BOTH, **LOCAL_EXPERTS}),
    "phi": ("phi", WHOLE_HEADS),
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma3n": (
        "gemma3n_text",
        {
            "head_dim": 32,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 32,
            "num_kv_shared_layers": 0,
            "laurel_rank": 16,
            "activation_sparsity_pattern": [0.0, 0.0],
            **BOTH,
        },
    ),
    "granite": ("granite", {"logits_scaling": 4.0, "attention_multiplier": 0.1}),
    "granitemoe": ("granitemoe", LOCAL_EXPERTS | {"logits_scaling": 4.0}),
    "granitemoehybrid": (
        "granitemoehybrid",
        LOCAL_EXPERTS | MAMBA | {"shared_intermediate_size": 64, "layer_types": ["mamba", "attention"]},
    ),
    "olmo": ("olmo", {}),
    "starcoder2": ("starcoder2", {}),
    "stablelm": ("stablelm", {}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "cohere2": ("cohere2", {"logit_scale": 0.25, **BOTH}),
    "glm": ("glm", {"head_dim": 32}),
    "glm4": ("glm4", {"head_dim": 32}),
    "glm4_moe": ("glm4_moe", {"head_dim": 32, **ROUTED}),
    "deepseek_v2": ("deepseek_v2", ROUTED | LATENT | WHOLE_HEADS | {"topk_method": "greedy"}),
    "deepseek_v3": ("deepseek_v3", ROUTED | LATENT | WHOLE_HEADS | {"topk_method": "noaux_tc"}),
    "nemotron": ("nemotron", {"head_dim": 32}),
    "exaone4": ("exaone4", {"sliding_window": WINDOW, "sliding_window_pattern": 2}),
    "ernie4_5": ("ernie4_5", {"head_dim": 32}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 0},
    ),
    "seed_oss": ("seed_oss", {"head_dim": 32}),
    "hunyuan_dense": ("hunyuan_v1_dense", {"head_dim": 32}),
    "hunyuan_moe": ("hunyuan_v1_moe", {"head_dim": 32, "num_experts": 4, "moe_topk": 2}),
    "lfm2": (
        "lfm2",
        {
            "layer_types": ["conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "conv_dim": 64,
            "conv_dim_out": 64,
            "block_dim": 64,
        },
    ),
    "minicpm3": ("minicpm3", LATENT | WHOLE_HEADS | {"dim_model_base": 32}),
    "ministral3": ("ministral3", {"head_dim": 32}),
    "opt": ("opt", {"word_embed_proj_dim": 64, "ffn_dim": 128, "init_std": 0.1}),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 2}),
    "falcon": ("falcon", {"new_decoder_architecture": False, "multi_query": True, "alibi": False}),
    "gptj": ("gptj", GPT | {"rotary_dim": 16}),
    "gpt_bigcode": ("gpt_bigcode", GPT),
    "mpt": ("mpt", {"d_model": 64, "n_heads": 2, "n_layers": 2, "max_seq_len": 512, "expansion_ratio": 2}),
    "mamba": ("mamba", {"state_size": 16}),
    "mamba2": ("mamba2", {"state_size": 16, "num_heads": 4, "head_dim": 32, "expand": 2, "n_groups": 1}),
    "bamba": ("bamba", MAMBA | {"attn_layer_indices": [1]}),
    "falcon_h1": ("falcon_h1", MAMBA | {"mamba_d_ssm": 128, "head_dim": 32}),
    "arcee": ("arcee", {"head_dim": 32}),
    "apertus": ("apertus", {}),
    "helium": ("helium", {"head_dim": 32}),
    "vaultgemma": ("vaultgemma", {"head_dim": 32, "query_pre_attn_scalar": 32, **BOTH}),
    "gemma3 with vision": ("gemma3", {"text_config": TEXT | BOTH, "vision_config": TOWER}),
    "mistral3 with vision": (
        "mistral3",
        {"text_config": TEXT | {"model_type": "ministral3"}, "vision_config": PIXTRAL},
    ),
    "qwen3_5 with vision": ("qwen3_5", {"text_config": TEXT | LINEAR, "vision_config": QWEN}),
    "qwen3_vl": ("qwen3_vl", {"text_config": TEXT | MROPE, "vision_config": QWEN}),
    # Published since June 2026
    "granite_swa": ("granite_swa", {"logits_scaling": 4.0, **BOTH}),
    "granitemoe_swa": ("granitemoe_swa", LOCAL_EXPERTS | BOTH | {"logits_scaling": 4.0}),
    "gemma4_unified": ("gemma4_unified", {"text_config": TEXT | BOTH | {"model_type": "gemma4_unified_text"}}),
    "exaone4_5": (
        "exaone4_5",
        {
            "text_config": TEXT | {"model_type": "exaone4", "sliding_window": WINDOW, "sliding_window_pattern": 2},
            "vision_config": EXAONE,
            "image_token_id": 3,
            "video_token_id": 3,
        },
    ),
    "hyperclovax": ("hyperclovax", {"logits_scaling": 0.25}),
    "zaya": ("zaya", {"head_dim": 32, "num_experts": 4, "moe_intermediate_size": 32}),
    "minimax_m3": ("minimax_m3_vl_text", {"head_dim": 32, **LOCAL_EXPERTS}),
    "laguna": ("laguna", {"head_dim": 32, **EXPERTS}),
    "hy_v4": ("hy_v4", {"head_dim": 32, **EXPERTS}),
    "inkling": (
        "inkling_text",
        {
            "head_dim": 32,
            "swa_head_dim": 32,
            "swa_num_attention_heads": 2,
            "swa_num_key_value_heads": 1,
            "sliding_window_size": WINDOW,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "muse_glimmer": (
        "muse_glimmer",
        {
            "text_config": TEXT | BOTH | {"model_type": "muse_glimmer_text"},
            "vision_config": TOWER,
            "image_token_id": 3,
            "video_token_id": 3,
        },
    ),
    "kimi_linear": ("kimi_linear", LATENT | WHOLE_HEADS | KIMI),
}
VERIFIER = """from rewards import Reward


def parity(response, truth, row):
    return Reward(float(sum(response.encode()) % 2))  # a random model gets it for half of its responses
"""
TEMPLATE = "{% for m in messages %}{{ m['role'][0] + ': ' + m['content'] + '\\n' }}{% endfor %}{{ 'a: ' }}"
WORDS = {  # flags of both runs
    "--dtype": "float32",
    "--seed": "3",
    "--learning_rate": "1e-2",
    "--lr_scheduler_type": "constant",
    "--num_unique_prompts_rollout": "2",
    "--num_samples_per_prompt_rollout": "4",
    "--max_response_length": "12",
    "--max_prompt_length": "64",
    "--micro_batch_tokens": "256",
    "--total_steps": "2",
    "--save_every": "1",
    "--save_minutes": "0",
    "--eval_prompts": "2",
    "--eval_every": "0",
    "--eval_sampling": '{"temperature": 0}',
    "--vllm_args": json.dumps({"kv_cache_memory_bytes": 2**26}),
}
SWITCHES = ("--no-mask_truncated_completions", "--no-mask_no_eos_with_zero")


# --------------------------------------------------------------------------------------- parts of a row, each in a fork


def write_model(folder: Path, kind: str, fields: dict) -> dict:
    """Write a random model and its tokenizer; every weight is random, also biases, norms and attention sinks."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {token: number for number, token in enumerate([*special, *alphabet])}
    bytewise = Tokenizer(models.BPE(vocab=tokens, merges=[], unk_token="<unk>"))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, chat_template=TEMPLATE, **names)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    usual = AutoConfig.for_model(kind)
    sizes = {field: size for field, size in SIZES.items() if hasattr(usual, field)}
    config = AutoConfig.for_model(kind, **(sizes | fields))
    has_parts = config.get_text_config() is not config
    model = (AutoModelForImageTextToText if has_parts else AutoModelForCausalLM).from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    model.save_pretrained(folder)
    problems = [{"question": f"{a} + {b} =", "answer": str(a + b)} for a in range(4) for b in range(4)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    (folder / "verifier.py").write_text(VERIFIER)
    return {"class": type(model).__name__, "parameters": model.num_parameters()}


def run_script(script, folder: Path, name: str, *more: str) -> dict:
    """Run the script as its command would; exit code 0, or the reason. Keeps the responses of the evaluation."""
    import run_many

    import utils

    plain = utils.eval_metrics

    def note(samples, problems, step):
        pairs = [(list(map(int, problems[s.prompt_id].prompt_ids)), list(map(int, s.response_ids))) for s in samples]
        (folder / f"{name}.responses.json").write_text(json.dumps(pairs))
        return plain(samples, problems, step)

    utils.eval_metrics = note
    places = {"--model_name_or_path": folder, "--output_dir": folder / "runs", "--run_name": name}
    places |= {"--dataset": folder / "problems.jsonl", "--verifier": f"{folder / 'verifier.py'}:parity"}
    words = [str(word) for pair in {**WORDS, **places}.items() for word in pair]
    code = run_many.run(script, [*words, *SWITCHES, *more], folder / f"{name}.log")
    sys.stdout.flush()
    return {"code": code}


def serve_alone(folder: Path, name: str) -> dict:
    """Greedy responses of vLLM on the saved model of a run, compared with those of the run's evaluation."""
    from vllm import LLM, SamplingParams

    pairs = json.loads((folder / f"{name}.responses.json").read_text())
    options = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 2**26, "max_model_len": 76}
    config = json.loads((folder / "config.json").read_text())
    options["language_model_only"] = "text_config" in config  # the random models have no settings of images
    llm = LLM(model=str(folder / "runs" / name / "model"), block_size=32, **options)
    how = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[2], detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in pairs], how)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    return {"served by": type(served_model(llm)).__name__, "equal": found == [response for _, response in pairs]}


def served_model(llm):
    """Return the module of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()


def try_layouts(script, folder: Path) -> dict:
    """Differences in nats of each layout from plain forward passes, and the critic's gradient."""
    import torch

    import utils
    from runtime.data.samples import Sample
    from runtime.training import batching, pretrained

    args = script.Args(model_name_or_path=str(folder), dtype="float32")
    device, dtype, attention = pretrained.resolve_device(args)
    model = pretrained.load_model(args, dtype, attention)
    policy = utils.TokenLogprobs(model, 1.0, 1000)
    found: dict = {"attention": model.config._attn_implementation}
    for layout in utils.LAYOUTS:
        difference, failure = utils.layout_error(policy, layout, 2, 76)
        found[layout] = failure or difference
    best = min(utils.LAYOUTS, key=lambda layout: math.inf if isinstance(found[layout], str) else found[layout])
    critic = script.TokenValues(model, {})
    sample = Sample(0, 0, list(range(3, 30)), list(range(40, 50)), [0.0] * 10, "stop", [])
    place = {"layout": best, "budget": 256, "rank": 0, "world_size": 1, "device": device}
    (batch,) = batching.micro_batches([sample], [0], **place)
    values_T = critic(batch)
    values_T.sum().backward()
    norms = [p.grad.norm() for p in critic.parameters() if p.grad is not None]
    gradient = torch.stack(norms).norm().item()
    return found | {"critic": bool(values_T.isfinite().all()) and math.isfinite(gradient) and gradient > 0}


# ------------------------------------------------------------------------------------------------------------- one row


def in_fork(work: Callable[..., dict], *arguments, log: Path, limit: float) -> dict:
    """Return the result of ``work`` in a fork of this process, which prints to ``log``; {"error": text} if it fails."""
    answer = log.with_suffix(".answer")
    answer.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            answer.write_text(json.dumps(work(*arguments)))
        except BaseException as error:
            traceback.print_exc()
            answer.write_text(json.dumps({"error": one_line(f"{type(error).__name__}: {error}")}))
        finally:
            os._exit(0)
    deadline = time.monotonic() + limit
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return {"error": f"no end after {limit:g} s"}
        time.sleep(0.05)
    return json.loads(answer.read_text()) if answer.exists() else {"error": "the process was killed"}


def one_line(text: str) -> str:
    """Return the first 400 characters of a message, without line breaks."""
    return re.sub(r"\s+", " ", text).strip()[:400]


def outcome(folder: Path, name: str, answer: dict) -> str:
    """Return "ok", "rejected: ..." for exit code 2 with one line, or "failed: ...", of a run."""
    log = folder / f"{name}.log"
    text = log.read_text(errors="replace") if log.exists() else ""
    errors = re.findall(r"^error: (.*)$", text, re.MULTILINE)
    if answer.get("code") == 0:
        return "ok"
    if answer.get("code") == 2 and not re.search("^Traceback", text, re.MULTILINE) and errors:
        return f"rejected: {one_line(errors[-1])}"
    errors = [line for line in text.strip().splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return f"failed: {one_line(errors[-1]) if errors else answer.get('error', answer.get('code'))}"


def metrics_of(folder: Path, name: str) -> list[dict]:
    """Metrics of each step, but for times."""
    file = folder / "runs" / name / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    times = ("time/", "perf/", "engine/")
    return [{name: value for name, value in row.items() if not name.startswith(times)} for row in rows]


def row_of(script, name: str, work: Path, limit: float, keep: bool) -> dict:
    """Every part of one model."""
    folder = work / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started = time.monotonic()

    def part(work: Callable[..., dict], *arguments) -> dict:
        return in_fork(work, *arguments, log=folder / f"{work.__name__}.txt", limit=limit)

    def run(*more: str, name: str = "run") -> str:
        return outcome(folder, name, part(run_script, script, folder, name, *more))

    kind, fields = ZOO[name]
    row: dict = {"name": name, "type": kind, "flags": []}
    row["model"] = part(write_model, folder, kind, fields)
    if "error" not in row["model"]:
        row["run"], name = run(), "run"
        layout = LAYOUT.match(row["run"])
        if layout is not None:
            row["flags"], name = list(layout.groups()), "with_layout"
            row["run"] = run(*row["flags"], name=name)
        if row["run"] == "ok":
            row |= look_again(folder, name, part, script, row["flags"])
        else:
            row["hf"] = run("--rollout", "hf", *row["flags"], name="hf")
            layout = LAYOUT.match(row["hf"])
            if layout is not None:
                row["flags"], name = list(layout.groups()), "hf_with_layout"
                row["hf"] = run("--rollout", "hf", *row["flags"], name=name)
        row["layouts"] = part(try_layouts, script, folder)
    row["seconds"] = round(time.monotonic() - started, 1)
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)
    return row


def look_again(folder: Path, name: str, part: Callable, script, more: list[str]) -> dict:
    """Compare a run that ended well with its engine, with a resumed run, and with vLLM alone on the saved model."""
    steps = metrics_of(folder, name)
    begin = folder / "runs" / name / "checkpoints" / "step_000001"
    answer = part(run_script, script, folder, "again", "--resume", str(begin), *more)
    resumed = outcome(folder, "again", answer)
    if resumed == "ok":
        weights = [(folder / "runs" / x / "model" / "model.safetensors").read_bytes() for x in (name, "again")]
        equal = metrics_of(folder, "again")[-1] == steps[-1] and weights[0] == weights[1]
        resumed = "equal" if equal else "different"
    return {
        "diff": [step["sampler/logprob_diff_max"] for step in steps],
        "moved": steps[0]["optim/grad_norm"] > 0 and steps[0]["optim/steps"] == 1,
        "resume": resumed,
        "alone": part(serve_alone, folder, name),
    }


def faults(row: dict) -> list[str]:
    """List the faults of a row that is neither right nor rejected at the start with a working alternative."""
    if "error" in row["model"]:
        return [f"no model: {row['model']['error']}"]
    found = []
    if row["run"] == "ok":
        found += [f"engine differs by {diff:.1e} nats" for diff in row["diff"] if not diff < LIMIT]
        found += [] if row["moved"] else ["no weight was changed"]
        found += [] if row["resume"] == "equal" else [f"resume: {row['resume']}"]
        found += [] if row["alone"].get("equal") else [f"alone: {row['alone']}"]
    elif not row["run"].startswith("rejected"):
        found.append(row["run"])
    elif row["hf"] != "ok" and "--rollout hf" in row["run"]:
        found.append(f"--rollout hf: {row['hf']}")
    if "error" in row["layouts"]:
        return [*found, f"layouts: {row['layouts']['error']}"]
    return found


# ----------------------------------------------------------------------------------------------------------- the table


def cells(row: dict) -> list[str]:
    """Return a row of the table."""
    if "error" in row["model"]:
        return [row["name"], row["type"], f"no model: {row['model']['error']}", *["-"] * 11]
    layouts = row["layouts"]
    if "error" in layouts:
        exact = ["failed"] * 5
    else:
        measured = [layouts[name] for name in ("shared", "padded", "packed")]
        exact = ["exact" if not isinstance(x, str) and x < LIMIT else "rejected" for x in measured]
        exact = [layouts["attention"], *exact, "yes" if layouts["critic"] else "no"]
    flags = [f"`{' '.join(row['flags'])}`"] * bool(row["flags"])
    if row["run"] != "ok":
        return [row["name"], row["type"], reason(row["run"]), *["-"] * 5, ", ".join([row["hf"][:60], *flags]), *exact]
    alone = row["alone"]
    by = "transformers' class" if alone.get("served by", "").startswith("Transformers") else "vLLM's class"
    by = ", ".join([by, *flags])
    before, after = (f"{diff:.0e}" for diff in row["diff"])
    same = "same tokens" if alone.get("equal") else f"different: {alone.get('error', '')}"
    trained = "yes" if row["moved"] else "no"
    return [row["name"], row["type"], by, before, trained, after, row["resume"], same, "-", *exact]


def reason(outcome: str) -> str:
    """Return the part of a run's error that differs from model to model."""
    differs = re.search(r"log-probs differ by (\S+) nats per token .* before any training", outcome)
    if differs is not None:
        return f"rejected: log-probs differ by {differs.group(1)} nats before any training"
    found = re.sub(
        r"vLLM failed before its first sample.*?settings: (1 validation.*?error, |\w+: )*", "vLLM: ", outcome
    )
    found = re.sub(r"; use --rollout hf.*| ?\([\w./]+\.py:\d+\)", "", found)
    found = re.sub(r"vLLM: ?$", "vLLM: an assertion in its code fails", found)
    return found if len(found) <= 150 else f"{found[:150].rsplit(' ', 1)[0]} ..."


HEAD = ("model", "type", "engine", "before", "trained", "after", "resumed", "vLLM alone", "hf", "attention")
HEAD += ("shared", "padded", "packed", "critic")


def table(rows: list[dict]) -> str:
    """Return the rows in Markdown."""
    lines = [HEAD, ["---"] * len(HEAD), *(cells(row) for row in rows)]
    return "".join("| " + " | ".join(str(cell).replace("|", "/") for cell in line) + " |\n" for line in lines)


def page_text(rows: list[dict]) -> str:
    """Return the part of docs/models.md: a list of the models that need no flag, and a table of all others."""
    plain, others = [], []
    for row in rows:
        found = dict(zip(HEAD, cells(row), strict=True))
        exact = [name for name in ("shared", "padded", "packed") if found[name] == "exact"]
        engine = "trains" if row.get("run") == "ok" else found["engine"].replace("|", "/")
        if engine == "trains" and len(exact) == 3:
            plain.append(f"`{row['name']}`")
        else:
            others.append(f"| `{row['name']}` | {engine} | {', '.join(exact)} |\n")
    listed = textwrap.fill(", ".join(plain), 120, break_on_hyphens=False)
    head = "| model | default engine | exact layouts |\n|---|---|---|\n"
    return f"{len(plain)} models train with every layout:\n{listed}.\n\n{head}{''.join(others)}"


def main() -> int:
    """Compute what is missing and print the table; exit code 1 if a row is neither right nor rejected at the start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], choices=list(ZOO), metavar="NAME", help="these models, again")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "model_zoo", help="folder of results and logs")
    parser.add_argument("--limit", type=float, default=300, help="seconds of one part of a row, e.g. a run")
    parser.add_argument("--keep", action="store_true", help="keep models, runs and logs")
    parser.add_argument("--write", action="store_true", help=f"write list and table to {PAGE.relative_to(ROOT)}")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / "rows.jsonl"
    lines = results.read_text().splitlines() if results.exists() else []
    known = {row["name"]: row for row in map(json.loads, lines)}  # of a model that was computed twice the last counts
    missing = args.only or [name for name in ZOO if name not in known]
    if missing:
        os.environ |= {"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        import run_many

        script = run_many.load_script(ROOT / "grpo.py")
        critic = run_many.load_script(ROOT / "ppo.py")
        script.TokenValues = critic.TokenValues
    for name in missing:
        row = row_of(script, name, args.out, args.limit, args.keep)
        known[name] = row
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{name:18} {row['seconds']:5.0f} s  {'; '.join(faults(row)) or row.get('run')}", flush=True)
    if args.only:
        print(json.dumps([known[name] for name in args.only], indent=1))
    rows = [known[name] for name in ZOO if name in known]
    print(table(rows))
    wrong = {row["name"]: faults(row) for row in rows if faults(row)}
    print(f"{len(rows)} models, {len(rows) - len(wrong)} right or rejected at the start, {len(wrong)} wrong")
    for name, found in wrong.items():
        print(f"wrong: {name}: {'; '.join(found)}")
    if args.write:
        before, _, after = PAGE.read_text().partition(MARKS[0])
        PAGE.write_text(before + MARKS[0] + page_text(rows) + MARKS[1] + after.partition(MARKS[1])[2])
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

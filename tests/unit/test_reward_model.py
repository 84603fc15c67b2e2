"""A reward model with its own tokenizer and template: batching changes no score, and a run can use it."""

from __future__ import annotations

import datetime
import json
import shutil

import pytest
from helpers import ROOT, run_here, tiny_args

import rewards
from grpo import Args
from rewards import Reward
from runtime.run.reward_model import RewardModel
from runtime.training import model_files


@pytest.fixture(scope="module")
def classifier(tiny, tmp_path_factory):
    """A folder with a random two-layer classifier of one output; its template differs, its padding is its end."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    folder = tmp_path_factory.mktemp("models") / "classifier"
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        num_labels=1,
        pad_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.3,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def scorer(folder, token_budget: int = 10_000, **changes) -> RewardModel:
    """The reward model of a run with these arguments."""
    import torch

    names = {"reward_model_name_or_path": str(folder), "micro_batch_tokens": token_budget}
    return RewardModel(Args(**names, **changes), "cpu", torch.float32)


CONVERSATIONS = [([{"role": "user", "content": "Add " + "one " * i}], "It is " + "2 " * (9 - i)) for i in range(10)]


def test_batches_change_nothing(classifier):
    """Also where a text ends in the padding token: the score is the last token's, whatever the row's neighbours."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    reward_model = scorer(classifier)
    scores = reward_model.score(CONVERSATIONS)
    assert len({round(s, 4) for s in scores}) == 10, "they must differ, or nothing is shown"
    tokenizer = AutoTokenizer.from_pretrained(classifier)
    plain = AutoModelForSequenceClassification.from_pretrained(classifier)
    for (messages, response), found in zip(CONVERSATIONS, scores, strict=True):
        text = f"user: {messages[0]['content']}<|im_end|>assistant: {response}<|im_end|>"
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        assert ids[0, -1] == tokenizer.eos_token_id == tokenizer.pad_token_id
        hidden = plain.model(input_ids=ids).last_hidden_state[:, -1]
        assert plain.score(hidden).item() == pytest.approx(found, abs=1e-5)
    for budget in (1, 100, 250):
        again = scorer(classifier, budget).score(CONVERSATIONS)
        assert again == pytest.approx(scores, abs=1e-5)
    assert next(reward_model.model.parameters()).device.type == "cpu"


SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
POSITIONS = {  # absolute ones: GPT-2 counts from the left, RoBERTa begins after its padding
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256, "initializer_range": 0.3},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 64, "init_std": 0.3, **SHAPE},
    "roberta": {"intermediate_size": 64, "max_position_embeddings": 64 + 3, "initializer_range": 0.3, **SHAPE},
}


@pytest.fixture(scope="module")
def positions(tiny, tmp_path_factory):
    """A folder with classifiers of absolute positions, whose tokenizer pads on the left."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path_factory.mktemp("positions")
    tokenizer = AutoTokenizer.from_pretrained(tiny, padding_side="left")
    ids = {"vocab_size": len(tokenizer), "pad_token_id": 2, "bos_token_id": 1, "eos_token_id": 2, "num_labels": 1}
    for name, shape in POSITIONS.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(name, **ids, **shape)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize("name", ["gpt2", "opt", "roberta"])
def test_padding_changes_no_score_of_absolute_positions(positions, name):
    """Also of conversations longer than the model: its last tokens are scored, for RoBERTa 64 of 67 positions."""
    reward_model = scorer(positions / name)
    talks = [*CONVERSATIONS, ([{"role": "user", "content": "7 + 8 = " * 40}], "15")]
    together = reward_model.score(talks)
    alone = [reward_model.score([talk])[0] for talk in talks]
    assert together == pytest.approx(alone, abs=1e-4)
    assert len({round(score, 3) for score in alone}) > 5
    if name == "roberta":
        assert reward_model.longest == 64


def test_a_limit_beyond_robertas_positions_is_rejected(positions, refused):
    assert "at most the 64 tokens" in refused(scorer, positions / "roberta", reward_model_max_length=65)
    assert scorer(positions / "roberta", reward_model_max_length=64).longest == 64


def test_bf16_scores_keep_their_differences(classifier):
    """The head computes in fp32: 40 close conversations have 40 scores, as with fp32 products of the same weights."""
    import torch

    args = Args(reward_model_name_or_path=str(classifier), micro_batch_tokens=1000)
    reward_model = RewardModel(args, "cpu", torch.bfloat16)
    talks = [([{"role": "user", "content": f"{i} + {i % 7}"}], str(i)) for i in range(40)]
    scores = reward_model.score(talks)
    assert any(score != float(torch.tensor(score).bfloat16()) for score in scores)
    assert len(set(scores)) >= 39


@pytest.mark.parametrize("fault", ["no template", "no system", "token"])
def test_a_conversation_that_cannot_be_scored_is_rejected_at_the_start(classifier, tmp_path, refused, fault):
    """No chat template, one that rejects a role of the prompts, or a token without an embedding."""
    from transformers import AutoTokenizer

    folder = tmp_path / "scorer"
    shutil.copytree(classifier, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if fault == "no template":
        tokenizer.chat_template = None
        (folder / "chat_template.jinja").unlink()
    if fault == "no system":
        tokenizer.chat_template = (
            "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}x"
        )
    if fault == "token":
        tokenizer.add_tokens(["<extra>"])
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<extra>{% endfor %}"
    tokenizer.save_pretrained(folder)
    reward_model = scorer(folder)
    prompts = [[{"role": "user", "content": "1 + 1"}], [{"role": "system", "content": "Add."}, *CONVERSATIONS[0][0]]]
    said = refused(reward_model.try_on, prompts)
    assert f"--reward_model_name_or_path {folder}" in said
    assert {"no template": "template", "no system": "system, user, assistant", "token": "<extra>"}[fault] in said
    scorer(classifier).try_on(prompts)


def test_a_missing_head_is_rejected(classifier, tmp_path, refused):
    """By its name: its scores would be random, and others in each run."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "scorer"
    shutil.copytree(classifier, folder)
    weights = load_file(folder / "model.safetensors")
    weights["value_head.weight"] = weights.pop("score.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    said = refused(scorer, folder)
    assert "--reward_model_name_or_path" in said
    assert "score.weight" in said


def test_the_last_tokens_are_read(classifier):
    """With --reward_model_max_length texts with the same end have one score, and those that fit keep theirs."""
    whole = scorer(classifier)
    lengths = []
    for messages, response in CONVERSATIONS:
        text = [*messages, {"role": "assistant", "content": response}]
        lengths.append(len(whole.tokenizer.apply_chat_template(text, return_dict=False)))
    limit = sorted(lengths)[4]
    plain = whole.score(CONVERSATIONS)
    short = scorer(classifier, reward_model_max_length=limit).score(CONVERSATIONS)
    kept = [a == pytest.approx(b, abs=1e-5) for a, b in zip(plain, short, strict=True)]
    assert kept == [length <= limit for length in lengths] and False in kept
    (messages, response) = CONVERSATIONS[0]
    tail = scorer(classifier, reward_model_max_length=5)
    other = [{"role": "user", "content": "Anything else"}]
    first, second = tail.score([(messages, response), (other, response)])
    assert first == pytest.approx(second, abs=1e-5)


def test_its_template_writes_the_same_date_on_every_day(classifier, monkeypatch):
    """As the policy's does: a run that goes on after midnight is scored as it was before."""
    from transformers.utils import chat_template_utils

    reward_model = scorer(classifier)
    dated = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m['content'] }}{% endfor %}<|im_end|>"
    monkeypatch.setattr(reward_model.tokenizer, "chat_template", dated)

    def on(year: int) -> list[float]:
        class Clock(datetime.datetime):
            @classmethod
            def now(cls, tz=None):
                return cls(year, 2, 3)

        monkeypatch.setattr(chat_template_utils, "datetime", Clock)
        return reward_model.score(CONVERSATIONS[:2])

    assert on(2025) == on(2031)


@pytest.mark.parametrize(
    ("name", "trust", "revision"),
    [("me/scorer", False, None), ("me/scorer@v2", False, "v2"), ("me/own@v3", True, "v3")],
)
def test_a_revision_of_the_hub_and_code_of_its_own(classifier, monkeypatch, name, trust, revision):
    """Weights and tokenizer are of the revision that --reward_model_name_or_path names; code runs only if trusted."""
    import transformers

    asked = []
    for auto in (transformers.AutoTokenizer, transformers.AutoModelForSequenceClassification):
        plain = auto.from_pretrained

        def found(repository, *rest, plain=plain, revision=None, trust_remote_code=None, **more):
            asked.append((repository, revision, trust_remote_code))
            return plain(classifier, *rest, **more)

        monkeypatch.setattr(auto, "from_pretrained", found)
    scorer(name, trust_remote_code=trust)
    assert asked == [(name.partition("@")[0], revision, trust)] * 2


def test_weight_and_gate(classifier):
    reward_model = scorer(classifier, 1000)
    first, second = reward_model.score(CONVERSATIONS[:2])
    found = [Reward(1.0, {"correct": 1.0}), Reward(0.0, {"gate": 0.0})]
    added = reward_model.add(found, CONVERSATIONS[:2], {"reward_model": 0.5})
    assert added[0].score == pytest.approx(1 + 0.5 * first) and added[1].score == 0.0
    assert added[0].parts == {"correct": 1.0, "reward_model": pytest.approx(first)}
    assert added[1].parts["reward_model"] == pytest.approx(second)
    assert reward_model.add([], [], {}) == []


def test_refused(classifier, tiny, tmp_path, refused):
    two = tmp_path / "two"
    shutil.copytree(classifier, two)
    config = json.loads((classifier / "config.json").read_text())
    (two / "config.json").write_text(json.dumps(config | {"id2label": {"0": "a", "1": "b"}}))
    known = {"reward_model_name_or_path": str(classifier)}
    cases = [
        ({"reward_model_name_or_path": str(tiny)}, "--reward_model_name_or_path", "2 outputs, must have one"),
        ({"reward_model_name_or_path": str(tmp_path / "none")}, "--reward_model_name_or_path", "no such folder"),
        ({"reward_model_name_or_path": str(two)}, "--reward_model_name_or_path", "2 outputs"),
        ({"reward_model_max_length": 9}, "--reward_model_max_length", "needs --reward_model_name_or_path"),
        ({"reward_model_name_or_path": f"{classifier}@v2"}, "--reward_model_name_or_path", "drop @v2"),
        (known | {"reward_model_max_length": 0}, "--reward_model_max_length", "must be above 0"),
        (known | {"reward_model_max_length": 257}, "--reward_model_max_length", "at most the 256 tokens"),
    ]
    for changes, flag, words in cases:
        message = refused(model_files.check_reward_model, Args(**changes))
        assert f"error: {flag}" in message and words in message, message
    model_files.check_reward_model(Args(**known, reward_model_max_length=256))


@pytest.mark.slow
def test_run(classifier, tiny, tmp_path):
    """Two steps whose reward is the reward model's alone, on prompts without truths."""
    args = tiny_args(tiny, tmp_path, reward_model_name_or_path=str(classifier), reward_weights=("reward_model=2",))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"question": f"Say {i}."}) + "\n" for i in range(12)))
    args.dataset, args.verifier = str(prompts), "reward_model"
    steps = run_here(args)
    assert len(steps) == 2 and all(s["reward/std"] > 0 and s["reward/zero_std_frac"] == 0 for s in steps)


def test_the_page_is_complete():
    """docs/data_and_rewards.md has a row for every verifier, and names every flag of rewards."""
    page = (ROOT / "docs" / "data_and_rewards.md").read_text()
    table = page.partition("\n| verifier |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1].strip(" `") for line in table.splitlines() if line.startswith("| `")]
    assert set(rows) == set(rewards.VERIFIERS)
    flags = {name for name in vars(Args()) if name.startswith("reward_")}
    for name in flags | {"verifier", "verifier_key", "bad_rows", "allow_unsafe_code_exec", "overlong_buffer"}:
        assert f"--{name}" in page, name

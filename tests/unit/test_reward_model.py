"""A reward model with its own tokenizer and template: batching changes no score, and a run can use it."""

from __future__ import annotations

import json

import pytest
from helpers import ROOT, run_here, tiny_args

import rewards
from grpo import Args
from rewards import Reward, RewardModel
from runtime import flags


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


CONVERSATIONS = [([{"role": "user", "content": "Add " + "one " * i}], "It is " + "2 " * (9 - i)) for i in range(10)]


def test_batches_change_nothing(classifier):
    """Also where a text ends in the padding token: the score is the last token's, whatever the row's neighbours."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    reward_model = RewardModel(str(classifier), 10_000, "cpu", torch.float32)
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
        again = RewardModel(str(classifier), budget, "cpu", torch.float32).score(CONVERSATIONS)
        assert again == pytest.approx(scores, abs=1e-5)
    assert next(reward_model.model.parameters()).device.type == "cpu"


def test_weight_and_gate(classifier):
    import torch

    reward_model = RewardModel(str(classifier), 1000, "cpu", torch.float32)
    first, second = reward_model.score(CONVERSATIONS[:2])
    found = [Reward(1.0, {"correct": 1.0}), Reward(0.0, {"gate": 0.0})]
    added = reward_model.add(found, CONVERSATIONS[:2], {"reward_model": 0.5})
    assert added[0].score == pytest.approx(1 + 0.5 * first) and added[1].score == 0.0
    assert added[0].parts == {"correct": 1.0, "reward_model": pytest.approx(first)}
    assert added[1].parts["reward_model"] == pytest.approx(second)
    assert reward_model.add([], [], {}) == []


def test_refused(classifier, tiny, tmp_path, capsys):
    for name, word in ((str(tiny), "no sequence classifier"), (str(tmp_path / "none"), "no such folder")):
        with pytest.raises(SystemExit) as end:
            flags.check_reward_model(name)
        assert end.value.code == 2
        message = capsys.readouterr().err
        assert "--reward_model_name_or_path" in message and word in message
    flags.check_reward_model(str(classifier))
    config = json.loads((classifier / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"id2label": {"0": "a", "1": "b"}}))
    with pytest.raises(SystemExit):
        flags.check_reward_model(str(tmp_path))
    assert "2 outputs" in capsys.readouterr().err


@pytest.mark.slow
def test_run(classifier, tiny, tmp_path):
    """Two steps whose reward is the reward model's alone."""
    args = tiny_args(tiny, tmp_path, reward_model_name_or_path=str(classifier), reward_weights=("reward_model=2",))
    args.reward_fn, args.reward_weights = None, ("last_number=0", "reward_model=2")
    steps = run_here(args)
    assert len(steps) == 2 and all(s["reward/std"] > 0 and s["reward/zero_std_frac"] == 0 for s in steps)


def test_the_page_is_complete():
    """docs/rewards.md names every verifier, every constraint, and every flag of rewards."""
    page = (ROOT / "docs" / "rewards.md").read_text()
    for name in rewards.VERIFIERS:
        assert f"| `{name}` |" in page
    for name in rewards.CONSTRAINTS:
        assert f"`{name}`" in page
    rows = [line.split("|")[1].strip(" `") for line in page.splitlines() if line.startswith("| `")]
    assert set(rows) == set(rewards.VERIFIERS)
    flags = {name for name in vars(Args()) if name.startswith("reward_") and name not in ("reward_workers",)}
    for name in flags | {"verifier", "verifier_key", "bad_rows", "allow_unsafe_code_exec", "overlong_buffer"}:
        assert f"--{name}" in page, name

"""scripts/attack_reward.py on published rewards that pay for what knows nothing, and on sound ones."""

from __future__ import annotations

import json

import attack_reward
import attacked_rewards
import pytest
from helpers import ROOT

DATA = attacked_rewards.data()
FILE = ROOT / "tests" / "attacked_rewards.py"
BROKEN = {f"{FILE}:{reward.__name__}": kind for reward, kind in attacked_rewards.BROKEN.items()}
SOUND = {f"{FILE}:{reward.__name__}": kind for reward, kind in attacked_rewards.SOUND.items()}
SOUND |= attacked_rewards.VERIFIERS
SUMS = "reasoning_gym:chain_sum?min_terms=3&max_terms=3&min_digits=3&max_digits=3"


def attacked(reward: str, kind: str, tmp_path, *more: str) -> int:
    """The exit code, by the fixed answers alone."""
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in DATA.get(kind, [])))
    words = [*reward.split(), "--dataset", SUMS if kind == "gym" else str(file), "--minutes", "0"]
    words += ["--ground_truth_key", "tests"] if kind == "programs" else []
    words += ["--system_prompt", ""] if kind in ("numbers", "words") else []
    return attack_reward.main([*words, *more])


def name(reward: str) -> str:
    return reward.rpartition(":")[2]


@pytest.mark.slow
@pytest.mark.parametrize("reward", BROKEN, ids=name)
def test_a_reward_that_pays_for_nothing_is_found(reward, tmp_path):
    assert attacked(reward, BROKEN[reward], tmp_path) == 1


@pytest.mark.slow
@pytest.mark.parametrize("reward", SOUND, ids=name)
def test_a_sound_reward_is_not_accused(reward, tmp_path, capsys):
    """Nor called safe."""
    assert attacked(reward, SOUND[reward], tmp_path) == 0
    assert "there may be other ways" in capsys.readouterr().out


@pytest.mark.slow
def test_a_form_that_only_this_reward_pays(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def total(response, truth, row):\n    return ('Total:' in response) / 5 + (response == 'Total: ' + truth)"
    )
    found = [attacked(f"{tmp_path}/mine.py:total", "numbers", tmp_path, *form) for form in ((), ("--form", "Total:"))]
    assert found == [0, 1]


def test_the_start_names_what_is_missing(tmp_path, monkeypatch, refused):
    monkeypatch.setattr(attack_reward, "MODEL", tmp_path / "none")
    assert "make testbed" in refused(attack_reward.parse, ["math"])
    assert "no verifier 'nonsense'" in refused(attack_reward.parse, ["nonsense", "--minutes", "0"])
    assert "need episodes" in refused(attack_reward.parse, ["math", "--minutes", "0", "--environment", "a.py:B"])


@pytest.mark.learn
def test_a_policy_finds_what_no_fixed_answer_does(testbed, tmp_path, capsys):
    """A sign that no answer of the table has, and with which the small model begins a third of its answers."""
    file = tmp_path / "mine.py"
    file.write_text("def tilde(response, truth, row):\n    return float('~' in response)\n")
    sums = "reasoning_gym:chain_sum?min_terms=2&max_terms=3&min_digits=1&max_digits=1"
    assert attack_reward.main([f"{file}:tilde", "--dataset", sums, "--minutes", "1.5"]) == 1
    assert "policy     " in capsys.readouterr().out

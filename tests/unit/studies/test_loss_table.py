"""studies/loss_table.py: what each loss ascends, and the numbers of docs/maintainers/losses.md.

The page's numbers are those of commit d4e19fd, at which every cell was computed a second time from the definitions.
"""

from __future__ import annotations

import re
from functools import cache

import enumeration
import loss_table
import pytest
import torch
from helpers import ROOT

torch.set_num_threads(1)


@cache
def place(name: str, max_length: int = 4) -> tuple[enumeration.World, enumeration.Policies]:
    """The world and the policies of a condition of the table."""
    world = enumeration.World(max_length)
    return world, enumeration.policies_of(world, name)


# ---------------------------------------------------------------------------------------------------- what is ascended

SURROGATE = enumeration.SURROGATE
LIKELIHOOD = enumeration.LIKELIHOOD
UNNAMED = enumeration.UNNAMED
CLIPPED = ("E[R]", SURROGATE, UNNAMED, LIKELIHOOD, UNNAMED)
CORRECTED = ("E[R]", SURROGATE, UNNAMED, UNNAMED, UNNAMED)
ASCENDS = {
    "policy gradient": ("E[R]", LIKELIHOOD, LIKELIHOOD, LIKELIHOOD, LIKELIHOOD),
    "sequence ratio": ("E[R]",) * 5,
    "token ratio": ("E[R]", SURROGATE, SURROGATE, LIKELIHOOD, UNNAMED),
    "PPO clip": CLIPPED,
    "clip-higher": CLIPPED,
    "dual clip": CLIPPED,
    "TIS, token": CORRECTED,
    "TIS, sequence": CORRECTED,
    "decoupled PPO": ("E[R]", SURROGATE, UNNAMED, SURROGATE, UNNAMED),
    "IcePop": CORRECTED,
    "MIS, token": CORRECTED,
    "MIS, sequence": CORRECTED,
    "sequence rejection": CORRECTED,
    "off-policy mask": CORRECTED,
    "TRM": CORRECTED,
    "DPPO": CORRECTED,
    "CISPO": ("E[R]", SURROGATE, UNNAMED, LIKELIHOOD, UNNAMED),
    "GSPO": ("E[A / length]", UNNAMED, UNNAMED, UNNAMED, UNNAMED),
    "GMPO": ("E[A / length]", UNNAMED, UNNAMED, UNNAMED, UNNAMED),
    "SAPO": ("E[R]", UNNAMED, UNNAMED, LIKELIHOOD, UNNAMED),
    "DRO": ("E[R]", UNNAMED, UNNAMED, UNNAMED, UNNAMED),
    "IPO": ("E[R]", SURROGATE, SURROGATE, SURROGATE, SURROGATE),
    "prefix product": ("E[R]", UNNAMED, UNNAMED, UNNAMED, UNNAMED),
    "prefix minimum": ("E[R]", UNNAMED, UNNAMED, UNNAMED, UNNAMED),
    "TOPR": ("E[R]", UNNAMED, UNNAMED, UNNAMED, UNNAMED),
    "score centering": ("E[R]", UNNAMED, UNNAMED, UNNAMED, UNNAMED),
}


@pytest.mark.parametrize("where", enumeration.CONDITIONS)
@pytest.mark.parametrize("name", loss_table.LOSSES)
def test_every_policy_loss_ascends_what_the_table_says(name, where):
    position = list(enumeration.CONDITIONS).index(where)
    assert loss_table.loss_row(name, *place(where)).ascends == ASCENDS[name][position]


# Bias and size far from the sampler, with the seeds 5 and 7.
FAR = {
    "policy gradient": (0.2484417, 1.117105, 0.4786321, 0.8738648),
    "sequence ratio": (0, 1, 0, 1),
    "token ratio": (1.540107, 2.46119, 0.4199506, 0.9793985),
    "PPO clip": (1.596442, 2.510107, 0.4782691, 0.9533615),
    "clip-higher": (1.596442, 2.510107, 0.4782691, 0.9533615),
    "dual clip": (0.6001179, 0.5670981, 0.4867541, 0.8616269),
    "TIS, token": (0.2495586, 1.117567, 0.4912377, 0.8490251),
    "TIS, sequence": (0.5088445, 1.296201, 0.3952667, 0.9067209),
    "decoupled PPO": (0.2977868, 1.194709, 0.4905489, 0.8509583),
    "IcePop": (0.2567285, 0.9041564, 0.4922971, 0.8487917),
    "MIS, token": (0.6263766, 0.5717731, 0.4926994, 0.8477196),
    "MIS, sequence": (0.6202213, 0.5051466, 0.4981419, 0.8490409),
    "sequence rejection": (0.9668927, 0.1767885, 0.5083424, 0.8597538),
    "off-policy mask": (1.59217, 2.501093, 0.4045499, 0.916514),
    "TRM": (0.2670977, 1.054586, 0.5039769, 0.841519),
    "DPPO": (0.2393693, 1.124659, 0.4585971, 0.8689653),
    "CISPO": (0.2927663, 0.7876863, 0.4485404, 0.8800734),
    "GSPO": (1.468747, 2.338387, 0.5009161, 0.6637419),
    "GMPO": (1.47834, 2.348808, 0.5152227, 0.6552181),
    "SAPO": (0.6389557, 0.4937564, 0.4637859, 0.8829171),
    "DRO": (0.2852768, 1.160659, 0.9572587, 1.239322),
    "IPO": (0.2211057, 1.102931, 0.4695577, 0.8578039),
    "prefix product": (0.1830176, 1.085957, 0.226415, 0.9632863),
    "prefix minimum": (0.1875061, 1.086231, 0.376194, 0.9020902),
    "TOPR": (0.2909263, 1.150804, 0.5197747, 0.8811314),
    "score centering": (0.2214734, 1.076007, 0.4813342, 0.8728531),
}


def far_apart(seed: int) -> tuple[enumeration.World, enumeration.Policies]:
    """Graded rewards, and policies that differ a lot after some prefixes: every clip, cap and mask acts."""
    world = enumeration.World(4, seed=seed + 5, binary=False)
    rng = torch.Generator().manual_seed(seed)
    start = world.noise(1.0, rng)
    distance = 2 * torch.rand(world.n_rows, 1, generator=rng, dtype=torch.float64) ** 3
    pi, old, sampler = (start + distance * world.noise(1.0, rng) for _ in range(3))
    return world, enumeration.Policies(pi, old, sampler)


@pytest.mark.parametrize("name", FAR)
def test_every_policy_loss_gives_the_recorded_numbers_far_from_the_sampler(name):
    """Bias and size in two worlds, as they were when each loss was also derived by hand (commit d4e19fd)."""
    rows = [loss_table.loss_row(name, *far_apart(seed)) for seed in (5, 7)]
    assert [x for row in rows for x in (row.bias, row.size)] == pytest.approx(FAR[name], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_on_fresh_samples_all_but_the_length_normalized_losses_are_unbiased(seed):
    """For any policy and any rewards, not only those of the table."""
    world = enumeration.World(max_length=4, seed=seed, binary=False)
    logits = 2 * world.noise(1.0, torch.Generator().manual_seed(seed))
    policies = enumeration.Policies(logits, logits, logits)
    for name in loss_table.LOSSES:
        row = loss_table.loss_row(name, world, policies)
        if name in ("GSPO", "GMPO"):
            assert row.bias > 0.1 and row.ascends == "E[A / length]", name
        else:
            assert row.bias < 1e-12, name


def test_score_centering_subtracts_the_sampler_s_mean_score():
    """Its expected update is that of the policy gradient minus E[A] times the sampler's mean score of each token."""
    world, policies = place("async")
    plain = loss_table.expected(loss_table.LOSSES["policy gradient"], world, policies)
    found = loss_table.expected(loss_table.LOSSES["score centering"], world, policies)
    sampler, pi = policies.sampler.softmax(-1), policies.pi.softmax(-1)
    mean = torch.zeros(len(world.rows), world.n_rows, 3, dtype=torch.float64)
    mean[torch.arange(len(world.rows)), world.rows] = (sampler - pi)[world.rows]
    advantages = world.advantages(policies.sampler)[world.owner]
    removed = world.sum_over_response(advantages[:, None] * mean.flatten(1))
    assert torch.allclose(found.updates, plain.updates - removed, rtol=1e-9, atol=1e-12)


# ------------------------------------------------------------------------------------------------------------- recipes


@pytest.mark.integration
def test_recipes_ascend_what_the_table_says():
    ascends = {
        "constant": "E[R]",
        "sequence": "c E[A / length]",
        "token": UNNAMED,
        "centered": "c E[R]",
        "std": "sum_x c_x E[R|x]",
        "filter": "sum_x c_x E[R|x]",
        "GRPO": UNNAMED,
        "Dr. GRPO": "c E[R]",
        "DAPO": UNNAMED,
        "VL norm": UNNAMED,
        "two rewards, std": UNNAMED,
        "GDPO": UNNAMED,
    }
    for name, label in ascends.items():
        assert loss_table.recipe_row(name, *place("fresh", 2)).ascends == label, name
        assert loss_table.recipe_row(name, *place("stale", 2)).ascends == UNNAMED, name


# ------------------------------------------------------------------------------------------------- the page, the script


def page_cells() -> dict[str, list[str]]:
    """The rows of the tables of docs/maintainers/losses.md: first column -> the others."""
    found = {}
    for line in (ROOT / "docs" / "maintainers" / "losses.md").read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]
        if len(cells) > 3:
            found.setdefault(cells[1], cells[2:-1])  # a later table has medians
    return found


@pytest.fixture(scope="module")
def rows():
    return loss_table.table()


@pytest.mark.integration
def test_the_page_shows_the_numbers_of_the_script(rows):
    cells = page_cells()
    for name in loss_table.LOSSES:
        found = [rows[condition, name] for condition in ("stale", "unlike")]
        assert cells[name] == [f"{row.bias:.2f} {row.cosine:+.2f}" for row in found], name
    dropped = {"TRM": [0.51, 0.87], "DPPO": [0.18, 0.25], "PPO clip": [0.20, 0.14]}
    for name, fractions in dropped.items():
        assert [round(rows[condition, name].zero, 2) for condition in ("stale", "async")] == fractions, name
    for name in loss_table.RECIPES.keys() - {"Dr. GRPO"}:  # its row is that of "centered"
        found = [rows[condition, name] for condition in loss_table.RECIPE_CONDITIONS]
        numbers = [f"{row.size:.2f} {row.cosine:+.2f} {row.noise:.2f}" for row in found]
        ascends = found[0].ascends.replace("|", "\\|")
        assert cells[name][1:] == [*numbers, ascends], name

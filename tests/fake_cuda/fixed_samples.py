"""Draw responses by their seeds alone, so that runs in different data types train on the same tokens.

A run takes this module by ``--external_lib fake_cuda.fixed_samples`` and samples with ``--rollout hf``. Log-probs are
the model's. On the fake device it also takes the table of operators.
"""

from __future__ import annotations

import importlib
import random

import torch

import utils
from runtime.data.samples import Sample
from runtime.training.batching import micro_batches

if torch.cuda.is_available():
    importlib.import_module("fake_cuda.operators")


@torch.no_grad()
def drawn(model, prompt_ids, keys, seed, sampling, stop_ids, device):
    """Yield what ``utils._generate`` does, with tokens that do not depend on the model."""
    scorer = utils.TokenLogprobs(model, sampling["temperature"], chunk=1024)
    for key in keys:
        source = random.Random(f"{seed}/{key}")
        response = [source.randrange(3, model.config.vocab_size) for _ in range(sampling["max_tokens"])]
        sample = Sample(0, 0, prompt_ids, response, [], "", [])
        place = {"layout": "padded", "budget": 1, "rank": 0, "world_size": 1, "device": device}
        (batch,) = micro_batches([sample], [0], **place)
        yield key, response, scorer(batch)[0].tolist(), "length"


utils._generate = drawn

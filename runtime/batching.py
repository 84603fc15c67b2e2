"""Rows and micro-batches: which tokens of which samples share a forward pass.

Shapes in names: B rows, S positions of a row, T response tokens of a micro-batch, U of them different, N response
tokens of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.records import Sample


@dataclass
class MicroBatch:
    """Rows for one forward pass, and where in them the response tokens are.

    ``predict`` and ``targets`` describe U different tokens, of which the T tokens of the samples are copies: a token
    after the same tokens is computed once. ``tokens`` holds, for each of the T, its place among the N
    tokens of the step: per-token arrays (advantages, old log-probs, weights) are kept flat, [N], and indexed with it.
    ``scale`` is 0 for a batch that only keeps a rank in step with the others, else 1. Add to such arrays, do not set
    them: that batch may hold tokens that this rank has computed already.
    """

    input_ids: torch.Tensor  # [B, S]
    position_ids: torch.Tensor  # [B, S]
    attention_mask: torch.Tensor | None  # [B, 1, S, S] additive, [B, S], or None for one packed row
    predict: torch.Tensor  # [U] place in B*S whose logits predict the token
    targets: torch.Tensor  # [U] the token
    copies: torch.Tensor  # [T] which of the U
    tokens: torch.Tensor  # [T] place in the step's flat arrays
    most_predictions: int  # largest U of all ranks at this position of the plan
    scale: float = 1.0

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        return MicroBatch(*(v.to(device) if isinstance(v, torch.Tensor) else v for v in vars(self).values()))


def token_offsets(samples: list[Sample]) -> list[int]:
    """Where each sample's response begins in the flat per-token arrays; the last entry is their length N."""
    offsets = [0]
    for sample in samples:
        offsets.append(offsets[-1] + len(sample.response_ids))
    return offsets


class Tree:
    """A prompt and its responses ``members`` as paths in the tree of their beginnings.

    The same tokens after the same tokens have the same hidden state, so each node is computed once: the prompt, what
    several responses begin with, a response that was sampled twice. A last token predicts nothing and is not computed.
    """

    def __init__(self, samples: list[Sample], members: list[int]):
        self.prompt, self.members, self.paths = samples[members[0]].prompt_ids, members, []
        nodes: dict[tuple[int, int], int] = {}  # (node before it or -1 for the prompt, token) -> node
        for i in members:
            node, path = -1, []
            for token in samples[i].response_ids:
                node = nodes.setdefault((node, token), len(nodes))
                path.append(node)
            self.paths.append(path)
        self.nodes = list(nodes)
        self.inner = sorted({before for before, _ in nodes} - {-1})

    def __len__(self) -> int:
        """Tokens that are computed."""
        return len(self.prompt) + len(self.inner)


def make_rows(samples: list[Sample], indices: list[int], layout: str, budget: int, most: int) -> list[list[int]]:
    """Lists of samples that share a row of at most ``budget`` tokens and ``most`` samples.

    shared: samples of one prompt, the prompt once. packed: any samples, first fit by decreasing length. padded: one.
    """

    def length(i: int) -> int:
        return len(samples[i].prompt_ids) + len(samples[i].response_ids)

    if layout == "padded":
        return [[i] for i in indices]
    rows: list[list[int]] = []
    used: list[int] = []
    if layout == "packed":
        for i in sorted(indices, key=length, reverse=True):
            fits = (r for r, row in enumerate(rows) if used[r] + length(i) <= budget and len(row) < most)
            r = next(fits, None)
            if r is None:
                rows.append([i]), used.append(length(i))
            else:
                rows[r].append(i)
                used[r] += length(i)
        return rows
    open_row: dict[int, int] = {}  # prompt -> its row that still has room
    for i in indices:
        sample = samples[i]
        r = open_row.get(sample.prompt_id)
        if r is None or used[r] + len(sample.response_ids) > budget or len(rows[r]) == most:
            open_row[sample.prompt_id] = len(rows)
            rows.append([i]), used.append(length(i))
        else:
            rows[r].append(i)
            used[r] += len(sample.response_ids)
    return rows


def micro_batches(
    samples: list[Sample],
    indices: list[int],
    *,
    layout: str,
    budget: int,
    rank: int,
    world_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[MicroBatch]:
    """This rank's share of the samples ``indices``, cut into micro-batches of at most ``budget`` padded tokens.

    Every rank computes the whole plan from the same list, so that all of them run the same number of backward passes
    without asking each other: rows go, longest first, to the rank with least to do, and a rank with fewer micro-batches
    repeats one with scale 0. Which rank and micro-batch a token lands in does not change its gradient.
    """
    offsets = token_offsets(samples)
    rows: list[list[Tree]] = []
    for row in make_rows(samples, indices, layout, budget, most=-(-len(indices) // world_size)):
        rows.append([Tree(samples, members) for members in ([row] if layout == "shared" else [[i] for i in row])])
    rows.sort(key=lambda row: (-row_length(row), row[0].members))
    load, plans = [0] * world_size, [[] for _ in range(world_size)]
    for row in rows:
        least = load.index(min(load))
        load[least] += row_length(row)
        plans[least].append(row)
    batches: list[list[list[list[Tree]]]] = []  # rank -> micro-batch -> row -> trees
    for plan in plans:
        cut: list[list[list[Tree]]] = []
        for row in plan:  # longest first, so the first row of a micro-batch sets its width
            width = row_length(cut[-1][0]) if cut else 0
            if layout == "packed" or not cut or (len(cut[-1]) + 1) * width > budget:
                cut.append([row])
            else:
                cut[-1].append(row)
        batches.append(cut)
    count = max(len(cut) for cut in batches)
    mine = [_tensors(batch, offsets, layout, dtype) for batch in batches[rank]]
    while len(mine) < count:
        idle = _tensors([rows[-1]], offsets, layout, dtype)
        idle.scale = 0.0
        mine.append(idle)
    for position, batch in enumerate(mine):
        for plan in batches:
            rows_of_rank = plan[position] if position < len(plan) else [rows[-1]]
            batch.most_predictions = max(batch.most_predictions, count_predictions(rows_of_rank))
    return [batch.to(device) for batch in mine]


def count_predictions(rows: list[list[Tree]]) -> int:
    """Different tokens that a micro-batch of these rows predicts: U."""
    return sum(len(tree.nodes) for row in rows for tree in row)


def row_length(row: list[Tree]) -> int:
    """Tokens of a row."""
    return sum(len(tree) for tree in row)


def _tensors(rows: list[list[Tree]], offsets: list[int], layout: str, dtype: torch.dtype) -> MicroBatch:
    """Ids, positions, mask and index lists of some rows, right-padded to the longest."""
    width = max(row_length(row) for row in rows)
    ids, positions = torch.zeros(2, len(rows), width, dtype=torch.long)
    visible = torch.eye(width, dtype=torch.bool).repeat(len(rows), 1, 1) if layout == "shared" else None
    predict, targets, copies, tokens = [], [], [], []
    for b, row in enumerate(rows):
        start = 0
        for tree in row:
            # where nodes stand in the row, and in their sequence; node -1 is the last token of the prompt
            end, n = start + len(tree), len(tree.prompt)
            place = {-1: start + n - 1} | {node: start + n + k for k, node in enumerate(tree.inner)}
            depth = {-1: n - 1}
            for node in tree.inner:
                depth[node] = depth[tree.nodes[node][0]] + 1
            for path in tree.paths if visible is not None else ():
                seen = torch.tensor([*range(n), *(place[node] for node in path if node in place)])
                later, earlier = torch.tril_indices(len(seen), len(seen))
                visible[b, seen[later], seen[earlier]] = True
            ids[b, start:end] = torch.tensor([*tree.prompt, *(tree.nodes[node][1] for node in tree.inner)])
            positions[b, start:end] = torch.tensor([*range(n), *(depth[node] for node in tree.inner)])
            for path, i in zip(tree.paths, tree.members, strict=True):
                copies += [len(targets) + node for node in path]
                tokens += range(offsets[i], offsets[i] + len(path))
            predict += [b * width + place[before] for before, _ in tree.nodes]
            targets += [token for _, token in tree.nodes]
            start = end
    mask = None
    if layout == "padded":
        mask = (torch.arange(width) < torch.tensor([row_length(row) for row in rows])[:, None]).long()
    if visible is not None:
        mask = torch.zeros(len(rows), 1, width, width, dtype=dtype)
        mask.masked_fill_(~visible[:, None], torch.finfo(dtype).min)
    lists = (torch.tensor(x, dtype=torch.long) for x in (predict, targets, copies, tokens))
    return MicroBatch(ids, positions, mask, *lists, most_predictions=len(targets))

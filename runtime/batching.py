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
    after the same prefix is computed once. ``tokens`` holds, for each of the T, its place among the N tokens of the
    step: per-token arrays (advantages, old log-probs, weights) are kept flat, [N], and indexed with it. An idle
    micro-batch, which only keeps a rank in step with the others, has place N for all of its tokens: the arrays have one
    more slot at their end, whose weight is 0.
    """

    input_ids: torch.Tensor  # [B, S]
    position_ids: torch.Tensor  # [B, S]
    attention_mask: torch.Tensor | None  # [B, 1, S, S] additive, [B, S], or None for one packed row
    predict: torch.Tensor  # [U] place in B*S whose logits predict the token
    targets: torch.Tensor  # [U] the token
    copies: torch.Tensor  # [T] which of the U
    tokens: torch.Tensor  # [T] place in the step's flat arrays
    most_predictions: int  # largest U of all ranks at this position of the plan

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        moved = {}
        for name, value in vars(self).items():
            moved[name] = value.to(device) if isinstance(value, torch.Tensor) else value
        return MicroBatch(**moved)


def token_offsets(samples: list[Sample]) -> list[int]:
    """Where each sample's response begins in the flat per-token arrays; the last entry is their length N."""
    offsets = [0]
    for sample in samples:
        offsets.append(offsets[-1] + len(sample.response_ids))
    return offsets


class PrefixTree:
    """A prompt and the responses of the samples ``members``, as paths in the tree of their prefixes.

    The same tokens after the same tokens have the same hidden state, so each node is computed once: the prompt, a
    common prefix of several responses, a response that was sampled twice. A last token predicts nothing and is not
    computed.
    """

    def __init__(self, samples: list[Sample], members: list[int]):
        self.prompt = samples[members[0]].prompt_ids
        self.members = members
        self.paths: list[list[int]] = []  # the nodes of each response
        nodes: dict[tuple[int, int], int] = {}  # (parent, or -1 for the prompt, and token) -> node
        for i in members:
            node = -1
            path = []
            for token in samples[i].response_ids:
                node = nodes.setdefault((node, token), len(nodes))
                path.append(node)
            self.paths.append(path)
        self.nodes = list(nodes)
        parents = {parent for parent, _ in nodes}
        self.inner = sorted(parents - {-1})  # nodes that predict something

    def __len__(self) -> int:
        """Tokens that are computed."""
        return len(self.prompt) + len(self.inner)

    def ids(self) -> list[int]:
        """The tokens that are computed, in the order of a row."""
        ids = list(self.prompt)
        for node in self.inner:
            _, token = self.nodes[node]
            ids.append(token)
        return ids

    def positions(self) -> list[int]:
        """The place of each of these tokens in its own sequence."""
        count = len(self.prompt)
        depth = {-1: count - 1}
        for node in self.inner:
            parent, _ = self.nodes[node]
            depth[node] = depth[parent] + 1
        return [*range(count), *(depth[node] for node in self.inner)]

    def places(self, start: int) -> dict[int, int]:
        """Where each computed node is in a row in which the tree begins at ``start``; -1 is the prompt's last token."""
        first = start + len(self.prompt)
        places = {-1: first - 1}
        for k, node in enumerate(self.inner):
            places[node] = first + k
        return places


Row = list[PrefixTree]
MicroRows = list[Row]  # the rows of a micro-batch


def sample_length(sample: Sample) -> int:
    """Tokens of a prompt and its response."""
    return len(sample.prompt_ids) + len(sample.response_ids)


def make_rows(
    samples: list[Sample],
    indices: list[int],
    layout: str,
    budget: int,
    most: int,
) -> list[list[int]]:
    """Lists of samples that share a row of at most ``budget`` tokens and ``most`` samples.

    shared: samples of one prompt, the prompt once. packed: any samples, first fit by decreasing length. padded: one.
    """
    if layout == "padded":
        return [[i] for i in indices]
    if layout == "packed":
        return _packed_rows(samples, indices, budget, most)
    return _shared_rows(samples, indices, budget, most)


def _packed_rows(
    samples: list[Sample],
    indices: list[int],
    budget: int,
    most: int,
) -> list[list[int]]:
    """First fit by decreasing length."""
    rows: list[list[int]] = []
    used: list[int] = []  # tokens of each row
    lengths = {i: sample_length(samples[i]) for i in indices}
    for i in sorted(indices, key=lengths.get, reverse=True):
        length = lengths[i]
        for r, row in enumerate(rows):
            if used[r] + length <= budget and len(row) < most:
                row.append(i)
                used[r] += length
                break
        else:
            rows.append([i])
            used.append(length)
    return rows


def _shared_rows(
    samples: list[Sample],
    indices: list[int],
    budget: int,
    most: int,
) -> list[list[int]]:
    """Samples of one prompt in the order of ``indices``, as many per row as fit."""
    rows: list[list[int]] = []
    used: list[int] = []
    open_row: dict[int, int] = {}  # prompt -> its newest row
    for i in indices:
        sample = samples[i]
        r = open_row.get(sample.prompt_id)
        length = len(sample.response_ids)
        if r is None or used[r] + length > budget or len(rows[r]) == most:
            open_row[sample.prompt_id] = len(rows)
            rows.append([i])
            used.append(sample_length(sample))
        else:
            rows[r].append(i)
            used[r] += length
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

    Every rank computes the whole plan from the same list, so that all of them run the same number of backward passes,
    and of calls of the output head, without asking each other. A rank with fewer micro-batches repeats one whose
    tokens count nothing. Which rank and micro-batch a token lands in does not change its gradient.
    """
    rows: list[Row] = []
    most = -(-len(indices) // world_size)
    for row in make_rows(samples, indices, layout, budget, most):
        groups = [row] if layout == "shared" else [[i] for i in row]
        rows.append([PrefixTree(samples, members) for members in groups])
    rows.sort(key=lambda row: (-row_length(row), row[0].members))
    plans = [_cut(dealt, layout, budget) for dealt in _deal(rows, world_size)]
    offsets = token_offsets(samples)
    idle = [rows[-1]] if rows else []
    batches = []
    for position in range(max(len(plan) for plan in plans)):
        rows_by_rank = []
        for plan in plans:
            rows_by_rank.append(plan[position] if position < len(plan) else idle)
        batch = _tensors(rows_by_rank[rank], offsets, layout, dtype)
        batch.most_predictions = max(count_predictions(rows) for rows in rows_by_rank)
        if position >= len(plans[rank]):
            batch.tokens.fill_(offsets[-1])
        batches.append(batch.to(device))
    return batches


def _deal(rows: list[Row], world_size: int) -> list[list[Row]]:
    """The rows of each rank: the next row goes to the rank with the fewest tokens so far."""
    load = [0] * world_size
    dealt: list[list[Row]] = [[] for _ in range(world_size)]
    for row in rows:
        least = load.index(min(load))
        load[least] += row_length(row)
        dealt[least].append(row)
    return dealt


def _cut(rows: list[Row], layout: str, budget: int) -> list[MicroRows]:
    """Micro-batches of one rank's rows, which come longest first: the first row of a micro-batch sets its width."""
    cut: list[MicroRows] = []
    for row in rows:
        width = row_length(cut[-1][0]) if cut else 0
        if layout == "packed" or not cut or (len(cut[-1]) + 1) * width > budget:
            cut.append([row])
        else:
            cut[-1].append(row)
    return cut


def count_predictions(rows: MicroRows) -> int:
    """Different tokens that a micro-batch of these rows predicts: U."""
    return sum(len(tree.nodes) for row in rows for tree in row)


def row_length(row: Row) -> int:
    """Tokens of a row."""
    return sum(len(tree) for tree in row)


def _tensors(
    rows: MicroRows,
    offsets: list[int],
    layout: str,
    dtype: torch.dtype,
) -> MicroBatch:
    """Ids, positions, mask and index lists of some rows, right-padded to the longest."""
    width = max(row_length(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    positions = torch.zeros_like(ids)
    predict: list[int] = []
    targets: list[int] = []
    copies: list[int] = []
    tokens: list[int] = []
    for b, row in enumerate(rows):
        start = 0
        for tree in row:
            end = start + len(tree)
            ids[b, start:end] = torch.tensor(tree.ids())
            positions[b, start:end] = torch.tensor(tree.positions())
            for path, i in zip(tree.paths, tree.members, strict=True):
                copies += [len(targets) + node for node in path]
                tokens += range(offsets[i], offsets[i] + len(path))
            places = tree.places(start)
            predict += [b * width + places[parent] for parent, _ in tree.nodes]
            targets += [token for _, token in tree.nodes]
            start = end
    mask = None
    if layout == "padded":
        lengths = torch.tensor([row_length(row) for row in rows])
        mask = (torch.arange(width) < lengths[:, None]).long()
    if layout == "shared":
        mask = _tree_mask([tree for (tree,) in rows], width, dtype)
    return MicroBatch(
        input_ids=ids,
        position_ids=positions,
        attention_mask=mask,
        predict=torch.tensor(predict, dtype=torch.long),
        targets=torch.tensor(targets, dtype=torch.long),
        copies=torch.tensor(copies, dtype=torch.long),
        tokens=torch.tensor(tokens, dtype=torch.long),
        most_predictions=len(targets),
    )


def _tree_mask(trees: list[PrefixTree], width: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [B, 1, S, S] of rows of one tree each: a token sees the tokens before it on its own paths."""
    visible = torch.eye(width, dtype=torch.bool).repeat(len(trees), 1, 1)  # padding sees itself: no softmax of nothing
    for b, tree in enumerate(trees):
        places = tree.places(0)
        for path in tree.paths:
            on_path = [places[node] for node in path if node in places]
            seen = torch.tensor([*range(len(tree.prompt)), *on_path])
            later, earlier = torch.tril_indices(len(seen), len(seen))
            visible[b, seen[later], seen[earlier]] = True
    mask = torch.zeros(len(trees), 1, width, width, dtype=dtype)
    return mask.masked_fill_(~visible[:, None], torch.finfo(dtype).min)

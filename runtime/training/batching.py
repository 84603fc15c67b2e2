"""Rows and micro-batches: which tokens of which samples share a forward pass.

Shapes in names: B rows, S positions of a row, T response tokens of a micro-batch, U of them different, N response
tokens of a step.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from runtime.data.samples import Sample

CPU_ROW = 1024  # tokens of a shared row: its attention computes the whole square, siblings that are masked included
ROW_MULTIPLE = 128  # positions: what a shared row on a GPU is padded to, and the block of FlexAttention


@dataclass
class MicroBatch:
    """Rows for one forward pass, and where in them the response tokens are.

    ``predict`` and ``targets`` describe U different tokens, of which the T tokens of the samples are copies: a token
    after the same prefix is computed once. ``tokens`` holds, for each of the T, its place among the N tokens of the
    step: per-token arrays (advantages, old log-probs, weights) are kept flat, [N], and indexed with it. All tokens of
    an idle micro-batch, which only keeps a rank in step, have place N: one more slot of the arrays, of weight 0.

    Which token sees which is said by one of three, according to the layout; attention.py makes masks of it.
    """

    input_ids: torch.Tensor  # [B, S]
    position_ids: torch.Tensor  # [B, S]
    attention_mask: torch.Tensor | None  # padded: [B, S], 1 for a token and 0 for padding
    ends: torch.Tensor | None  # shared: [B, S], the token in place k is seen from the places k to ends[k] - 1
    borders: torch.Tensor | None  # packed: [samples + 1] int32, where in the one row each sample begins, and the end
    predict: torch.Tensor  # [U] place in B*S whose logits predict the token
    targets: torch.Tensor  # [U] the token
    copies: torch.Tensor  # [T] which of the U
    tokens: torch.Tensor  # [T] place in the step's flat arrays
    longest: int  # tokens of the longest sample
    most_predictions: int  # largest U of all ranks at this position of the plan
    is_last: bool = True  # of the plan
    kept: torch.Tensor | None = None  # [U, K] the ids that each token could have been, if sampling was truncated

    def to(self, device: torch.device) -> MicroBatch:
        """Copy the batch to another device: to a GPU from page-locked memory, or Python would wait for the GPU."""
        moved = dict(vars(self))
        for name, value in moved.items():
            if isinstance(value, torch.Tensor) and device.type == "cuda":
                moved[name] = value.pin_memory().to(device, non_blocking=True)
        return MicroBatch(**moved)


def token_offsets(samples: list[Sample]) -> list[int]:
    """Return the index of each sample's first token in the flat arrays of model tokens; the last entry is their N."""
    offsets = [0]
    for sample in samples:
        offsets.append(offsets[-1] + sample.length)
    return offsets


def flat(parts: list[np.ndarray], device: torch.device) -> torch.Tensor:
    """Flatten an array per sample, one value per token, to [N + 1]: one after the other, and a 0 for idle tokens."""
    idle = np.zeros(1, dtype=parts[0].dtype)
    whole = np.concatenate([*parts, idle])
    return torch.from_numpy(whole).to(device)


def per_token(values: list[float], offsets: list[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """Expand one value per sample to [N + 1]: the value of its sample for each token, and a 0 for idle tokens."""
    lengths = torch.tensor([*np.diff(offsets), 1])
    return torch.tensor([*values, 0]).repeat_interleave(lengths).to(device)


class PrefixTree:
    """A prompt and the responses of the samples ``members``, as paths in the tree of their prefixes.

    The same tokens after the same tokens have the same hidden state, so each node is computed once: the prompt, a
    common prefix of several responses, a response that was sampled twice. A last token predicts nothing and is not
    computed.

    Responses are sorted (by bytes, which serves as well as by ids), so the nodes, numbered as they come, are in
    preorder: the subtree of a node is the nodes from it up to one place, which is all that a mask needs.

    The constructor only counts, which every rank does for every row; ``arrays`` is for a rank's own rows.
    """

    def __init__(self, samples: list[Sample], members: list[int]):
        self.prompt = samples[members[0]].prompt_ids
        self.members = list(members)
        if len(members) > 1:
            self.members.sort(key=lambda i: samples[i].response_ids.tobytes())
        self.responses = [samples[i].response_ids for i in self.members]
        self.own = [samples[i].own() for i in self.members]
        self.kept: list[int] = []  # tokens that each response has in common with the one before
        leaves = 0
        before = np.empty(0, dtype=np.int32)
        for response in self.responses:
            kept = common_prefix(before, response)
            extends = kept == len(before)  # it continues the response before, whose last token is then no leaf
            if len(response) > kept and (kept == 0 or not extends):
                leaves += 1
            self.kept.append(kept)
            before = response
        self.nodes = sum(len(r) for r in self.responses) - sum(self.kept)
        self.inner = self.nodes - leaves  # nodes that predict something

    def __len__(self) -> int:
        """Return the number of tokens that are computed."""
        return len(self.prompt) + self.inner

    def arrays(self) -> TreeArrays:
        """Return ids, positions and subtrees of computed tokens, and the places that predict each response's tokens."""
        paths = []
        parents = []
        depths = []
        ends = []
        tokens = []
        starts = np.zeros(len(self.responses) + 1, dtype=np.int64)  # first node of each response's own
        for j, response in enumerate(self.responses):
            starts[j + 1] = starts[j] + len(response) - self.kept[j]
        path = np.empty(0, dtype=np.int64)
        for j, response in enumerate(self.responses):
            kept = self.kept[j]
            own = np.arange(starts[j], starts[j + 1])
            path = np.concatenate([path[:kept], own])
            depth = np.arange(kept, len(response))
            paths.append(path[self.own[j]])
            parents.append(np.concatenate([[-1], path])[kept:-1])
            depths.append(depth)
            tokens.append(response[kept:])
            # The subtree of a node ends where the first later response begins that has not all tokens up to the node.
            common = np.minimum.accumulate([*self.kept[j + 1 :], -1])
            ends.append(starts[j + 1 :][np.searchsorted(-common, -depth)])
        tokens_U = np.concatenate(tokens)
        parents_U = np.concatenate(parents)
        depths_U = np.concatenate(depths)
        computed_U = np.zeros(self.nodes, dtype=bool)
        computed_U[parents_U[parents_U >= 0]] = True
        before_U = np.zeros(self.nodes + 1, dtype=np.int64)  # computed nodes before each node
        np.cumsum(computed_U, out=before_U[1:])
        count = len(self.prompt)
        subtree_U = count + before_U[np.concatenate(ends)]
        return TreeArrays(
            ids=np.concatenate([self.prompt, tokens_U[computed_U]]),
            positions=np.concatenate([np.arange(count), count + depths_U[computed_U]]),
            ends=np.concatenate([np.full(count, len(self)), subtree_U[computed_U]]),
            predict=np.where(parents_U < 0, count - 1, count + before_U[parents_U]),
            targets=tokens_U,
            paths=paths,
        )


@dataclass
class TreeArrays:
    """A prefix tree as arrays: L computed tokens in the order of a row, U different response tokens."""

    ids: np.ndarray  # [L]
    positions: np.ndarray  # [L] place in the token's own sequence
    ends: np.ndarray  # [L] place after the last token that sees this one
    predict: np.ndarray  # [U] place whose logits predict the token
    targets: np.ndarray  # [U] the token
    paths: list[np.ndarray]  # for each member, which of the U its own tokens are: what an environment wrote is in none


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return the number of leading tokens that two responses have in common."""
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    if not different.any():
        return length
    return int(different.argmax())


Row = list[PrefixTree]
MicroRows = list[Row]  # the rows of a micro-batch


def sample_length(sample: Sample) -> int:
    """Return the number of tokens of a prompt and its response."""
    return len(sample.prompt_ids) + len(sample.response_ids)


def make_rows(samples: list[Sample], indices: list[int], layout: str, budget: int, most: int) -> list[list[int]]:
    """Split the samples ``indices`` into rows of at most ``budget`` tokens and ``most`` samples each.

    shared: samples of one prompt in the order of ``indices``, the prompt once, as many per row as fit. packed: any
    samples, longest first, each in the row in which it leaves the least room. padded: one.
    """
    if layout == "padded":
        return [[i] for i in indices]
    lengths = {i: sample_length(samples[i]) for i in indices}
    shared = layout == "shared"
    rows = []
    room = []  # tokens that each row has left
    newest = {}  # shared: prompt -> its newest row
    free = []  # packed: (room, row) of those that may get more, ascending
    for i in indices if shared else sorted(indices, key=lengths.get, reverse=True):
        prompt = samples[i].prompt_id
        length = len(samples[i].response_ids) if shared else lengths[i]
        r = newest.get(prompt)
        if not shared:
            place = bisect.bisect_left(free, (length,))
            r = free.pop(place)[1] if place < len(free) else None
        if r is None or length > room[r] or (shared and len(rows[r]) == most):
            r = newest[prompt] = len(rows)
            rows.append([])
            room.append(budget)
            length = lengths[i]
        rows[r].append(i)
        room[r] -= length
        if not shared and len(rows[r]) < most:
            bisect.insort(free, (room[r], r))
    return rows


def micro_batches(
    samples: list[Sample],
    indices: list[int],
    *,
    layout: str,
    budget: int,
    rank: int,
    world_size: int,
    device: torch.device,
) -> Iterator[MicroBatch]:
    """Yield this rank's share of the samples ``indices``, cut into micro-batches of at most ``budget`` padded tokens.

    The tensors of each are made when it is asked for: on a GPU while that computes the one before.

    Every rank computes the plan of all ranks from the same list, so that all run the same number of backward passes and
    of calls of the output head without communicating. A rank with fewer micro-batches repeats one with weight 0. Which
    rank and micro-batch a token lands in does not change its gradient. On a GPU shared rows are padded to a multiple of
    128, the size of the kernels' blocks. On a CPU they end at 1,024 tokens, if a sample is not longer.
    """
    multiple = ROW_MULTIPLE if device.type == "cuda" and layout == "shared" else 1
    row_budget = budget
    if device.type == "cpu" and layout == "shared":
        longest = max((sample_length(samples[i]) for i in indices), default=0)
        row_budget = min(budget, max(CPU_ROW, longest))
    rows = []
    most = -(-len(indices) // world_size)
    for row in make_rows(samples, indices, layout, row_budget, most):
        groups = [row] if layout == "shared" else [[i] for i in row]
        rows.append([PrefixTree(samples, members) for members in groups])
    rows.sort(key=lambda row: (-row_length(row), min(row[0].members)))
    plans = [_cut(dealt, layout, budget, multiple) for dealt in _deal(rows, world_size)]
    offsets = token_offsets(samples)
    kept = [sample.kept for sample in samples if sample.kept is not None]
    kept_NK = _index(kept) if kept else None
    idle = rows[-1:]
    count = max(map(len, plans))
    for position, rows_by_rank in enumerate(itertools.zip_longest(*plans, fillvalue=idle)):
        own = rows_by_rank[rank]
        batch = _tensors(own, offsets, layout, padded_width(own, budget, multiple))
        if kept:
            place_U = torch.zeros_like(batch.targets).scatter(0, batch.copies, batch.tokens)
            batch.kept = kept_NK[place_U]
        batch.most_predictions = max(sum(tree.nodes for row in rows for tree in row) for rows in rows_by_rank)
        if position >= len(plans[rank]):
            batch.tokens.fill_(offsets[-1])
        batch.is_last = position == count - 1
        yield batch.to(device)


def _deal(rows: list[Row], world_size: int) -> list[list[Row]]:
    """Split the rows over the ranks: the next row goes to the rank with the fewest tokens so far."""
    load = [0] * world_size
    dealt = [[] for _ in range(world_size)]
    for row in rows:
        least = load.index(min(load))
        load[least] += row_length(row)
        dealt[least].append(row)
    return dealt


def _cut(
    rows: list[Row],
    layout: str,
    budget: int,
    multiple: int,
) -> list[MicroRows]:
    """Cut one rank's rows, which come longest first, into micro-batches: the first row of each sets its width."""
    cut = []
    for row in rows:
        width = padded_width(cut[-1], budget, multiple) if cut else 0
        if layout == "packed" or not cut or (len(cut[-1]) + 1) * width > budget:
            cut.append([row])
        else:
            cut[-1].append(row)
    return cut


def padded_width(rows: MicroRows, budget: int, multiple: int) -> int:
    """Return the padded width of rows, the longest first: a multiple of ``multiple``, unless ``budget`` is less."""
    length = row_length(rows[0])
    return max(length, min(budget, -(-length // multiple) * multiple))


def row_length(row: Row) -> int:
    """Return the number of tokens of a row."""
    return sum(len(tree) for tree in row)


def _tensors(
    rows: MicroRows,
    offsets: list[int],
    layout: str,
    width: int,
) -> MicroBatch:
    """Build ids, positions, visibility and index arrays of some rows, padded on the right to ``width``."""
    ids = np.zeros((len(rows), width), dtype=np.int64)
    positions = np.zeros_like(ids)
    ends = np.tile(np.arange(1, width + 1), (len(rows), 1))  # padding is seen by itself: no softmax of nothing
    borders = [0]
    predict = []
    targets = []
    copies = []
    tokens = []
    different = 0
    for b, row in enumerate(rows):
        start = 0
        for tree in row:
            arrays = tree.arrays()
            end = start + len(tree)
            ids[b, start:end] = arrays.ids
            positions[b, start:end] = arrays.positions
            ends[b, start:end] = start + arrays.ends
            for path, i in zip(arrays.paths, tree.members, strict=True):
                copies.append(different + path)
                tokens.append(np.arange(offsets[i], offsets[i + 1]))
            predict.append(b * width + start + arrays.predict)
            targets.append(arrays.targets)
            different += tree.nodes
            borders.append(end)
            start = end
    mask = None
    if layout == "padded":
        lengths = torch.tensor([row_length(row) for row in rows])
        mask = (torch.arange(width) < lengths[:, None]).long()
    return MicroBatch(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(positions),
        attention_mask=mask,
        ends=torch.from_numpy(ends) if layout == "shared" else None,
        borders=torch.tensor(borders, dtype=torch.int32) if layout == "packed" else None,
        predict=_index(predict),
        targets=_index(targets),
        copies=_index(copies),
        tokens=_index(tokens),
        longest=int(positions.max()) + 1,
        most_predictions=different,
    )


def _index(parts):
    return torch.from_numpy(np.concatenate(parts).astype(np.int64, copy=False))

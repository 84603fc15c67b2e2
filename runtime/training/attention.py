"""Attention masks of a row, in the form that each attention implementation takes, and the choice of the layout.

Every layout follows one rule: place q of a row sees place k if k <= q and q < ends[k], where ends[k] is the place after
the last token that continues k's prefix. Dense kernels take it as a mask [B, 1, S, S], FlexAttention as a function and
a table of blocks, and packed rows need no more than their borders. Shapes in names: B rows, S positions of a row, H
heads, D dimension of a head, K blocks of positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from runtime.system.process import refuse
from runtime.training.batching import ROW_MULTIPLE, MicroBatch
from runtime.training.memory import Sizes, row_lengths

MASK_LIMIT = 2**30  # bytes of a dense mask; that of one row of 16,384 tokens in fp32
SMALL_MASK = 2**28  # bytes, and 2048 places: below both FlexAttention's compilation costs more than it saves
MASKLESS = ("flex_attention", "varlen", "flash_attention_2", "flash_attention_3")


def attention_inputs(batch: MicroBatch, model) -> dict[str, Any]:
    """Return the arguments of a transformers model that keep the samples of a micro-batch apart.

    What transformers builds itself (``padded``, ``packed``) has a model's sliding window in it. A mask of shared rows
    is applied as it is, so the window is part of it: a token attends to tokens at most ``sliding_window`` - 1 positions
    before it. Models with ``layer_types`` take one mask per type of layer. A mask is made for one forward pass.
    """
    config = model.config.get_text_config()
    if batch.borders is not None and config._attn_implementation == "varlen":
        return {
            "cu_seq_lens_q": batch.borders,
            "cu_seq_lens_k": batch.borders,
            "max_length_q": batch.longest,
            "max_length_k": batch.longest,
        }
    if batch.ends is None:
        return {"attention_mask": batch.attention_mask}
    window = getattr(config, "sliding_window", None)
    if window is not None and window >= batch.ends.shape[1]:
        window = None
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and window is not None:
        masks = {"full_attention": _shared_mask(batch, model, None)}
        if "sliding_attention" not in layer_types:
            return {"attention_mask": masks["full_attention"]}
        masks["sliding_attention"] = _shared_mask(batch, model, window)
        return {"attention_mask": masks}
    return {"attention_mask": _shared_mask(batch, model, window)}  # Mistral, Phi-3: every layer has the window


def _shared_mask(batch: MicroBatch, model, window: int | None) -> torch.Tensor | BlockMask:
    if model.config.get_text_config()._attn_implementation == "flex_attention":
        return block_mask(batch.ends, batch.position_ids, window)
    return dense_mask(batch.ends, batch.position_ids, window, model.dtype)


def dense_mask(
    ends_BS: torch.Tensor, positions_BS: torch.Tensor, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """Build the mask [B, 1, S, S]: 0 where a token (row) sees another (column), else the lowest number of ``dtype``."""
    places_S = torch.arange(ends_BS.shape[1], device=ends_BS.device)
    query_S1 = places_S[:, None]
    visible_BSS = (query_S1 >= places_S) & (query_S1 < ends_BS[:, None])
    if window is not None:
        distance_BSS = positions_BS[:, :, None] - positions_BS[:, None]
        visible_BSS &= distance_BSS < window
    mask = torch.zeros(visible_BSS.shape, dtype=dtype, device=ends_BS.device)
    mask.masked_fill_(visible_BSS.logical_not_(), torch.finfo(dtype).min)
    return mask[:, None]


def block_mask(ends_BS: torch.Tensor, positions_BS: torch.Tensor, window: int | None) -> BlockMask:
    """Build the ``dense_mask`` for FlexAttention: its rule, and a table of the blocks of places that it concerns."""

    def visible(b, h, q, k):
        return (k <= q) & (q < ends_BS[b, k])

    def visible_in_window(b, h, q, k):
        near = positions_BS[b, q] - positions_BS[b, k] < window
        return visible(b, h, q, k) & near

    rows, width = ends_BS.shape
    rule = visible if window is None else visible_in_window
    return create_block_mask(rule, rows, None, width, width, ends_BS.device, BLOCK_SIZE=ROW_MULTIPLE)


def grouped_attention(
    module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute transformers' eager attention in fewer passes over the scores, with its interface, for CPUs.

    [B, H, S, D], and [B, K, S, D] of keys and values -> [B, S, H, D]. The G = H / K heads that share a key are one
    product, so keys and values are not repeated; the scale is applied to the keys; a 16-bit softmax stays 16-bit.
    """
    heads, length, dimension = query.shape[1:]
    group = heads // key.shape[1]
    if scaling is None:
        scaling = dimension**-0.5
    queries_BKXD = query.unflatten(1, (-1, group)).flatten(2, 3)  # X: places of all heads of a group
    scores_BKXS = queries_BKXD @ (key * scaling).transpose(2, 3)
    scores_BKGSS = scores_BKXS.unflatten(2, (group, length))
    if attention_mask is not None:
        scores_BKGSS += attention_mask[:, :, None]
    weights_BKXS = scores_BKGSS.softmax(-1).flatten(2, 3)
    output_BHSD = (weights_BKXS @ value).unflatten(2, (group, length)).flatten(1, 2)
    return output_BHSD.transpose(1, 2).contiguous(), None


def varlen_attention(
    module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention per sample of a packed row with ``torch.nn.attention.varlen``: transformers' interface.

    [B, H, S, D] -> [B, S, H, D]. Without borders every row is one sequence; padding on its right is seen by nothing.
    """
    from torch.nn.attention import varlen  # imports torch._dynamo, which takes two seconds

    rows, heads, length, _ = query.shape
    if cu_seq_lens_q is None:
        cu_seq_lens_q = torch.arange(rows + 1, dtype=torch.int32, device=query.device) * length
        max_length_q = length
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]  # [B * S, H, D]
    left = -1 if sliding_window is None else sliding_window - 1
    output = varlen.varlen_attn(
        *flat,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(left, 0),
        enable_gqa=key.shape[1] != heads,
    )
    return output.unflatten(0, (rows, length)), None


def mask_bytes(layout: str, attention: str, budget: int, dtype: torch.dtype, args) -> int:
    """Return the bytes of the largest dense mask that micro-batches of ``budget`` tokens may need.

    Shared rows have a mask in the model's dtype. Those of packed and padded rows are transformers' own, of booleans for
    sdpa; a padded row that is alone needs none.
    """
    if attention in MASKLESS:
        return 0
    sample, group = row_lengths(args)
    widths = {"shared": min(budget, group), "packed": budget, "padded": min(sample, budget // 2)}
    boolean = attention == "sdpa" and layout != "shared"
    return budget * widths[layout] * (1 if boolean else dtype.itemsize)


def choose_layout(args, sizes: Sizes, cuda: bool, dtype: torch.dtype, attention: str) -> tuple[str, str, str]:
    """Return (layout of rows, attention implementation, why) for ``--batch_layout`` and ``--attn_implementation``.

    cuda: on a GPU for which FlexAttention and flash kernels are made. attention: as ``resolve_device`` has it, by the
    device alone. On GPUs FlexAttention computes shared rows without a mask in memory, once its four to seven kernels
    are compiled; sdpa takes their place where masks are small, and packed rows where there is hardly a prompt to share:
    a group of one, or prompts below a sixteenth of the responses. On CPUs rows are shared as long as their dense masks
    are small.
    """
    short = 16 * args.max_prompt_length < args.max_response_length
    alone = short or args.num_samples_per_prompt_rollout == 1
    half = dtype != torch.float32  # flash kernels have 16 bits
    free = cuda and args.attn_implementation == "auto"  # the attention follows the layout
    budget = sizes.micro_batch_tokens
    mask = mask_bytes("shared", attention, budget, dtype, args)
    if args.batch_layout != "auto":
        layout, reason = args.batch_layout, "--batch_layout"
    elif "flash" in attention or attention == "varlen":
        layout, reason = "packed", f"{attention} takes no mask"
    elif free and alone and half:
        layout, reason = "packed", "there is hardly a prompt to share"
    elif free or attention == "flex_attention":
        layout, reason = "shared", "on a GPU"
    elif mask <= MASK_LIMIT:
        layout, reason = "shared", f"masks of at most {mask / 2**20:.0f} MiB"
    else:
        layout, reason = "padded", f"masks of shared rows could take {mask / 2**30:.1f} GiB"
    if free:
        packed = "varlen" if half else "sdpa"
        _, group = row_lengths(args)
        small = mask_bytes("shared", "sdpa", budget, dtype, args) <= SMALL_MASK and min(budget, group) <= 2048
        shared = "sdpa" if small else "flex_attention"
        attention = {"shared": shared, "packed": packed, "padded": "sdpa"}[layout]
    return layout, attention, reason


def check_mask_size(model, layout: str, sizes: Sizes, args) -> None:
    """Reject micro-batches whose dense masks could be larger than ``MASK_LIMIT``. Exits with code 2."""
    attention = model.config.get_text_config()._attn_implementation
    other = " or use --batch_layout padded" if layout != "padded" else ""
    budget = sizes.micro_batch_tokens
    size = mask_bytes(layout, attention, budget, model.dtype, args)
    if size > MASK_LIMIT:
        refuse(
            f"--batch_layout {layout}: a mask of --micro_batch_tokens {budget} with {attention} attention could take "
            f"{size / 2**30:.1f} GiB, and the limit is {MASK_LIMIT / 2**30:.0f}; lower --micro_batch_tokens{other}"
        )

"""Compute every CUDA operator of PyTorch by the CPU's kernel on the same memory, and log what waits for the GPU.

A run takes this module by ``--external_lib fake_cuda.operators``. Device memory of the stub libraries is memory of the
host, so a CPU tensor can stand on the memory of a CUDA tensor. Tensors keep their device, all CUDA branches of
torch, DeepSpeed and transformers run, and numbers are right. An operator checks its tensors as a GPU would: a CPU
tensor next to CUDA tensors is an error, and a wait of the host for the device is written down with phase and place.

With FAKE_CUDA_LOG=FILE the log is written there at exit, as JSON.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import os
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

import utils
from runtime.training import batching, deepspeed_zero

ROOT = Path(__file__).resolve().parent.parent.parent
DEVICE = ctypes.CDLL(None)  # the preloaded stubs
DEVICE.fake_count.restype = ctypes.c_longlong
DEVICE.fake_count.argtypes = [ctypes.c_char_p]
DEVICE.fake_access.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
DEVICE.cudaMemcpyAsync.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
DEVICE.cudaStreamSynchronize.argtypes = [ctypes.c_void_p]
ORDERED = bool(os.environ.get("FAKE_CUDA_ORDER"))
# Memory of pushed weights, the only memory whose accesses count in the thread of vLLM's engine; None without vLLM.
PUSHED: set[int] | None = None

# Operators of memory and metadata, which torch's own CUDA code does right on the stubs.
KEPT = {
    *("empty.memory_format", "empty_strided", "as_strided", "view", "_reshape_alias", "unfold", "resize_", "set_"),
    *("set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor", "record_stream"),
    *("set_.source_Tensor_storage_offset", "is_pinned", "_pin_memory", "view_as_real", "view_as_complex", "is_set_to"),
    *("_assert_async", "_assert_async.msg", "resize_as_", "_resize_output_", "_fused_sdp_choice"),
    *("_has_compatible_shallow_copy_type", "_sparse_coo_tensor_unsafe"),
}
# The host waits for these, since the size of the result is a number of the device.
SIZED_BY_DATA = {
    *("nonzero", "masked_select", "unique_dim", "_unique", "_unique2", "unique_consecutive", "bincount", "histc"),
    *("nonzero_static", "unique_dim_consecutive"),
}
INDEXED = {"index", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put", "index_put"}


# ---------------------------------------------------------------------------------------------------------------- log


class Log:
    """Waits for the device, by step, phase and place; attention kernels; accesses that nothing orders."""

    def __init__(self) -> None:
        self.phase = "start"
        self.step = 0  # restarts of the run's stopwatch so far
        self.micro_batch: list[tuple[str, str]] = []  # waits since the last backward pass of an update
        self.counts: Counter[tuple[int, str, str, str]] = Counter()  # step, phase, kind, place
        self.micro_batches: Counter[tuple[int, str]] = Counter()
        self.kernels: Counter[str] = Counter()
        self.races: list[str] = []
        self.threads = 0  # CPU threads at the last backward pass

    def wait(self, kind: str) -> None:
        """Note that the host waits for the device, in the phase of the main thread."""
        place = where()
        if in_rollout():
            self.counts[self.step, "rollout thread", kind, place] += 1
        elif self.phase == "update":
            self.micro_batch.append((kind, place))
        else:
            self.counts[self.step, self.phase, kind, place] += 1

    def attribute(self, part: str) -> None:
        """Count the waits since the last call as those of a part of the update."""
        for kind, place in self.micro_batch:
            self.counts[self.step, f"update, {part}", kind, place] += 1
        self.micro_batch = []

    def end_micro_batch(self, is_last: bool) -> None:
        """Count the waits since the last backward pass as those of this micro-batch."""
        part = "last micro-batch" if is_last else "inner micro-batches"
        self.micro_batches[self.step, part] += 1
        self.attribute(part)
        self.threads = torch.get_num_threads()

    def write(self, file: str) -> None:
        """Write the log of the last step, and of the whole run what has no step."""
        step = self.step - 1  # the stopwatch is restarted after a step
        waits: dict[str, dict[str, int]] = {}
        for (of, phase, kind, place), number in sorted(self.counts.items()):
            if of == step:
                waits.setdefault(phase, {})[f"{kind} {place}"] = number
        micro_batches = {name: n for (of, name), n in sorted(self.micro_batches.items()) if of == step}
        found = {"waits": waits, "micro_batches": micro_batches, "attention": dict(self.kernels)}
        found |= {"races": self.races, "threads": self.threads, "out_of_memory": count("out_of_memory")}
        Path(file).write_text(json.dumps(found, indent=1))


LOG = Log()


def count(name: str) -> int:
    """Return a counter of the stub libraries; stubs/device.c has their names."""
    return DEVICE.fake_count(name.encode())


def in_rollout() -> bool:
    """Return True in the thread that samples."""
    return threading.current_thread().name == "rollout"


def where() -> str:
    """Return file and function of the innermost frame of the project, and of the library in it; else "backward"."""
    frame = sys._getframe(1)
    library = None
    while frame is not None:
        file = frame.f_code.co_filename
        inside = file.startswith(str(ROOT)) and "site-packages" not in file and "fake_cuda" not in file
        if inside and frame.f_code.co_name != "finish_gpu_work":
            place = f"{Path(file).name}:{frame.f_code.co_name}"
            return f"{place} ({library})" if library else place
        if library is None and "site-packages" in file and "/torch/" not in file:
            library = f"{Path(file).name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return library or "backward"


# ------------------------------------------------------------------------------------------------------------ tensors


def on_cuda(value) -> bool:
    """Return True for a CUDA tensor."""
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


def alias(value):
    """Return the CPU tensor on the memory of a CUDA tensor; other values as they are."""
    if not on_cuda(value):
        return value
    storage = value.untyped_storage()
    size = storage.nbytes()
    if size == 0 or value.numel() == 0:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
    memory = (ctypes.c_char * size).from_address(storage.data_ptr())
    own = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=value.dtype).set_(own, value.storage_offset(), value.size(), value.stride())


def to_device(value, device: torch.device):
    """Return a CUDA tensor with the contents of a CPU tensor; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    if 0 in value.stride():  # expanded: several places share memory
        value = value.contiguous()
    result = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
    if value.numel() > 0:
        alias(result).copy_(value)
        note_access(result, True, "result")
    return result


def note_access(tensor: torch.Tensor, writes: bool, name: str) -> None:
    """Tell the stubs which stream touches a tensor's memory; raise RuntimeError where nothing orders the accesses."""
    if not ORDERED or tensor.numel() == 0:
        return
    if PUSHED is not None and in_rollout() and tensor.untyped_storage().data_ptr() not in PUSHED:
        return
    stream = torch.cuda.current_stream().cuda_stream
    if DEVICE.fake_access(tensor.untyped_storage().data_ptr(), writes, stream):
        verb = "writes" if writes else "reads"
        problem = f"{name} {verb} {tuple(tensor.shape)} on stream {stream:#x} in {where()}"
        LOG.races.append(problem)
        raise RuntimeError(f"fake CUDA: no order of streams: {problem}, whose memory another stream still uses")


def check_devices(name: str, schema, args, kwargs) -> None:
    """Raise what a GPU raises for CPU tensors among CUDA tensors; note the copies of CPU indices."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    strangers = [x for x in tensors if x.device.type == "cpu" and x.dim() > 0]
    if not strangers or not any(on_cuda(x) for x in tensors):
        return
    if name.split(".")[0] in INDEXED and all(any(x is y for y in args[1] or ()) for x in strangers):
        for _ in strangers:  # torch copies them from pageable memory
            LOG.wait("pageable copy to the GPU")
        return
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({name})"
    )


def waits(name: str, schema, args, kwargs) -> bool:
    """Return True for an operator whose CUDA code makes the host wait: its result is a number or has data's size."""
    base = name.split(".")[0]
    if base in INDEXED and len(args) > 1:
        return any(isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1] or ())
    if base == "repeat_interleave":
        return kwargs.get("output_size") is None
    numbers = [r for r in schema.returns if str(r.type) in ("bool", "int", "float", "number", "Scalar")]
    return base in SIZED_BY_DATA or bool(numbers)


def is_meaningless(error: Exception) -> bool:
    """Return True for an index out of range in the thread of vLLM's engine, whose own kernels compute nothing here."""
    return PUSHED is not None and in_rollout() and ("out of bounds" in str(error) or "out of range" in str(error))


def without_numbers(value):
    """Return zeros for a tensor of integers; other values as they are."""
    is_index = isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64)
    return torch.zeros_like(value) if is_index else value


# ---------------------------------------------------------------------------------------------------------- operators


def make_kernel(operator, name: str):
    """Return the function that computes ``operator`` for CUDA tensors by the CPU's kernel."""
    schema = operator._schema
    written = {i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write}
    is_tensor = [str(a.type) in ("Tensor", "Optional[Tensor]") for a in schema.arguments]
    place = {a.name: i for i, a in enumerate(schema.arguments)}
    numbers = torch._C._should_allow_numbers_as_tensors(schema.name.removeprefix("aten::"))

    def translated(value, index: int):
        if is_tensor[index] and isinstance(value, bool | int | float) and not numbers:
            return torch.tensor(value)  # a wrapped number
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return pytree.tree_map(alias, value)

    def kernel(*args, **kwargs):
        devices = [x.device for x in pytree.tree_leaves((args, kwargs)) if on_cuda(x)]
        device = devices[0] if devices else kwargs.get("device")
        check_devices(name, schema, args, kwargs)
        if waits(name, schema, args, kwargs):
            LOG.wait(name.split(".")[0])
        kwargs = {key: value for key, value in kwargs.items() if key != "generator"}  # the CPU's own is seeded, too
        given = [(i, value) for i, value in enumerate(args)]
        named = [(place[key], key, value) for key, value in kwargs.items()]
        for i, value in [*given, *((i, value) for i, _, value in named)]:
            for tensor in pytree.tree_leaves(value) if ORDERED else ():
                if on_cuda(tensor):
                    note_access(tensor, i in written, name)
        own = [translated(value, i) for i, value in given]
        own_named = {key: translated(value, i) for i, key, value in named}
        try:
            result = operator(*own, **own_named)
        except (IndexError, RuntimeError) as error:
            if not is_meaningless(error):
                raise
            own[1:] = pytree.tree_map(without_numbers, own[1:])
            result = operator(*own, **pytree.tree_map(without_numbers, own_named))
        if not written:
            return pytree.tree_map(lambda x: to_device(x, device), result)
        changed = []
        for i in sorted(written):
            key = schema.arguments[i].name
            before, after = (args[i], own[i]) if i < len(args) else (kwargs.get(key), own_named.get(key))
            if on_cuda(before) and before.shape != after.shape:  # an out= of another size
                before.resize_(after.shape)
                alias(before).copy_(after)
            changed.append(before)
        if not schema.returns:
            return None
        return changed[0] if len(schema.returns) == 1 else tuple(changed[: len(schema.returns)])

    return kernel


def copy_(self, source, non_blocking=False):
    """Copy as torch does: between host and device by one transfer of the runtime, on the current stream."""
    if self.numel() == 0:
        return self
    for tensor, writes in ((source, False), (self, True)):
        if on_cuda(tensor):
            note_access(tensor, writes, "copy_")
    if self.device.type == source.device.type:
        alias(self).copy_(alias(source))
        return self
    host = self if on_cuda(source) else source
    direction = "to the host" if host is self else "to the GPU"
    stream = torch.cuda.current_stream().cuda_stream
    if not host.is_pinned():
        LOG.wait(f"pageable copy {direction}")
    elif not non_blocking:
        LOG.wait(f"blocking copy {direction}")
    kind = 2 if host is self else 1
    if self.is_contiguous() and source.is_contiguous() and self.dtype == source.dtype:
        size = self.numel() * self.element_size()
        DEVICE.cudaMemcpyAsync(self.data_ptr(), source.data_ptr(), size, kind, stream)
    else:  # torch converts on the device, next to one transfer
        alias(self).copy_(alias(source))
    if not non_blocking:
        DEVICE.cudaStreamSynchronize(stream)
    return self


def local_scalar(self):
    """Read a number of the device: ``.item()``."""
    note_access(self, False, "item")
    LOG.wait("item")
    DEVICE.cudaStreamSynchronize(torch.cuda.current_stream().cuda_stream)
    return torch.ops.aten._local_scalar_dense(alias(self))


# ----------------------------------------------------------------------------------------------------------- attention


def probabilities(query, key, bias, causal: bool, scale: float):
    """Softmax of the scores of CPU tensors [B, H, S, D], in fp32, and their log-sum-exp; a masked row has zeros."""
    scores = (query.float() @ key.float().transpose(-1, -2)) * scale
    if bias is not None:
        scores = scores + bias.float()
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0), scores.logsumexp(-1)


def attend(name: str, query, key, value, bias, causal: bool, scale: float | None):
    """Output and log-sum-exp of attention, on the device of ``query``."""
    LOG.kernels[name] += 1
    device = query.device
    query, key, value, bias = alias(query), alias(key), alias(value), alias(bias)
    heads = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(heads, 1), value.repeat_interleave(heads, 1)
    weights, lse = probabilities(query, key, bias, causal, query.shape[-1] ** -0.5 if scale is None else scale)
    return to_device((weights @ value.float()).to(query.dtype), device), to_device(lse, device)


def attention_gradients(gradient, query, key, value, output, bias, causal: bool, scale: float | None):
    """Gradients of query, key, value and scores, on the device of ``query``."""
    device, groups = query.device, key.shape[1]
    gradient, output = alias(gradient).float(), alias(output).float()
    query, key, value, bias = alias(query), alias(key), alias(value), alias(bias)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    heads = query.shape[1] // groups
    all_keys, all_values = key.repeat_interleave(heads, 1), value.repeat_interleave(heads, 1)
    weights, _ = probabilities(query, all_keys, bias, causal, scale)
    slopes = gradient @ all_values.float().transpose(-1, -2)
    slopes = weights * (slopes - (gradient * output).sum(-1, keepdim=True))
    found = [slopes @ all_keys.float() * scale]
    for whole in (slopes.transpose(-1, -2) @ query.float() * scale, weights.transpose(-1, -2) @ gradient):
        found.append(whole.unflatten(1, (groups, heads)).sum(2))
    return [to_device(x.to(query.dtype), device) for x in (*found, slopes)]


def efficient_attention(query, key, value, attn_bias, wants_lse, dropout_p=0.0, is_causal=False, *, scale=None):
    """aten::_scaled_dot_product_efficient_attention, without dropout."""
    output, lse = attend("efficient", query, key, value, attn_bias, is_causal, scale)
    return output, lse, *torch.zeros(2, dtype=torch.int64)


def efficient_attention_backward(
    grad_out, query, key, value, attn_bias, out, lse, seed, offset, dropout_p, wanted, is_causal=False, *, scale=None
):
    """aten::_scaled_dot_product_efficient_attention_backward, without dropout."""
    bias = attn_bias if attn_bias is not None and attn_bias.numel() > 0 else None
    found = attention_gradients(grad_out, query, key, value, out, bias, is_causal, scale)
    return tuple(x if asked else None for x, asked in zip(found, wanted, strict=True))


def flash_attention(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    """aten::_scaled_dot_product_flash_attention, without dropout."""
    output, lse = attend("flash", query, key, value, None, is_causal, scale)
    none = torch.zeros(2, dtype=torch.int64)
    return output, lse, None, None, query.shape[2], key.shape[2], none, none, torch.empty(0, device=query.device)


def flash_attention_backward(
    grad_out, query, key, value, out, lse, starts_q, starts_k, max_q, max_k, dropout_p, is_causal, *rest, scale=None
):
    """aten::_scaled_dot_product_flash_attention_backward, without dropout."""
    return tuple(attention_gradients(grad_out, query, key, value, out, None, is_causal, scale)[:3])


def cudnn_attention(*args, **kwargs):
    """aten::_scaled_dot_product_cudnn_attention, which a run must not use: trainers would differ by their engine."""
    raise RuntimeError("fake CUDA: sdpa chose cuDNN, which importing vLLM switches off in some processes of a run")


ATTENTION = {
    "_scaled_dot_product_efficient_attention": efficient_attention,
    "_scaled_dot_product_efficient_attention_backward": efficient_attention_backward,
    "_scaled_dot_product_flash_attention": flash_attention,
    "_scaled_dot_product_flash_attention_backward": flash_attention_backward,
    "_scaled_dot_product_cudnn_attention": cudnn_attention,
}


# ------------------------------------------------------------------------------------------------------------- install


def replaced_operators() -> list[tuple[str, object]]:
    """Return (name, operator) of each aten operator with a CUDA kernel that the table replaces."""
    found = []
    for full in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        space, _, name = full.partition("::")
        base, _, overload = name.partition(".")
        if space != "aten" or name in KEPT or "_scaled_dot_product" in base or "flash" in base or "efficient" in base:
            continue
        operator = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if operator is None:
            continue
        views = [r for r in operator._schema.returns if r.alias_info is not None and not r.alias_info.is_write]
        if not views:
            found.append((name, operator))
    return found


def wrap(owner, name: str, kind: str) -> None:
    """Note a wait at each call of a function of torch.cuda."""
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def noted(*args, **kwargs):
        LOG.wait(kind)
        return plain(*args, **kwargs)

    setattr(owner, name, noted)


def watch_phases() -> None:
    """Follow the phases of a run and the micro-batches of an update."""
    enter, restart, backward = utils.Stopwatch.__call__, utils.Stopwatch.restart, deepspeed_zero.backward_and_step
    plan = batching.micro_batches

    @contextmanager
    def phase(self, name: str):
        outer = self.inside
        if outer:
            with enter(self, name):
                yield
            return
        LOG.phase = "borders of phases"
        with enter(self, name):
            LOG.phase = name
            yield
            LOG.attribute("around optimizer steps")
            LOG.phase = "borders of phases"
        LOG.phase = "between phases"

    def restarted(self) -> None:
        LOG.step += 1
        restart(self)

    def counted(engine, loss, is_last: bool, *rest, **named) -> None:
        backward(engine, loss, is_last, *rest, **named)
        LOG.end_micro_batch(is_last)

    def planned(*args, **kwargs):
        LOG.attribute("around optimizer steps")
        return plan(*args, **kwargs)

    batching.micro_batches = planned
    utils.Stopwatch.__call__ = phase
    utils.Stopwatch.restart = restarted
    deepspeed_zero.backward_and_step = counted


def install() -> torch.library.Library:
    """Replace the CUDA kernels of this process. Keep the result: they are restored when it is collected."""
    library = torch.library.Library("aten", "IMPL")
    own = {"copy_": copy_, "_local_scalar_dense": local_scalar, **ATTENTION}
    for name, operator in replaced_operators():
        if name not in own:
            library.impl(operator, make_kernel(operator, name), "CUDA", allow_override=True)
    for name, kernel in own.items():
        library.impl(name, kernel, "CUDA", allow_override=True)
    wrap(torch.cuda, "synchronize", "device")
    wrap(torch.cuda.Stream, "synchronize", "stream")
    wrap(torch.cuda.Event, "synchronize", "event")
    watch_phases()
    if (file := os.environ.get("FAKE_CUDA_LOG")) and os.environ.get("RANK", "0") == "0":
        atexit.register(LOG.write, file)
    return library


LIBRARY = install()

"""Record what vLLM's engine does with memory and weights in a run, for the part ``engine`` of check.py.

A run takes this module by ``--external_lib fake_cuda.engine_log``, which also installs the table of operators.
Trainer and engine append lines of JSON to the file FAKE_CUDA_EVENTS, from a thread or a process each. The trainer
notes the digests of the weights that it pushes. The engine notes those of its parameters once it has acknowledged a
version, and its device memory before and after it is built, sleeps and wakes up.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
from collections import Counter

import torch
from fake_cuda import operators

from runtime.engine import client, vllm_settings

# Parameters of vLLM's Llama that hold several of the checkpoint's, in this order.
STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
VOCABULARY = 256  # of the drawn samples, below that of any model
PADDED = "embed_tokens"  # vLLM pads the vocabulary


def note(event: str, **found) -> None:
    """Append an event to the file, as one line."""
    line = json.dumps({"event": event, "process": os.getpid()} | found)
    with open(os.environ["FAKE_CUDA_EVENTS"], "a") as file:
        file.write(line + "\n")


def used() -> int:
    """Return the bytes of device memory that this process has allocated."""
    return operators.DEVICE.fake_used()


def digest(tensors: list[torch.Tensor]) -> str:
    """Return the hash of the bytes of tensors, one after another."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(operators.alias(tensor.detach()).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def pushed_digests(weights: list[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return the digest of each parameter that vLLM should hold after a push of ``weights``, by its name there."""
    tensors = {name: weight for name, weight in weights if name != "lm_head.weight"}  # tied to the embedding
    parts: dict[str, list[torch.Tensor]] = {}
    for whole, names in STACKED.items():
        for name in [name for name in tensors if f".{names[0]}." in name]:
            pieces = [tensors.pop(name.replace(names[0], piece)) for piece in names]
            parts[name.replace(names[0], whole)] = pieces
    parts |= {name: [tensor] for name, tensor in tensors.items()}
    return {name: digest(pieces) for name, pieces in sorted(parts.items())}


def engine_digests(worker) -> dict[str, str]:
    """Return the digest of each parameter of a vLLM worker."""
    model = worker.model_runner.get_model()
    rows = {PADDED: model.config.vocab_size}
    found = {}
    for name, parameter in model.named_parameters():
        length = next((n for part, n in rows.items() if part in name), None)
        found[name] = digest([parameter[:length]])
    return dict(sorted(found.items()))


def draw(name: str, answer) -> None:
    """Replace the tokens of a finished request, which the engine's kernels have not computed, by random ones."""
    source = random.Random(name)
    answer.token_ids = [source.randrange(3, VOCABULARY) for _ in answer.token_ids]
    answer.logprobs.logprobs[:] = [-6.0] * len(answer.token_ids)


def watch_trainer() -> None:
    """Note the weights of each push, and let the table of operators follow their memory into the engine's thread."""
    push = client.Engine.push

    @functools.wraps(push)
    def pushed(self, weights) -> None:
        operators.PUSHED.update(weight.untyped_storage().data_ptr() for _, weight in weights if weight.is_cuda)
        size = sum(weight.nbytes for _, weight in weights)
        note("push", version=self.version + 1, digests=pushed_digests(weights), bytes=size)
        push(self, weights)

    client.Engine.push = pushed


def waits_of_pushes() -> Counter[str]:
    """Count where the engine has waited for the GPU in its pushes so far."""
    found: Counter[str] = Counter()
    for (_, phase, kind, place), number in operators.LOG.counts.items():
        if phase == "rollout thread" and "weights.py:push_weights" in place:
            found[f"{kind} {place}"] += number
    return found


def watch_engine() -> None:
    """Note what the engine holds when it is built, when it has new weights, and around its sleep.

    vLLM takes the runtime's library that comes first in the memory of the process, which may be torchvision's copy.
    """
    from vllm.distributed.device_communicators import cuda_wrapper
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.gpu_worker import Worker

    found = cuda_wrapper.find_loaded_library
    runtime = next(name for name in os.environ["LD_PRELOAD"].split() if "libcudart" in name)
    cuda_wrapper.find_loaded_library = lambda name: runtime if name == "libcudart" else found(name)
    known: Counter[str] = Counter()
    acknowledge = LLMEngine.set_weight_version

    @functools.wraps(acknowledge)
    def acknowledged(self, version: str) -> None:
        acknowledge(self, version)
        digests = self.collective_rpc(engine_digests)[0]
        waits = waits_of_pushes() - known
        known.update(waits)
        counted = {name: operators.count(name) for name in ("captures", "forbidden")}
        note("acknowledged", version=int(version), digests=digests, used=used(), waits=waits, **counted)

    LLMEngine.set_weight_version = acknowledged
    step = LLMEngine.step

    @functools.wraps(step)
    def stepped(self) -> list:
        outputs = step(self)
        for output in outputs:
            draw(output.request_id, output.outputs[0])
        return outputs

    LLMEngine.step = stepped
    for name in ("init_device", "sleep", "wake_up"):
        plain = getattr(Worker, name)

        def watched(self, *args, name=name, plain=plain, **kwargs):
            before = used()
            result = plain(self, *args, **kwargs)
            words = [str(x) for x in (*args, *kwargs.values())]
            note(name, arguments=words, before=before, after=used())
            return result

        setattr(Worker, name, functools.wraps(plain)(watched))


def watch_start() -> None:
    """Call ``watch_engine`` in the thread of the engine, which imports vLLM in its own time."""
    take = vllm_settings.take_gpu

    @functools.wraps(take)
    def taken(args) -> None:
        take(args)
        watch_engine()

    vllm_settings.take_gpu = taken


operators.PUSHED = set()
watch_trainer()
watch_start()

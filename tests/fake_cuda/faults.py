"""Put known faults into a copy of the project, one at a time, and show that a part of check.py notices each.

    .cuda/bin/python tests/fake_cuda/faults.py                  every fault; exit code 1 if one goes unnoticed
    .cuda/bin/python tests/fake_cuda/faults.py "cuDNN"          those whose names contain a text

A fault is (its name, file, text, text in its place, part of check.py, words of that part's failure).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SETTINGS, ZERO, BATCHING = (
    "runtime/engine/vllm_settings.py",
    "runtime/training/deepspeed_zero.py",
    "runtime/training/batching.py",
)
PINNED = "moved[name] = value.pin_memory().to(device, non_blocking=True)\n"
SIDE_STREAM = f"""with torch.cuda.stream(torch.cuda.Stream()):
                    {PINNED}"""
Fault = tuple[str, str, str, str, str, str]
FAULTS: list[Fault] = [
    (
        "an imported function that the fake device lacks",
        "tests/fake_cuda/golden/imports.txt",
        "libcudart.so.13 cudaGraphDebugDotPrint\n",
        "",
        "stubs",
        "imports cudaGraphDebugDotPrint of libcudart.so.13",
    ),
    (
        "memory without an end",
        "tests/fake_cuda/stubs/device.c",
        "if (bytes > fake_free()) {",
        "if (0) {",
        "stubs device",
        "a card gave more memory than it has",
    ),
    (
        "no code for compute capability 8.9",
        "tests/fake_cuda/stubs/runtime.c",
        "capability == 89 ? 86 : capability;",
        "capability;",
        "stubs device",
        "compute capability 89, 24 GiB: not as a GPU",
    ),
    (
        "descriptors of products counted as products",
        "tests/fake_cuda/build.py",
        're.compile(r"gem[mv]", ',
        're.compile(r"gem[mv]|Matmul", ',
        "stubs device",
        'assert counted(lambda: linear(half, half, half[0]), "products") == [1]',
    ),
    (
        "a collective of one rank that gives nothing",
        "tests/fake_cuda/stubs/nccl.c",
        "            fake_copy(to, from, whole);\n",
        "            return SUCCESS;\n",
        "stubs collectives",
        "all-gather of one rank is wrong",
    ),
    (
        "cuDNN attention where vLLM is not imported",
        "runtime/training/pretrained.py",
        "    torch.backends.cuda.enable_cudnn_sdp(False)\n",
        "",
        "backends --only 9.0",
        '"plain": "cudnn"',
    ),
    (
        "CUDA graphs up to 512 sequences",
        SETTINGS,
        "        usual |= graph_size(args, sizes.vllm_max_num_seqs, world_size)\n",
        "        pass\n",
        "backends --only 9.0",
        '"largest_graph": 512',
    ),
    (
        "FlashInfer on datacenter Blackwell",
        SETTINGS,
        "        usual |= attention_backend(args, dtype)\n",
        "",
        "backends --only 10.0",
        '+  "attention": "FLASHINFER"',
    ),
    (
        "an offloaded optimizer with one thread",
        ZERO,
        "        torch.set_num_threads(offload_threads())\n",
        "        pass\n",
        "waits --only grpo-offload",
        "steps with 1 threads",
    ),
    (
        "a CPU index of a product's gather",
        "utils.py",
        "x_BV.gather(-1, targets_B[:, None])",
        "x_BV.gather(-1, targets_B[:, None].cpu())",
        "waits --only grpo",
        "Expected all tensors to be on the same device",
    ),
    (
        "a CPU index of a CUDA tensor in every micro-batch",
        "grpo.py",
        "sampler_T=sampler_N[mb.tokens],",
        "sampler_T=sampler_N[mb.tokens.cpu()],",
        "waits --only grpo",
        "wait for the GPU",
    ),
    (
        "a pageable copy in the inner loop",
        BATCHING,
        PINNED,
        "moved[name] = value.to(device)\n",
        "waits --only grpo",
        "pageable copy to the GPU",
    ),
    (
        "a number read from the GPU in the inner loop",
        "utils.py",
        "        self.maxima = torch.maximum(self.maxima, seen.amax(1))\n",
        "        self.maxima = torch.maximum(self.maxima, seen.amax(1))\n        self.maxima[0].item()\n",
        "waits --only grpo",
        "item utils.py:add",
    ),
    (
        "a phase that does not wait for the GPU before weights change hands",
        "utils.py",
        "        self.inside = True\n        deepspeed_zero.finish_gpu_work()\n",
        "        self.inside = True\n",
        "waits --only grpo",
        "device utils.py:__call__",
    ),
    (
        "a bound without the activations of the MLP",
        "runtime/training/memory.py",
        "model.heads * model.head_size + model.intermediate\n",
        "model.heads * model.head_size\n",
        "memory --only 0.5B-24GB",
        "peak is above the bound",
    ),
    (
        "logits of all tokens at once",
        "utils.py",
        "        self.chunk = chunk\n",
        "        self.chunk = 10**6\n",
        "memory --only 0.5B-24GB",
        "peak is above the bound",
    ),
    (
        "a card that never ends under a full-size model",
        "tests/fake_cuda/stubs/device.c",
        "if (bytes > fake_free()) {",
        "if (0) {",
        "stubs memory --only 0.5B-24GB",
        "no torch.OutOfMemoryError",
    ),
    ("a wrong stream", BATCHING, PINNED, SIDE_STREAM, "waits --only grpo", "no order of streams"),
    (
        "a push that is skipped after a sleep",
        "grpo.py",
        "                        push_weights(llm, weights, args.inflight_updates)\n",
        "                        if not asleep:\n                            push_weights(llm, weights)\n",
        "engine --only sleep",
        "parameters of the engine do not have the trainer's bytes",
    ),
    (
        "a push that changes a tensor",
        "runtime/engine/weights.py",
        "        names = load(weights)\n",
        "        names = load([(n, 0 * value if '1.mlp.down' in n else value) for n, value in weights])\n",
        "engine --only process",
        "1 of 14 parameters of the engine do not have the trainer's bytes: model.layers.1.mlp.down_proj.weight",
    ),
    (
        "a push that does not wait for the trainer's GPU work",
        ZERO,
        "    finish_gpu_work()\n    return list(weights.items())\n",
        "    return list(weights.items())\n",
        "engine --only sleep",
        '-   "device deepspeed_zero.py:current_weights": 1',
    ),
    (
        "no wait for the GPU between threads at all",
        ZERO,
        "        torch.cuda.synchronize()\n",
        "        pass\n",
        "engine --only beside",
        '-   "device weights.py:push_weights": 1',
    ),
    (
        "an engine that does not sleep",
        "grpo.py",
        "                        llm.sleep(level=2)\n",
        "                        pass\n",
        "engine --only sleep",
        '-   "sleep 2"',
    ),
    (
        "a collective that leaves one rank's part out",
        "tests/fake_cuda/stubs/nccl.c",
        "for (int rank = 1; rank < group->ranks; rank++) {",
        "for (int rank = 1; rank < 1; rank++) {",
        "stubs collectives",
        "all-reduce, SUM of torch.float32 is wrong",
    ),
    (
        "gradients of a run without those of one rank",
        "tests/fake_cuda/stubs/nccl.c",
        "for (int rank = 1; rank < group->ranks; rank++) {",
        "for (int rank = 1; rank < 1; rank++) {",
        "stubs runs --only grpo-two-ranks",
        "sampler and trainer log-probs differ",
    ),
    (
        "a sleep that gives no memory back",
        "tests/fake_cuda/stubs/driver.c",
        "    fake_release(handle);\n",
        "",
        "stubs engine --only sleep",
        "asleep the engine has given back",
    ),
]


def copy_project(folder: Path) -> None:
    """Copy the tracked files, and link what .cuda has but for what check.py writes there."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file() and not name.startswith("docs/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / ".cuda").mkdir()
    for path in (ROOT / ".cuda").iterdir():
        if path.name not in ("check", "fake"):
            (folder / ".cuda" / path.name).symlink_to(path)
    for part in ("fake", "check/tiny"):
        if (ROOT / ".cuda" / part).exists():
            shutil.copytree(ROOT / ".cuda" / part, folder / ".cuda" / part)


def unnoticed(fault: Fault) -> str:
    """Try one fault: "" if its part failed with the expected words, else what happened."""
    _, file, old, new, part, words = fault
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        copy_project(folder)
        text = (folder / file).read_text()
        if old not in text:
            return f"{file} no longer has {old!r}"
        (folder / file).write_text(text.replace(old, new, 1))
        program = folder / "tests" / "fake_cuda" / "check.py"
        line = [sys.executable, str(program), *part.split()]
        done = subprocess.run(line, cwd=folder, capture_output=True, text=True)
        if done.returncode == 0:
            return f"check.py {part} passed"
        if words not in done.stdout:
            return f"check.py {part} failed without {words!r}:\n{done.stdout[-3000:]}{done.stderr[-2000:]}"
    return ""


def main() -> int:
    """Try the faults that the command line names, or all."""
    wrong = 0
    for fault in FAULTS:
        if sys.argv[1:] and not any(text in fault[0] for text in sys.argv[1:]):
            continue
        started = time.monotonic()
        problem = unnoticed(fault)
        wrong += bool(problem)
        seconds = time.monotonic() - started
        print(f"{'NOT NOTICED' if problem else 'noticed':12} {seconds:4.0f} s  {fault[0]}  {problem}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

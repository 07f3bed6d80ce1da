"""A published model: GSPO with two clip ranges, GRPO, one update a rollout, and an 8-bit sampler's log-probs.

Question. Every other study trains mixtures of experts of less than a million parameters. On SmolLM2-135M-Instruct, does
the clip range matter, does GSPO differ from GRPO, and what do four updates a rollout cost or give? Are the log-probs of
a sampler with 8-bit weights good enough for GSPO's ratio on trained weights, where they differ more? And what does
training do to text that is not the task?

Rule, written before the runs. Seeds 0 to 4; none is left out. 16 rollouts of 4 prompts x 8 answers of at most 24 tokens
(experiment.py), at the same learning rate, compared at equal response tokens and paired by seed; 95 % intervals.
Primary measure: the training reward in the last fifth of the tokens.
1. Four updates a rollout learn faster or slower than one if the interval of GSPO from *one update* excludes 0.
2. The calibrated range is better or worse than the paper's if its interval from GSPO excludes 0.
3. GRPO is better or worse than GSPO if its interval from GSPO excludes 0.
4. The 8-bit sampler's log-probs harm if the interval from GSPO, whose sampler has float32 weights, is below 0.
Four intervals decide. Everything else describes: held-out reward, length, entropy, and, after training, the reward of
instructions that were not trained and the nats a token of two texts, as differences from the model as published.
"""

import json
import os
import pydoc_data.topics
import re
from functools import cache, partial
from pathlib import Path

import numpy as np
from common import ROOT, Measure, Study, Variant, draw_all
from starts import GRPO, GSPO, SMOLLM2

FOUR = ("schedule.minibatches=4",)
TEXTS = ("GSM8K", "prose")
REWARD = Measure("training reward", "reward/mean", over=0.2)
ENTROPY = Measure("entropy", "policy/entropy", over=0.2)


def text_change(folder: Path) -> dict[str, float]:
    """How many nats a token each text has after training beyond what it had before."""
    after, before = nats(str(folder)), nats(str(ROOT / SMOLLM2.checkpoint))
    return {f"text/{name}": after[name] - before[name] for name in TEXTS}


@cache
def nats(source: str) -> dict[str, float]:
    """The mean nats a token of the texts under the policy of a run or of a checkpoint."""
    from gspax.config import Mesh
    from gspax.data import hf_tokenizer
    from gspax.hf import hf
    from gspax.learner.forward import StepSettings
    from gspax.learner.state import TrainedPolicy, abstract_params, load_model, load_policy
    from gspax.learner.train_step import make_score
    from gspax.parallel.sharding import make_mesh
    from gspax.rollout.servers.probe import learner_scores
    from gspax.run.checkpoints import Checkpoints, newest_step
    from gspax.tools.policy import locate_run

    model = hf(str(ROOT / SMOLLM2.checkpoint))
    mesh, tokenizer = make_mesh(Mesh(), model=model), hf_tokenizer(str(ROOT / SMOLLM2.checkpoint))
    if (located := locate_run(source)) is not None:
        run, checkpoints, step = located
        with Checkpoints(checkpoints, mesh=mesh) as opened:
            params = load_policy(run, opened, TrainedPolicy(model, mesh), newest_step(opened) if step is None else step)
    else:
        params = load_model(model, abstract_params(model, mesh))
    score = make_score(StepSettings(config=model, mesh=mesh))
    means = {}
    for name, texts in read_texts().items():
        rows = [tokenizer.encode(text) for text in texts]
        means[name] = -float(np.concatenate(learner_scores(score, params, rows, mesh)[0]).mean())
    return means


def read_texts() -> dict[str, list[str]]:
    """Fifty sentences each of GSM8K (in the folder of GSPAX_DATA) and of the manual that Python carries."""
    file = Path(os.environ.get("GSPAX_DATA", ".")) / "gsm8k" / "test.jsonl"
    questions = [json.loads(line)["question"] for line in file.read_text().splitlines()[:50]]
    pages = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    paragraphs = [each.replace("\n", " ") for each in pages.split("\n\n") if re.match(r"[A-Z]", each)]
    sentences = [each for paragraph in paragraphs for each in re.split(r"(?<=\.) +(?=[A-Z])", paragraph)]
    prose = [each for each in sentences if 12 <= len(each.split()) <= 30 and each.endswith(".") and '"' not in each]
    chosen = np.random.default_rng(0).choice(len(prose), 50, replace=False)
    return {"GSM8K": [re.split(r"(?<=[.?]) ", each)[0] for each in questions], "prose": [prose[i] for i in chosen]}


study = Study(
    variants=(
        Variant("one update", SMOLLM2, GSPO),
        Variant("GSPO", SMOLLM2, (*GSPO, *FOUR)),
        Variant(
            "GSPO, calibrated",
            SMOLLM2,
            (*GSPO, *FOUR, "old_logp=learner", "calibration=gspax.config.Calibration", "calibration.share=0.15"),
            "GSPO",
        ),
        Variant("GRPO", SMOLLM2, (*GRPO, *FOUR), "GSPO"),
        Variant("GSPO, 8-bit sampler", SMOLLM2, (*GSPO, *FOUR, "sampling.weights_dtype=int8"), "GSPO"),
    ),
    measures=(
        REWARD,
        Measure("mean reward of the run", "reward/mean", over=1),
        Measure("held-out reward", "eval/reward", over=0),
        Measure("untrained instructions", "eval/untrained/reward", over=0),
        *(Measure(f"nats a token, {name}", f"text/{name}", over=0) for name in TEXTS),
        Measure("tokens clipped", "policy/clip_fraction_tokens", over=1, percent=True),
        Measure("length", "response/length_mean", over=0.2),
        ENTROPY,
    ),
    panels=partial(draw_all, (REWARD, ENTROPY)),
    probe=text_change,
)

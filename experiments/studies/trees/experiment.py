"""An agent sorts digits in two requests, each a sequence of its own, and GSPO with one ratio for both or one for each.

Otherwise the experiment of sort_gspo.py. The policy sorts all digits, 3 to 6, and in another request the first two. The
reward is half of each. So a rollout has a long branch and a short one.

Run: gspax train experiments/studies/trees/experiment.py --workdir runs/trees loss.branches=True
"""

import json
import urllib.request
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax.numpy as jnp

from gspax import losses
from gspax.config import Sampling, Turns
from gspax.data import CharChat
from gspax.experiment import load
from gspax.rewards.environments import Agent


@losses.has_traits(losses.Traits(ratio="sequence", clip_range=True, aggregate=losses.by_sequence))
def gspo(logp, old_logp, advantage, mask, *, branches: bool = False, clip_low: float = 3e-4, clip_high: float = 4e-4):
    """GSPO on rows of one rollout. With `branches` every run of sampled tokens has a ratio and a clip of its own."""
    own = partial(losses.gspo, clip_low=clip_low, clip_high=clip_high)
    if not branches:
        return own(logp, old_logp, advantage, mask)
    begins_BT = mask & ~jnp.pad(mask[:, :-1], ((0, 0), (1, 0)))
    branch_BT = jnp.where(mask, jnp.cumsum(begins_BT, axis=1), 0).astype(jnp.int32)
    advantage_BT = jnp.broadcast_to(advantage[:, None], mask.shape)
    return own(logp, old_logp, advantage_BT, mask, segment_ids=branch_BT)


def ask(endpoint, prompt):
    """Return the policy's answer to a prompt, in a conversation of its own."""
    body = {"model": endpoint.model, "max_tokens": 8, "messages": [{"role": "user", "content": prompt}]}
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{endpoint.base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def solve(problem, endpoint):
    """Let the policy sort all digits, and then the first two."""
    both = (problem.prompt[:-1], problem.prompt[:2])
    return sum(ask(endpoint, f"{digits}=") == "".join(sorted(digits)) for digits in both) / 2


base = load(Path(__file__).parents[2] / "sort_gspo.py")
experiment = replace(
    base,
    name="trees",
    loss=partial(gspo, branches=False),
    tokenizer=CharChat("0123456789="),
    environment=Agent(solve),
    turns=Turns(limit=2),
    sampling=Sampling(prompts=32, group=8, max_prompt_tokens=8, max_tokens=24),
)

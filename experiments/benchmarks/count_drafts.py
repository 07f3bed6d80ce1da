"""Tokens that a pass with three drafts gives, by where the drafts come from; no model is needed.

    python experiments/benchmarks/count_drafts.py

The samples are demonstrations of the addition, half of them with a slip: 8 for each of 32 problems, as a policy writes
them that has learned from them. The earlier texts are other demonstrations of the same problems. Printed is a table
of drafts.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from gspax.sampler import drafts
from gspax.sampler.sampler import pad_rows

sys.path.append(str(Path(__file__).parents[1]))
import addition

P, G, S, C, K = 32, 8, 33, 104, 3  # as in addition_gspo.py


def write(seed: int) -> list[list[int]]:
    """The tokens of each demonstration, stop token included."""
    problems, encode = addition.Problems(), addition.tokenizer.encode
    stop = addition.tokenizer.stop_ids[0]
    return [
        [*encode(addition.half_wrong(problems.train(prompt), np.random.default_rng((seed, prompt, number)))), stop]
        for prompt in range(P)
        for number in range(G)
    ]


def pad(rows: Sequence[Sequence[int]]) -> jax.Array:
    """int32 [P, G, C], `NONE` after each row."""
    tokens_BC, length_B = pad_rows(rows, C)
    return jnp.where(jnp.arange(C)[None] < length_B[:, None], tokens_BC, drafts.NONE).reshape(P, G, C)


@partial(jax.jit, static_argnames=("texts", "now"))
def count_right(text_BH: jax.Array, full_BC: jax.Array, length_B: jax.Array, texts: int, now: bool) -> jax.Array:
    """The right drafts of a pass over samples of this length; with `now`, also from what their group has written."""
    if now:
        so_far_BC = jnp.where(jnp.arange(C)[None] < length_B[:, None], full_BC, drafts.NONE)
        group_PGC = jnp.pad(so_far_BC.reshape(P, G, C), ((0, 0), (0, 0), (0, 1)), constant_values=drafts.NONE)
        group_BX = jnp.repeat(group_PGC.reshape(P, -1), G, axis=0)
        text_BH = jnp.concatenate([text_BH, group_BX], axis=1)
    draft_BK, count_B = drafts.look_up(text_BH, texts, full_BC, length_B, K)
    place_BK = jnp.minimum(length_B[:, None] + jnp.arange(K)[None], C - 1)
    right_BK = jnp.take_along_axis(full_BC, place_BK, axis=1) == draft_BK
    return jnp.cumprod(right_BK & (jnp.arange(K)[None] < count_B[:, None]), axis=1).sum(axis=1)


def tokens_per_pass(earlier_PGC: jax.Array, texts: int, now: bool) -> float:
    """Replay all samples."""
    prompts = [addition.tokenizer.encode(addition.Problems().train(prompt).prompt) for prompt in range(P)]
    rows = write(0)
    full_BC, end_B = pad(rows).reshape(P * G, C), np.array([*map(len, rows)])
    drafts.TEXTS = texts
    text_BH = drafts.join_texts(*map(jnp.asarray, pad_rows(prompts, S)), earlier_PGC)
    length_B, passes_B = np.ones(P * G, np.int32), np.ones(P * G, np.int32)
    while (length_B < end_B).any():
        right_B = np.asarray(count_right(text_BH, full_BC, jnp.asarray(length_B), texts, now))
        passes_B += length_B < end_B
        length_B = np.minimum(length_B + 1 + right_B, end_B).astype(np.int32)
    return float(end_B.sum() / passes_B.sum())


def main() -> None:
    none_PGC, other_PGC, same_PGC = jnp.full((P, G, C), drafts.NONE), pad(write(1)), pad(write(0))
    print("| drafts from | first epoch | later, other samples | later, the same samples |")
    print("| --- | --- | --- | --- |")
    for name, texts, now in (
        ("prompt, own tokens, own earlier text", 1, False),
        ("and the group's earlier texts", G, False),
        ("and what the group has written in this epoch", G, True),
    ):
        cells = [f"{tokens_per_pass(earlier, texts, now):.2f}" for earlier in (none_PGC, other_PGC, same_PGC)]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

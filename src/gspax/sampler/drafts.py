"""Drafts of a sample's next tokens without a draft model, looked up in an earlier epoch's samples of its group, in its
prompt, and in its own tokens.

A pass over k + 1 positions verifies k drafts (`continuous_batching.advance`). A token is a function of (key,
sample id, position) and the logits, so a draft is accepted if it equals the token sampled at its position: samples
and log-probs are those without drafts, up to rounding. Speculative decoding with another proposal (arXiv 2211.17192)
accepts a draft with some probability instead; prompt lookup: https://github.com/apoorvumang/prompt-lookup-decoding.

A pass with drafts may cost more than it saves: `update_accept_rate` and `expected_tokens` estimate its benefit.

Axes: P prompts, G samples per prompt, B = P·G, W slots, C positions after the prompt, S prompt positions, N earlier
texts, H = N·(C + 1) + S + 1, T = H + C, K drafts.
"""

from __future__ import annotations

import jax.numpy as jnp

from gspax.types import Array

MATCH = 4  # the maximum number of last tokens to match
TEXTS = 8  # the maximum number of earlier texts to search: the sample's own, and those of its group's next samples
NONE = -1  # no token
NEWEST = 0.25  # weight of the newest draft in the acceptance rate


def join_texts(prompt_PS: Array, prompt_length_P: Array, earlier_PGC: Array) -> Array:
    """Concatenate the texts that a sample's drafts come from, separated by `NONE`: int32 [B, H].

    Args:
      prompt_PS: int32, right-padded.
      prompt_length_P: int32.
      earlier_PGC: int32, the tokens after the prompt in an earlier epoch, then `NONE`.
    """
    (P, G, _), S = earlier_PGC.shape, prompt_PS.shape[1]
    prompt_PS = jnp.where(jnp.arange(S)[None] < prompt_length_P[:, None], prompt_PS, NONE)
    earlier = [jnp.roll(earlier_PGC, -number, axis=1) for number in range(min(G, TEXTS))]
    texts = [*earlier, jnp.broadcast_to(prompt_PS[:, None], (P, G, S))]
    apart = [jnp.pad(text, ((0, 0), (0, 0), (0, 1)), constant_values=NONE) for text in texts]
    return jnp.concatenate(apart, axis=2).reshape(P * G, -1)


def look_up(text_WH: Array, texts: int, tokens_WC: Array, length_W: Array, drafts: int) -> tuple[Array, Array]:
    """Return the tokens after the best match of a slot's last tokens, int32 [W, K], and their number, int32 [W].

    The best match is the longest one, of at most `MATCH` tokens. Among equally long ones it is the nearest to the same
    position in an earlier text, the sample's own first, else the latest one in the prompt and the slot's own tokens.

    Args:
      text_WH: int32, from `join_texts`.
      texts: N, the number of texts of an earlier epoch.
      tokens_WC: int32, the slot's own tokens.
      length_W: int32, the number of the slot's tokens, at least 1.
      drafts: K, the number of drafts.
    """
    C, H = tokens_WC.shape[1], text_WH.shape[1]
    own_WC = jnp.where(jnp.arange(C)[None] < length_W[:, None], tokens_WC, NONE)
    text_WT = jnp.concatenate([text_WH, own_WC], axis=1)
    T, last_W1 = H + C, length_W[:, None] - 1
    index_1T = jnp.arange(T)[None]
    agrees_WT = jnp.pad(text_WT[:, 1:], ((0, 0), (0, 1)), constant_values=NONE) != NONE  # a token follows
    matched_WT = jnp.zeros_like(text_WT)
    padded_WT = jnp.pad(text_WT, ((0, 0), (MATCH - 1, 0)), constant_values=NONE)
    for back in range(MATCH):
        token_W1 = jnp.take_along_axis(tokens_WC, jnp.maximum(last_W1 - back, 0), axis=1)
        start = MATCH - 1 - back
        agrees_WT &= (padded_WT[:, start : start + T] == token_W1) & (last_W1 >= back)
        matched_WT += agrees_WT
    distance_WT = jnp.where(index_1T < texts * (C + 1), jnp.abs(index_1T % (C + 1) - last_W1), C + T - index_1T)
    best_W1 = (matched_WT * (C + T + 1) - distance_WT).argmax(axis=1)[:, None]
    place_WK = best_W1 + 1 + jnp.arange(drafts)[None]
    draft_WK = jnp.take_along_axis(text_WT, place_WK, axis=1, mode="fill", fill_value=NONE)
    found_W1 = jnp.take_along_axis(matched_WT, best_W1, axis=1) > 0
    room_W1 = C - 1 - length_W[:, None]  # excludes the token after the drafts
    drafted_WK = (draft_WK != NONE) & found_W1 & (jnp.arange(drafts)[None] < room_W1)
    count_W = jnp.cumprod(drafted_WK, axis=1, dtype=jnp.int32).sum(axis=1)
    return jnp.where(drafted_WK, draft_WK, 0), count_W


def update_accept_rate(accept_rate_W: Array, gets_W: Array, draft_WK: Array, count_W: Array, token_W: Array) -> Array:
    """Update the moving share of first drafts that equal the sampled token, float32 [W], in the slots of `gets_W`."""
    equal_W = (draft_WK[:, 0] == token_W) & (count_W > 0)
    return jnp.where(gets_W, accept_rate_W + NEWEST * (equal_W - accept_rate_W), accept_rate_W)


def expected_tokens(accept_rate_W: Array, drafts: int) -> Array:
    """Compute the mean tokens of a pass, float32 [W], if each draft is accepted with probability p: 1 + p + … + p^K."""
    tokens_W = jnp.ones_like(accept_rate_W)
    for _ in range(drafts):
        tokens_W = 1 + accept_rate_W * tokens_W
    return tokens_W

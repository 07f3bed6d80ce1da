"""GSPO in plain jax.numpy, without model or optimizer libraries: gradient descent on two tables.

The task: a prompt is one of 4 tokens, a response is 6 tokens out of 8, and its reward is the share of them that equal
the prompt. A random policy gets 1/8. Axes: P prompts, G samples of each, B = P·G rows, T tokens, V vocabulary.

    python experiments/reuse/plain_jax.py
"""

import jax
import jax.numpy as jnp

from gspax import advantages, losses

P, G, V, T = 4, 16, 8, 1 + 6  # column 0 is the prompt
STEPS, UPDATES, LEARNING_RATE = 60, 2, 4.0


def logits_of(params, tokens_BT):
    """Next-token logits: the sum of a table of the prompt and a table of the previous token."""
    return params["prompt"][tokens_BT[:, :1]] + params["previous"][tokens_BT]


@jax.jit
def sample(params, key):
    """A rollout; the G samples of a prompt are adjacent."""

    def sample_token(t, tokens_BT):
        logits_BV = logits_of(params, tokens_BT)[:, t - 1]
        return tokens_BT.at[:, t].set(jax.random.categorical(jax.random.fold_in(key, t), logits_BV))

    prompt_B = jnp.repeat(jnp.arange(P), G)
    return jax.lax.fori_loop(1, T, sample_token, jnp.zeros((P * G, T), jnp.int32).at[:, 0].set(prompt_B))


@jax.jit
def log_probs(params, tokens_BT):
    return losses.token_logp(logits_of(params, tokens_BT), tokens_BT)  # of tokens_BT[b, t] itself; column 0 holds 0


@jax.jit
def update(params, tokens_BT, old_logp_BT, advantage_B):
    mask_BT = jnp.ones(tokens_BT.shape, bool).at[:, 0].set(False)  # all but the prompt is sampled

    def objective(params):
        return losses.gspo_loss(log_probs(params, tokens_BT), old_logp_BT, advantage_B, mask_BT)

    (_, metrics), gradient = jax.value_and_grad(objective, has_aux=True)(params)
    return jax.tree.map(lambda weight, slope: weight - LEARNING_RATE * slope, params, gradient), metrics


def main():
    params = {"prompt": jnp.zeros((V, V)), "previous": jnp.zeros((V, V))}
    for step in range(STEPS):
        tokens_BT = sample(params, jax.random.fold_in(jax.random.key(0), step))
        reward_B = jnp.mean(tokens_BT[:, 1:] == tokens_BT[:, :1], axis=-1)
        advantage_B = advantages.standardize(reward_B.reshape(P, G)).reshape(-1)
        old_logp_BT = log_probs(params, tokens_BT)
        for _ in range(UPDATES):  # the ratios of the second update differ from 1 and are clipped
            params, metrics = update(params, tokens_BT, old_logp_BT, advantage_B)
        if step % 10 == 0 or step == STEPS - 1:
            clipped = float(metrics["clip_fraction_sequences"])
            print(f"step {step:3d}  reward {float(reward_B.mean()):.3f}  clipped {clipped:.3f}")


if __name__ == "__main__":
    main()

"""GSPO for a Flax Linen model in an optax loop.

The task: a prompt is one of 4 tokens, a response is 6 tokens out of 8, and its reward is the share of them that equal
the prompt. A random policy gets 1/8. Axes: P prompts, G samples of each, B = P·G rows, T tokens, V vocabulary.

    python experiments/reuse/flax_linen.py
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from gspax import advantages, losses

P, G, V, T = 4, 16, 8, 1 + 6  # column 0 is the prompt
STEPS, UPDATES = 60, 2


class Policy(nn.Module):
    """Tokens [B, T] -> next-token logits [B, T, V]; position t sees the tokens up to t."""

    @nn.compact
    def __call__(self, tokens_BT):
        embedded_BTD = nn.Embed(V, 32)(tokens_BT)
        return nn.Dense(V)(nn.RNN(nn.GRUCell(32))(embedded_BTD))


model = Policy()
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


@jax.jit
def sample(params, key):
    """A rollout; the G samples of a prompt are adjacent."""

    def sample_token(t, tokens_BT):
        logits_BV = model.apply(params, tokens_BT)[:, t - 1]
        return tokens_BT.at[:, t].set(jax.random.categorical(jax.random.fold_in(key, t), logits_BV))

    prompt_B = jnp.repeat(jnp.arange(P), G)
    return jax.lax.fori_loop(1, T, sample_token, jnp.zeros((P * G, T), jnp.int32).at[:, 0].set(prompt_B))


@jax.jit
def log_probs(params, tokens_BT):
    return losses.token_logp(model.apply(params, tokens_BT), tokens_BT)  # of tokens_BT[b, t] itself; column 0 holds 0


@jax.jit
def update(params, opt_state, tokens_BT, old_logp_BT, advantage_B):
    mask_BT = jnp.ones(tokens_BT.shape, bool).at[:, 0].set(False)  # all but the prompt is sampled

    def objective(params):
        return losses.gspo_loss(log_probs(params, tokens_BT), old_logp_BT, advantage_B, mask_BT)

    (_, metrics), gradient = jax.value_and_grad(objective, has_aux=True)(params)
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, metrics


def main():
    params = model.init(jax.random.key(0), jnp.zeros((1, T), jnp.int32))
    opt_state = optimizer.init(params)
    for step in range(STEPS):
        tokens_BT = sample(params, jax.random.fold_in(jax.random.key(1), step))
        reward_B = jnp.mean(tokens_BT[:, 1:] == tokens_BT[:, :1], axis=-1)
        advantage_B = advantages.standardize(reward_B.reshape(P, G)).reshape(-1)
        old_logp_BT = log_probs(params, tokens_BT)
        for _ in range(UPDATES):  # the ratios of the second update differ from 1 and are clipped
            params, opt_state, metrics = update(params, opt_state, tokens_BT, old_logp_BT, advantage_B)
        if step % 10 == 0 or step == STEPS - 1:
            clipped = float(metrics["clip_fraction_sequences"])
            print(f"step {step:3d}  reward {float(reward_B.mean()):.3f}  clipped {clipped:.3f}")


if __name__ == "__main__":
    main()

"""GSPO for a Flax NNX model in an optax loop.

The task: a prompt is one of 4 tokens, a response is 6 tokens out of 8, and its reward is the share of them that equal
the prompt. A random policy gets 1/8. Axes: P prompts, G samples of each, B = P·G rows, T tokens, V vocabulary.

    python experiments/reuse/flax_nnx.py
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from gspax import advantages, losses

P, G, V, T = 4, 16, 8, 1 + 6  # column 0 is the prompt
STEPS, UPDATES = 60, 2


class Policy(nnx.Module):
    """Tokens [B, T] -> next-token logits [B, T, V], from the prompt and the previous token."""

    def __init__(self, rngs):
        self.prompt, self.previous = nnx.Embed(V, 32, rngs=rngs), nnx.Embed(V, 32, rngs=rngs)
        self.hidden, self.out = nnx.Linear(32, 32, rngs=rngs), nnx.Linear(32, V, rngs=rngs)

    def __call__(self, tokens_BT):
        return self.out(nnx.gelu(self.hidden(self.prompt(tokens_BT[:, :1]) + self.previous(tokens_BT))))


@nnx.jit
def sample(model, key):
    """A rollout; the G samples of a prompt are adjacent."""
    tokens_BT = jnp.zeros((P * G, T), jnp.int32).at[:, 0].set(jnp.repeat(jnp.arange(P), G))
    for t in range(1, T):
        logits_BV = model(tokens_BT)[:, t - 1]
        tokens_BT = tokens_BT.at[:, t].set(jax.random.categorical(jax.random.fold_in(key, t), logits_BV))
    return tokens_BT


@nnx.jit
def log_probs(model, tokens_BT):
    return losses.token_logp(model(tokens_BT), tokens_BT)  # of tokens_BT[b, t] itself; column 0 holds 0


@nnx.jit
def update(model, optimizer, tokens_BT, old_logp_BT, advantage_B):
    mask_BT = jnp.ones(tokens_BT.shape, bool).at[:, 0].set(False)  # all but the prompt is sampled

    def objective(model):
        return losses.gspo_loss(log_probs(model, tokens_BT), old_logp_BT, advantage_B, mask_BT)

    (_, metrics), gradient = nnx.value_and_grad(objective, has_aux=True)(model)
    optimizer.update(model, gradient)
    return metrics


def main():
    model = Policy(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), wrt=nnx.Param)
    for step in range(STEPS):
        tokens_BT = sample(model, jax.random.key(step))
        reward_B = jnp.mean(tokens_BT[:, 1:] == tokens_BT[:, :1], axis=-1)
        advantage_B = advantages.standardize(reward_B.reshape(P, G)).reshape(-1)
        old_logp_BT = log_probs(model, tokens_BT)
        for _ in range(UPDATES):  # the ratios of the second update differ from 1 and are clipped
            metrics = update(model, optimizer, tokens_BT, old_logp_BT, advantage_B)
        if step % 10 == 0 or step == STEPS - 1:
            clipped = float(metrics["clip_fraction_sequences"])
            print(f"step {step:3d}  reward {float(reward_B.mean()):.3f}  clipped {clipped:.3f}")


if __name__ == "__main__":
    main()

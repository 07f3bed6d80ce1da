"""GSPO on a mesh as `jax.make_mesh` makes it: the rows of a batch are split over all devices.

The task: a prompt is one of 4 tokens, a response is 6 tokens out of 8, and its reward is the share of them that equal
the prompt. A random policy gets 1/8. Axes: P prompts, G samples of each, B = P·G rows, T tokens, V vocabulary.

    python experiments/reuse/device_mesh.py
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gspax import advantages, losses

P, G, V, T = 4, 16, 8, 1 + 6  # column 0 is the prompt
STEPS, UPDATES, LEARNING_RATE = 60, 2, 4.0


def logits_of(params, tokens_BT):
    """Next-token logits [B, T, V]: the sum of a table of the prompt and a table of the previous token."""
    one_hot_BTV = jax.nn.one_hot(tokens_BT, V)
    return one_hot_BTV[:, :1] @ params["prompt"] + one_hot_BTV @ params["previous"]


def sample(params, key):
    """A rollout; the G samples of a prompt are adjacent."""
    tokens_BT = jnp.zeros((P * G, T), jnp.int32).at[:, 0].set(jnp.repeat(jnp.arange(P), G))
    for t in range(1, T):
        logits_BV = logits_of(params, tokens_BT)[:, t - 1]
        tokens_BT = tokens_BT.at[:, t].set(jax.random.categorical(jax.random.fold_in(key, t), logits_BV))
    return tokens_BT


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
        tokens_BT = jax.device_put(jax.jit(sample)(params, jax.random.key(step)), PartitionSpec("data"))
        reward_B = jnp.mean(tokens_BT[:, 1:] == tokens_BT[:, :1], axis=-1)
        advantage_B = advantages.by_group(advantages.standardize, reward_B, tokens_BT[:, 0], size=G)
        old_logp_BT = log_probs(params, tokens_BT)
        for _ in range(UPDATES):  # the ratios of the second update differ from 1 and are clipped
            params, metrics = update(params, tokens_BT, old_logp_BT, advantage_B)
        if step % 10 == 0 or step == STEPS - 1:
            clipped = float(metrics["clip_fraction_sequences"])
            print(f"step {step:3d}  reward {float(reward_B.mean()):.3f}  clipped {clipped:.3f}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)  # without an accelerator, four virtual devices
    jax.set_mesh(jax.make_mesh((jax.device_count(),), ("data",)))
    main()

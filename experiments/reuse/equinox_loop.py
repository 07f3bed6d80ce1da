"""GRPO with RLOO's advantages for an Equinox module, written for one sequence and mapped over rows.

The task: a prompt is one of 4 tokens, a response is 6 tokens out of 8, and its reward is the share of them that equal
the prompt. A random policy gets 1/8. Axes: P prompts, G samples of each, B = P·G rows, T tokens, V vocabulary.

    python experiments/reuse/equinox_loop.py
"""

import sys

import jax
import jax.numpy as jnp
import optax

from gspax import advantages, losses

try:
    import equinox as eqx
except ModuleNotFoundError:
    print("equinox_loop.py needs Equinox, which is not installed: run pip install equinox.", file=sys.stderr)
    sys.exit(2)

P, G, V, T, STEPS, UPDATES = 4, 16, 8, 1 + 6, 60, 2  # column 0 is the prompt
optimizer = optax.adam(1e-2)


class Policy(eqx.Module):
    """Tokens [T] -> next-token logits [T, V]; position t sees the tokens up to t."""

    embed: eqx.nn.Embedding
    cell: eqx.nn.GRUCell
    readout: eqx.nn.Linear

    def __init__(self, key):
        embed, cell, readout = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(V, 32, key=embed)
        self.cell = eqx.nn.GRUCell(32, 32, key=cell)
        self.readout = eqx.nn.Linear(32, V, key=readout)

    def __call__(self, tokens_T):
        def step(state_D, token):
            state_D = self.cell(self.embed(token), state_D)
            return state_D, self.readout(state_D)

        return jax.lax.scan(step, jnp.zeros(32), tokens_T)[1]


@eqx.filter_jit
def sample(model, key):
    def sample_token(t, tokens_BT):
        logits_BV = jax.vmap(model)(tokens_BT)[:, t - 1]
        return tokens_BT.at[:, t].set(jax.random.categorical(jax.random.fold_in(key, t), logits_BV))

    prompt_B = jnp.repeat(jnp.arange(P), G)  # the G samples of a prompt are adjacent
    return jax.lax.fori_loop(1, T, sample_token, jnp.zeros((P * G, T), jnp.int32).at[:, 0].set(prompt_B))


@eqx.filter_jit
def log_probs(model, tokens_BT):
    return losses.token_logp(jax.vmap(model)(tokens_BT), tokens_BT)  # of tokens_BT[b, t] itself; column 0 holds 0


@eqx.filter_jit
def update(model, opt_state, tokens_BT, old_logp_BT, advantage_B):
    mask_BT = jnp.ones(tokens_BT.shape, bool).at[:, 0].set(False)  # all but the prompt is sampled

    def objective(model):
        return losses.reduce(losses.grpo(log_probs(model, tokens_BT), old_logp_BT, advantage_B, mask_BT))

    (_, metrics), gradient = eqx.filter_value_and_grad(objective, has_aux=True)(model)
    updates, opt_state = optimizer.update(gradient, opt_state)
    return eqx.apply_updates(model, updates), opt_state, metrics


def main():
    model = Policy(jax.random.key(0))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    for step in range(STEPS):
        tokens_BT = sample(model, jax.random.fold_in(jax.random.key(1), step))
        reward_B = jnp.mean(tokens_BT[:, 1:] == tokens_BT[:, :1], axis=-1)
        advantage_B = advantages.leave_one_out(reward_B.reshape(P, G)).reshape(-1)
        old_logp_BT = log_probs(model, tokens_BT)
        for _ in range(UPDATES):  # the ratios of the second update differ from 1
            model, opt_state, metrics = update(model, opt_state, tokens_BT, old_logp_BT, advantage_B)
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  reward {reward_B.mean():.3f}  clipped {metrics['clip_fraction_tokens']:.3f}")


if __name__ == "__main__":
    main()

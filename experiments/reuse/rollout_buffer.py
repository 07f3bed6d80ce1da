"""GSPO on rollouts of an external engine: numpy arrays from a buffer, with the engine's own log-probs.

The engine rounds weights to float16, gets new ones only every third batch, and returns responses of 3 to 6 tokens
in any order. The task: a prompt is one of 4 tokens, the reward is the share of a response's tokens that equal it. A
random policy gets 1/8. Axes: P prompts, G samples of each, B = P·G rows, T tokens, V vocabulary.

    python experiments/reuse/rollout_buffer.py
"""

import io

import jax
import jax.numpy as jnp
import numpy as np

from gspax import advantages, losses
from gspax.losses import correction

P, G, V, T = 4, 16, 8, 1 + 6  # column 0 is the prompt
STEPS, UPDATES, PUBLISH_EVERY, LEARNING_RATE = 60, 2, 3, 4.0


def engine(weights, rng):
    """A stand-in for an inference engine: samples a batch in numpy and writes it to a file-like buffer."""
    prompt_B = rng.permutation(np.repeat(np.arange(P), G))
    length_B = rng.integers(3, T, size=P * G)
    tokens_BT, logp_BT = np.zeros((P * G, T), np.int64), np.full((P * G, T), np.nan)  # NaN: not a response token
    tokens_BT[:, 0] = prompt_B
    for b in range(P * G):
        for t in range(1, 1 + length_B[b]):
            logits_V = (weights["prompt"][prompt_B[b]] + weights["previous"][tokens_BT[b, t - 1]]).astype(np.float64)
            logp_V = logits_V - np.log(np.exp(logits_V).sum())
            tokens_BT[b, t] = rng.choice(V, p=np.exp(logp_V))
            logp_BT[b, t] = logp_V[tokens_BT[b, t]]
    hits_BT = (tokens_BT == prompt_B[:, None]) & (np.arange(T) > 0) & (np.arange(T) <= length_B[:, None])
    buffer = io.BytesIO()
    np.savez(buffer, tokens=tokens_BT, logp=logp_BT, length=length_B, reward=hits_BT.sum(-1) / length_B, group=prompt_B)
    buffer.seek(0)
    return buffer


@jax.jit
def log_probs(params, tokens_BT):
    logits_BTV = params["prompt"][tokens_BT[:, :1]] + params["previous"][tokens_BT]
    return losses.token_logp(logits_BTV, tokens_BT)


@jax.jit
def update(params, tokens_BT, old_logp_BT, sampler_logp_BT, advantage_B, mask_BT):
    """old_logp_BT is the learner's at the start of the batch; weight_B corrects for tokens that the engine sampled."""
    weight_B = correction.truncate_sequences(old_logp_BT, sampler_logp_BT, mask_BT, cap=2.0)

    def objective(params):
        logp_BT = log_probs(params, tokens_BT)
        terms = losses.gspo(logp_BT, old_logp_BT, advantage_B, mask_BT, correction=weight_B)
        mismatch = correction.mismatch_metrics(old_logp_BT, sampler_logp_BT, mask_BT)
        return losses.reduce(terms._replace(metrics=terms.metrics | mismatch))

    (_, metrics), gradient = jax.value_and_grad(objective, has_aux=True)(params)
    params = jax.tree.map(lambda weight, slope: weight - LEARNING_RATE * slope, params, gradient)
    return params, metrics | correction.effective_sample_sizes(metrics), weight_B


def main():
    rng = np.random.default_rng(0)
    params = {"prompt": jnp.zeros((V, V)), "previous": jnp.zeros((V, V))}
    for step in range(STEPS):
        if step % PUBLISH_EVERY == 0:
            weights = {name: np.asarray(leaf, np.float16) for name, leaf in params.items()}
        batch = np.load(engine(weights, rng))
        # The losses reject float64, which jit would silently cast to float32 first.
        tokens_BT = batch["tokens"].astype(np.int32)
        sampler_logp_BT = batch["logp"].astype(np.float32)
        mask_BT = (np.arange(T) > 0) & (np.arange(T) <= batch["length"][:, None])
        advantage_B = advantages.by_group(advantages.standardize, batch["reward"], batch["group"])
        old_logp_BT = log_probs(params, tokens_BT)
        for _ in range(UPDATES):
            params, metrics, weight_B = update(params, tokens_BT, old_logp_BT, sampler_logp_BT, advantage_B, mask_BT)
        if step % 10 == 0 or step == STEPS - 1:
            k3, ess = float(metrics["mismatch_k3"]), float(metrics["mismatch_ess_sequences"])
            print(f"step {step:3d}  reward {batch['reward'].mean():.3f}  mismatch_k3 {k3:.1e}", end="  ")
            print(f"ess {ess:.3f}  weight_min {float(weight_B.min()):.3f}  weight_max {float(weight_B.max()):.3f}")


if __name__ == "__main__":
    main()

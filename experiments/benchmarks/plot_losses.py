"""Draws losses.png: what each policy loss maximizes, and the weight it gives to ∇log π, against the ratio.

One sequence of one token, so token and sequence ratio are the same; the old probability is 0.2. The weight is minus the
gradient of the loss by log π, the surrogate its integral over the ratio from 1: for losses that are a constant weight
times log π the value itself would say nothing.

Run: python experiments/benchmarks/plot_losses.py
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from gspax import losses

OLD_PROBABILITY = 0.2
PANELS = {  # with ranges that one can see; GSPO's own are 3e-4 and 4e-4
    "GRPO, Dr. GRPO, DAPO, GSPO": lambda *x: losses.grpo(*x, clip_low=0.2, clip_high=0.28),
    "GRPO with dual_clip=2": lambda *x: losses.grpo(*x, clip_low=0.2, clip_high=0.28, dual_clip=2.0),
    "importance sampling": losses.importance_sampling,
    "CISPO, clip_high=0.8": lambda *x: losses.cispo(*x, clip_high=0.8),
    "SAPO": losses.sapo,
    "GMPO": losses.gmpo,
    "VESPO": losses.vespo,
    "DPPO, total variation": losses.dppo_tv,
    "DPPO, KL": losses.dppo_kl,
}
COLORS = {1.0: "tab:blue", -1.0: "tab:orange"}


def weights(loss, ratio, advantage):
    """Minus the gradient by log π of each one-token sequence, divided by A."""
    old_logp = jnp.full((len(ratio), 1), jnp.log(OLD_PROBABILITY), jnp.float32)
    mask = jnp.ones_like(old_logp, bool)
    advantages = jnp.full(len(ratio), advantage, jnp.float32)
    gradient = jax.grad(lambda logp: loss(logp, old_logp, advantages, mask).value.sum())
    return -gradient(old_logp + jnp.log(ratio)[:, None])[:, 0] / advantage


def draw(path):
    ratio = jnp.linspace(0.01, 3.0, 1200, dtype=jnp.float32)
    figure, axes = plt.subplots(2, len(PANELS), figsize=(2.2 * len(PANELS), 4.6), sharex=True, sharey="row")
    for column, (title, loss) in enumerate(PANELS.items()):
        for advantage, color in COLORS.items():
            weight = weights(loss, ratio, advantage)
            # d J / d r = weight / r
            steps = (weight / ratio * (ratio[1] - ratio[0])).cumsum()
            surrogate = advantage * (steps - jnp.interp(1.0, ratio, steps))
            axes[0, column].plot(ratio, surrogate, color, label=f"A = {advantage:+.0f}")
            axes[1, column].plot(ratio, weight, color, linestyle="-" if advantage > 0 else "--")
        axes[0, column].set_title(title, fontsize=8)
        axes[1, column].set_xlabel("ratio")
        for axis in axes[:, column]:
            axis.axvline(1, color="0.8", linewidth=0.8, zorder=0)
    axes[0, 0].set_ylabel("surrogate, 0 at ratio 1")
    axes[1, 0].set_ylabel("weight of ∇log π, over A")
    axes[1, 0].set_ylim(-0.1, 3.1)
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    draw(Path(__file__).with_name("losses.png"))

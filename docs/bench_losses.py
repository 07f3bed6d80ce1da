"""Bytes per second of each policy loss with its gradient, beside a copy on the same machine.

The least traffic of a loss and its gradient is 13 bytes per token: both log-probabilities and the mask are read, the
gradient is written. That number over the measured time is what a loss moves; it is compared with a copy of two arrays
of the same shape (16 bytes per token). The mark is half of the copy. Times are the best of several runs, so that
other work on the machine disturbs little; "loss" returns the loss and the gradient, "metrics" the metrics too.

Run: python docs/bench_losses.py [rows tokens]
"""

import sys
import time
from functools import partial

import jax
import jax.numpy as jnp

from gspax import losses

NAMES = (
    *("gspo", "gspo_token", "luspo", "gmpo", "vespo", "grpo", "dr_grpo", "dapo"),
    *("reinforce", "cispo", "sapo", "dppo_tv", "dppo_kl"),
)
RUNS = 15
BYTES = 4 + 4 + 1 + 4  # logp, old_logp, mask, gradient


def seconds(function, *arguments):
    """The shortest of several runs, after one that compiles."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(RUNS):
        began = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - began)
    return min(times)


def batch(rows, tokens):
    """Log-ratios of spread 0.1, responses of every length."""
    keys = jax.random.split(jax.random.key(0), 4)
    old_logp_BT = -jax.random.exponential(keys[0], (rows, tokens))
    logp_BT = old_logp_BT + 0.1 * jax.random.normal(keys[1], (rows, tokens))
    length_B1 = jax.random.randint(keys[2], (rows, 1), 1, tokens)
    advantage_B = jax.random.normal(keys[3], (rows,))
    return logp_BT, old_logp_BT, advantage_B, jnp.arange(tokens)[None] < length_B1


def main(rows=512, tokens=4096):
    arguments = batch(rows, tokens)
    size = rows * tokens
    copy = 16 * size / seconds(jax.jit(lambda a, b: (jnp.copy(a), jnp.copy(b))), *arguments[:2])
    print(f"{rows} x {tokens} float32 on {jax.devices()[0].device_kind}: a copy moves {copy / 1e9:.2f} GB/s")
    print(f"{'':12}{'loss':>14}{'':8}{'metrics':>14}")
    for name in NAMES:
        both = jax.value_and_grad(partial(reduced, name), has_aux=True)
        alone = jax.value_and_grad(lambda *batch, name=name: reduced(name, *batch)[0])
        rates = [BYTES * size / seconds(jax.jit(f), *arguments) for f in (alone, both)]
        print(f"{name:12}" + "".join(f"{rate / 1e9:9.2f} GB/s {rate / copy:5.0%}  " for rate in rates), flush=True)


def reduced(name, *batch):
    return losses.reduce(getattr(losses, name)(*batch))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))

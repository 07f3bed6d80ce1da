"""Bytes per second of each policy loss with its gradient, compared with a copy on the same machine.

A loss and its gradient move at least 13 bytes per token: both log-probabilities and the mask are read, the gradient is
written. That number over the measured time is the loss's rate; the copy moves two float32 arrays of the same shape (16
bytes per token). "loss" returns the loss and its gradient, "metrics" the metrics too. "exp pass" is an upper bound: one
loop with one `exp` per token that moves exactly those 13 bytes.

The functions run in turn, round after round, and the shortest time of each counts, so that other work on the machine
affects all of them alike. "arrays" is the compiled program's temporary memory, in float32 arrays of the batch's size.

On a shared machine the CPU time of one core is steadier than wall time: it includes waiting for memory, but not waiting
for a core.

Run: [taskset -c 0] python experiments/benchmarks/bench_losses.py [cpu] [rows tokens]
"""

import sys
import time
from functools import partial

import jax
import jax.numpy as jnp

from gspax import losses

NAMES = (
    *("gspo", "gspo_token", "luspo", "gmpo", "vespo", "grpo", "dr_grpo", "dapo"),
    *("importance_sampling", "cispo", "sapo", "dppo_tv", "dppo_kl"),
    *("dis", "ipo", "dro"),
)
ROUNDS = 40
BYTES = 4 + 4 + 1 + 4  # logp, old_logp, mask, gradient
CLOCK = time.process_time if "cpu" in sys.argv else time.perf_counter


def batch(rows, tokens):
    """Log-ratios of spread 0.1, responses of every length."""
    keys = jax.random.split(jax.random.key(0), 4)
    old_logp_BT = -jax.random.exponential(keys[0], (rows, tokens))
    logp_BT = old_logp_BT + 0.1 * jax.random.normal(keys[1], (rows, tokens))
    length_B1 = jax.random.randint(keys[2], (rows, 1), 1, tokens)
    advantage_B = jax.random.normal(keys[3], (rows,))
    return logp_BT, old_logp_BT, advantage_B, jnp.arange(tokens)[None] < length_B1


def copy(logp_BT, old_logp_BT, advantage_B, mask_BT):
    return jnp.copy(logp_BT), jnp.copy(old_logp_BT)


def exp_pass(logp_BT, old_logp_BT, advantage_B, mask_BT):
    return jnp.where(mask_BT, advantage_B[:, None] * jnp.exp(logp_BT - old_logp_BT), 0)


def loss(name, *batch):
    return losses.reduce(getattr(losses, name)(*batch))


def seconds(functions, arguments):
    """The shortest time of each function, all of them in turn."""
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(ROUNDS):
        for key, function in functions.items():
            began = CLOCK()
            jax.block_until_ready(function(*arguments))
            best[key] = min(best[key], CLOCK() - began)
    return best


def main(rows=512, tokens=4096):
    arguments = batch(rows, tokens)
    functions = {"copy": copy, "exp pass": exp_pass}
    for name in NAMES:
        functions[name, "loss"] = jax.value_and_grad(lambda *batch, name=name: loss(name, *batch)[0])
        functions[name, "metrics"] = jax.value_and_grad(partial(loss, name), has_aux=True)
    compiled = {key: jax.jit(function).lower(*arguments).compile() for key, function in functions.items()}
    time_of = seconds(compiled, arguments)
    copied = 16 * rows * tokens / time_of["copy"]
    print(f"{rows} x {tokens} float32 on {jax.devices()[0].device_kind}: a copy moves {copied / 1e9:.2f} GB/s")

    def row(key):
        rate = BYTES * rows * tokens / time_of[key]
        arrays = compiled[key].memory_analysis().temp_size_in_bytes / (4 * rows * tokens)
        return f"{rate / 1e9:9.2f} GB/s {rate / copied:5.0%} {arrays:5.1f} arrays"

    print(f"{'exp pass':12}{row('exp pass')}")
    print(f"{'':12}{'loss':>14}{'':20}{'metrics':>14}")
    for name in NAMES:
        print(f"{name:12}{row((name, 'loss'))}  {row((name, 'metrics'))}")


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:] if word.isdigit()))

"""What every test runs under. This must come before the first use of a device."""

import jax

jax.config.update("jax_num_cpu_devices", 8)  # every sharding test runs on any machine
jax.config.update(
    "jax_numpy_rank_promotion", "raise"
)  # an advantage [B] where [B, T] was due is an error, B == T or not

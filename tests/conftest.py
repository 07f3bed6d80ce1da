"""What every test runs under. This must come before the first use of a device."""

from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")  # an installed libtpu without a TPU may wait for one
jax.config.update("jax_num_cpu_devices", 8)  # every sharding test runs on any machine
# an advantage [B] where [B, T] was due is an error, B == T or not
jax.config.update("jax_numpy_rank_promotion", "raise")
# Most of the suite's time is compilation, much of it of the same programs. What XLA's costly passes do to a program is
# its speed; the tests that start a process of their own (test_loop.py) run with them.
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

"""Kernels: arithmetic that a plain `jnp` expression would do too slowly."""

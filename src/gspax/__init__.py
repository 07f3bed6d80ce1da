"""gspax: GSPO, GRPO and their relatives in JAX. Importing it, or `gspax.losses`, needs jax alone."""

__version__ = "0.2.0"

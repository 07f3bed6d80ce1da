"""The sampler: token generation on the devices."""

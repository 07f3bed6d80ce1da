"""Fewer devices than the eight virtual ones of this machine, for tests whose law is not one of meshes."""

from unittest import mock

import jax


def few_devices(count):
    """Let jax name only the first `count` devices, in a `with` statement."""
    devices = jax.devices()[:count]
    return mock.patch.multiple(jax, devices=lambda *_: devices, device_count=lambda: count)

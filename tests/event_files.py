"""Reads TensorBoard's event files without TensorBoard."""

import pytest


def read_events(path):
    """The records of an event file: length, checksum, data, checksum. Skips the test without tensorboardX."""
    event = pytest.importorskip("tensorboardX.proto.event_pb2").Event
    data, at = path.read_bytes(), 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        yield event.FromString(data[at + 12 : at + 12 + size])
        at += 16 + size


def scalar_steps(path):
    """The steps that have scalars."""
    return [event.step for event in read_events(path) if event.summary.value]

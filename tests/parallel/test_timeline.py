"""The timeline of a run: events of lanes and rows, as Perfetto reads them."""

import itertools
import json
import threading
import time

import jax.numpy as jnp
import pytest
from api import Answer, CompletionRequest

from gspax.config import Sampling
from gspax.parallel import timeline
from gspax.rollout.servers.failover import Servers


def events_in(lines):
    """The events of a timeline's lines: lane, row, begin, end, name, in the order of their ends."""
    read = json.loads("[" + lines.removesuffix(",\n") + "]")
    lanes = {event["tid"]: event["args"]["name"] for event in read if event["ph"] == "M"}
    spans = [event for event in read if event["ph"] == "X"]
    return [(lanes[one["tid"]], one["tid"], one["ts"], one["ts"] + one["dur"], one["name"]) for one in spans]


def test_overlapping_events_of_a_lane_have_rows_of_their_own():
    spans = [(0.0, 1.0), (0.5, 2.0), (1.5, 2.5), (2.0, 3.0), (0.0, 4.0)]  # by their ends
    with timeline.collecting() as collected:
        for began, ended in spans:
            timeline.add("a", "x", began, ended)
        timeline.add("b", "y", 0.0, 9.0)
    events = events_in(collected.take())
    origin = events[0][2]
    assert [(lane, (begin - origin) / 1e6, (end - origin) / 1e6) for lane, _, begin, end, _ in events] == [
        *(("a", *span) for span in spans),
        ("b", 0.0, 9.0),
    ]
    rows = [row for _, row, *_ in events]
    assert rows[0] == rows[2] and rows[1] == rows[3] and len({rows[0], rows[1], rows[4], rows[5]}) == 4
    assert collected.take() == "", "each event is taken once"


def test_times_are_of_the_clock_and_names_are_any_text():
    before = time.time()
    with timeline.collecting() as collected:
        with pytest.raises(KeyError), timeline.span('a "lane"\n', "né \\ \x1b"):
            raise KeyError
        timeline.watch("devices", "sum", time.monotonic(), jnp.ones(3).sum())
    (lane, _, begin, end, name), watched = events_in(collected.take())
    assert (lane, name) == (
        'a "lane"\n',
        "né \\ \x1b",
    ) and before * 1e6 - 1e3 <= begin <= end <= time.time() * 1e6 + 1e3
    assert watched[0] == "devices" and watched[3] >= watched[2]


def test_events_that_follow_one_another_do_not_overlap_by_rounding():
    with timeline.collecting() as collected:
        ends = [7.0 + 0.7e-6 * number for number in range(40)]
        for began, ended in itertools.pairwise(ends):
            timeline.add("a", "follows", began, ended)
    events = events_in(collected.take())
    assert all(first[3] == second[2] for first, second in itertools.pairwise(events)), events


def test_work_of_the_same_devices_is_one_thing_after_the_other():
    with timeline.collecting() as collected:
        began = time.monotonic()
        for _ in range(2):
            timeline.watch("devices", "sum", began, jnp.ones(3).sum())
    first, second = events_in(collected.take())
    assert first[3] <= second[2] and first[1] == second[1]


def test_nothing_is_collected_outside():
    with timeline.span("a", "x"):
        timeline.add("a", "x", 0.0, 1.0)
    timeline.watch("a", "x", 0.0, None)
    assert timeline.take() == ""


def test_a_request_is_in_the_lane_of_its_server():
    class Stub:
        address = "http://127.0.0.1:1"

        def sample(self, ask):
            return Answer([3], [-1.0], True, None)

    servers = Servers([Stub()], 5.0, lambda server: None)
    with timeline.collecting() as collected:
        servers.ask(0, CompletionRequest([1, 2], 1, 0, Sampling(), False, (), False), threading.Event())
    assert [(lane, name) for lane, *_, name in events_in(collected.take())] == [(Stub.address, "request")]

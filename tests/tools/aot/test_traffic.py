"""Bytes moved between memory and cores, against counts made by hand."""

import pytest
from api import hlo, traffic

INSIDE = """
%sums (p0: f32[64], p1: f32[64]) -> f32[64] {
  %p0 = f32[64]{0} parameter(0)
  %p1 = f32[64]{0} parameter(1)
  ROOT %a = f32[64]{0} add(%p0, %p1)
}

%layer (p0: f32[48,64], p1: s32[]) -> f32[1,64] {
  %p0 = f32[48,64]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %d = f32[1,64]{1,0} dynamic-slice(%p0, %p1), dynamic_slice_sizes={1,64}
}

%write (p0: f32[48,64], p1: f32[1,64], p2: s32[]) -> f32[48,64] {
  %p0 = f32[48,64]{1,0} parameter(0)
  %p1 = f32[1,64]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %two = f32[1,64]{1,0} add(%p1, %p1)
  ROOT %u = f32[48,64]{1,0} dynamic-update-slice(%p0, %two, %p2)
}

%nested (p0: s32[], p1: f32[48,64], p2: f32[1,64]) -> f32[1,64] {
  %p0 = s32[] parameter(0)
  %p1 = f32[48,64]{1,0} parameter(1)
  %p2 = f32[1,64]{1,0} parameter(2)
  %l = f32[1,64]{1,0} fusion(%p1, %p0), kind=kLoop, calls=%layer
  ROOT %a = f32[1,64]{1,0} add(%l, %p2)
}

%flat (p0: f32[48,64]) -> f32[3072] {
  %p0 = f32[48,64]{1,0} parameter(0)
  ROOT %b = f32[3072]{0} bitcast(%p0)
}

%renamed (p0: f32[48,64]) -> f32[3072] {
  %p0 = f32[48,64]{1,0} parameter(0)
  %b = f32[3072]{0} fusion(%p0), kind=kLoop, calls=%flat
  ROOT %n = f32[3072]{0} negate(%b)
}

%shaped (p0: f32[48,64]) -> f32[3072] {
  %p0 = f32[48,64]{1,0} parameter(0)
  %n = f32[48,64]{1,0} negate(%p0)
  ROOT %b = f32[3072]{0} fusion(%n), kind=kLoop, calls=%flat
}

%rewrite (p0: f32[48,64], p1: f32[1,64], p2: s32[]) -> f32[48,64] {
  %p0 = f32[48,64]{1,0} parameter(0)
  %p1 = f32[1,64]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  ROOT %w = f32[48,64]{1,0} fusion(%p0, %p1, %p2), kind=kLoop, calls=%write
}

%both (p0: f32[64]) -> (f32[64], bf16[64]) {
  %p0 = f32[64]{0} parameter(0)
  %n = f32[64]{0} negate(%p0)
  %h = bf16[64]{0} convert(%p0)
  ROOT %t = (f32[64]{0}, bf16[64]{0}) tuple(%n, %h)
}
"""
GIVEN = [
    "%x = f32[64]{0} parameter(0)",
    "%y = f32[64]{0} parameter(1)",
    "%z = f32[64]{0:T(256)S(1)} copy(%y)",
    "%stack = f32[48,64]{1,0} parameter(2)",
    "%row = f32[1,64]{1,0} parameter(3)",
    "%i = s32[] parameter(4)",
]
READ_Y = 256  # what the copy in GIVEN reads; it writes to the chip
LINES = {
    "two arguments and a result": ("%r = f32[64]{0} fusion(%x, %y), calls=%sums", 3 * 256),
    "an argument on the chip is free": ("%r = f32[64]{0} fusion(%x, %z), calls=%sums", 2 * 256),
    "a result on the chip is free": ("%r = f32[64]{0:T(256)S(1)} fusion(%x, %y), calls=%sums", 2 * 256),
    "a slice of a stack reads one layer": ("%r = f32[1,64]{1,0} fusion(%stack, %i), calls=%layer", 256 + 4 + 256),
    "an update in place writes one layer": (
        "%r = f32[48,64]{1,0} fusion(%stack, %row, %i), calls=%write",
        256 + 4 + 256,
    ),
    "a slice in a fusion of a fusion reads one layer": (
        "%r = f32[1,64]{1,0} fusion(%i, %stack, %row), calls=%nested",
        4 + 3 * 256,
    ),
    "what a fusion of a fusion names anew is read where it is used": (
        "%r = f32[3072]{0} fusion(%stack), calls=%renamed",
        2 * 48 * 256,
    ),
    "and written where it was made": ("%r = f32[3072]{0} fusion(%stack), calls=%shaped", 2 * 48 * 256),
    "an update in a fusion of a fusion writes one layer": (
        "%r = f32[48,64]{1,0} fusion(%stack, %row, %i), calls=%rewrite",
        256 + 4 + 256,
    ),
    "several results": ("%r = (f32[64]{0}, bf16[64]{0}) fusion(%x), calls=%both", 256 + 256 + 128),
    "a slice outside a fusion": ("%r = f32[1,64]{1,0} dynamic-slice(%stack, %i)", 256 + 4 + 256),
    "an update outside a fusion": ("%r = f32[48,64]{1,0} dynamic-update-slice(%stack, %row, %i)", 256 + 4 + 256),
    "a kernel reads its arguments and writes its result": (
        '%r = f32[64]{0} custom-call(%x, %y), custom_call_target="tpu_custom_call"',
        3 * 256,
    ),
    "memory that is not written": ('%r = f32[64]{0} custom-call(), custom_call_target="AllocateBuffer"', 0),
    "names for what is there": ("%r = (f32[64]{0}, f32[64]{0}) tuple(%x, %y)", 0),
    "an order of instructions": ("%r = f32[64]{0} add-dependency(%x, %t)", 0),
    "the end of a copy": ("%r = f32[64]{0} copy-done(%x)", 0),
    "what goes to another slice is read": ("%r = (f32[64]{0}, u32[], token[]) send(%x, %t), channel_id=1", 256),
    "what comes from one is written": ("%r = (f32[64]{0}, u32[], token[]) recv(%t), channel_id=1", 256 + 4),
    "the end of it": ("%r = (f32[64]{0}, token[]) recv-done(%x), channel_id=1", 0),
    "a copy that goes on beside": ("%r = (f32[64]{0}, f32[64]{0}, u32[]) copy-start(%x)", 2 * 256 + 4),
}


@pytest.mark.parametrize(("line", "moved"), LINES.values(), ids=LINES)
def test_bytes_moved_by_an_instruction(line, moved):
    body = "\n  ".join([*GIVEN, f"ROOT {line}"])
    module = hlo.parse(f"HloModule m\n{INSIDE}\nENTRY %main (x: f32[64]) -> f32[64] {{\n  {body}\n}}\n")
    assert traffic(module, unknown_trips=1) == READ_Y + moved


def test_a_loop_moves_the_bytes_of_its_body_in_every_iteration():
    text = f"""HloModule m
{INSIDE}
%body (s: (s32[], f32[64])) -> (s32[], f32[64]) {{
  %s = (s32[], f32[64]) parameter(0)
  %v = f32[64]{{0}} get-tuple-element(%s), index=1
  %i = s32[] get-tuple-element(%s), index=0
  %r = f32[64]{{0}} fusion(%v, %v), calls=%sums
  ROOT %t = (s32[], f32[64]) tuple(%i, %r)
}}

%test (s: (s32[], f32[64])) -> pred[] {{
  ROOT %c = pred[] constant(true)
}}

ENTRY %main (x: (s32[], f32[64])) -> (s32[], f32[64]) {{
  %x = (s32[], f32[64]) parameter(0)
  ROOT %w = (s32[], f32[64]) while(%x), condition=%test, body=%body
}}
"""
    module = hlo.parse(text)
    assert [traffic(module, unknown_trips=trips) for trips in (0, 1, 5)] == [0, 768, 5 * 768]

"""Reading the text of compiled programs: loops, branches, bytes that collectives send."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from api import Collective, Program, chips, compile_program, hlo
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (requirements-tpu.txt)"
)
MESH = {"data": 2, "fsdp": 4}
SUM = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def program(*lines, computations=""):
    body = "\n".join(f"  {line}" for line in lines)
    return hlo.parse(f"HloModule m\n{SUM}{computations}\nENTRY %main (x: f32[8,16]) -> f32[8,16] {{\n{body}\n}}\n")


ROWS = "replica_groups={{0,1,2,3},{4,5,6,7}}"
COLUMNS = "replica_groups={{0,4},{1,5},{2,6},{3,7}}"
LINES = {
    "an all-gather sends all but one part of its result": (
        f"%g = bf16[8,16]{{1,0:T(8,128)(2,1)}} all-gather(%x), {ROWS}, dimensions={{0}}",
        ("all-gather", ("fsdp",), 4),
        256 * 3 // 4,
    ),
    "the start of one names its argument too": (
        f"%g = (f32[2,16]{{1,0}}, f32[8,16]{{1,0}}) all-gather-start(%x), {ROWS}, dimensions={{0}}",
        ("all-gather", ("fsdp",), 4),
        512 * 3 // 4,
    ),
    "an all-reduce gathers what it has scattered": (
        f"%r = f32[8,16]{{1,0}} all-reduce(%x), {COLUMNS}, to_apply=%add",
        ("all-reduce", ("data",), 2),
        2 * 512 // 2,
    ),
    "several arrays at once": (
        "%r = (f32[8]{0}, /*index=1*/bf16[8]{0}) all-reduce(%x, %y), replica_groups={}, to_apply=%add",
        ("all-reduce", ("data", "fsdp"), 8),
        2 * (32 + 16) * 7 // 8,
    ),
    "a reduce-scatter sends all but one part of its argument": (
        f"%s = f32[2,16]{{1,0}} reduce-scatter(%x), {ROWS}, dimensions={{0}}, to_apply=%add",
        ("reduce-scatter", ("fsdp",), 4),
        3 * 128,
    ),
    "an all-to-all keeps one part": (
        "%s = f32[8,16]{1,0} all-to-all(%x), replica_groups=[2,4]<=[8], dimensions={0}",
        ("all-to-all", ("fsdp",), 4),
        512 * 3 // 4,
    ),
    "a permutation sends everything": (
        "%p = f32[8,16]{1,0} collective-permute(%x), source_target_pairs={{0,0},{1,5},{5,1}}",
        ("collective-permute", ("data",), 2),
        512,
    ),
    "groups as a transposed array": (
        "%r = f32[8,16]{1,0} all-gather(%x), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}",
        ("all-gather", ("data",), 2),
        256,
    ),
    "groups as axes of a mesh": (
        "%r = f32[8,16]{1,0} all-gather(%x), replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}",
        ("all-gather", ("fsdp",), 4),
        512 * 3 // 4,
    ),
    "groups as axes of a mesh in another order": (
        "%r = f32[8,16]{1,0} all-gather(%x), replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}",
        ("all-gather", ("data",), 2),
        256,
    ),
    "an unknown notation of groups counts as the full mesh": (
        "%r = f32[8,16]{1,0} all-gather(%x), replica_groups=somehow, dimensions={0}",
        ("all-gather", hlo.UNKNOWN, 8),
        512 * 7 // 8,
    ),
}


@pytest.mark.parametrize(("line", "collective", "sent"), LINES.values(), ids=LINES)
def test_what_a_collective_sends(line, collective, sent):
    found = hlo.collectives(program(line), MESH, unknown_trips=1)
    assert found == {Collective(*collective): sent}


def send(type_, transfer):
    """A `send` between slices, as libtpu writes it."""
    said = f'frontend_attributes={{_xla_host_transfer_handler_name="xla_megascale_runtime"{transfer}}}'
    return f"%s = ({type_}, u32[], token[]) send(%x, %t), channel_id=2, is_host_transfer=true, {said}"


TRANSFERS = {"ALL_REDUCE": 2 * 512 * 2 // 3, "ALL_GATHER": 2 * 512, "REDUCE_SCATTER": 512 * 2 // 3}
TRANSFERS |= {"ALL_TO_ALL": 512 * 2 // 3, "ONE_TO_ONE": 512, "NEW_KIND": 512}


@pytest.mark.parametrize(("transfer", "sent"), TRANSFERS.items())
def test_bytes_sent_between_three_slices(transfer, sent):
    """The operand of a send, 512 bytes, is a device's own shard for a gather, and the full array for all others."""
    line = send("f32[8,16]{1,0:T(8,128)}", f',_xla_megascale_transfer_type="{transfer}"')
    ends = "%e = token[] send-done(%s), channel_id=2, is_host_transfer=true"
    found = hlo.collectives(program(line, ends), {"slice": 3, "fsdp": 4}, unknown_trips=1, slices=3)
    kind = "collective-permute" if transfer == "ONE_TO_ONE" else transfer.lower().replace("_", "-")
    assert found == {Collective(kind, ("slice",), 3, dcn=True): sent}


def test_transfers_to_the_host_do_not_count_as_sent():
    assert not hlo.collectives(program(send("f32[8]{0}", "")), {"slice": 2, "fsdp": 4}, unknown_trips=1, slices=2)


@pytest.mark.parametrize(
    ("groups", "axes", "size"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", ("fsdp",), 4),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("data",), 2),
        ("replica_groups={}", ("data", "fsdp"), 8),
        ("replica_groups={{0,1,8,9}}", hlo.UNKNOWN, 8),  # across slices, which does not occur
    ],
)
def test_groups_of_devices_are_within_a_slice(groups, axes, size):
    line = f"%g = f32[8]{{0}} all-gather(%x), {groups}, dimensions={{0}}"
    mesh = {"slice": 2, "data": 2, "fsdp": 4}
    found = hlo.collectives(program(line), mesh, unknown_trips=1, slices=2)
    assert found == {Collective("all-gather", axes, size): 32 * (size - 1) // size}


def test_the_end_of_an_asynchronous_collective_does_not_count_again():
    text = """
%inner (x: f32[8]) -> f32[8] {
  ROOT %r = f32[8]{0} all-to-all(%x), replica_groups={}, dimensions={0}
}
"""
    started = "%s = ((f32[8]), f32[8], u32[]) async-start(%x), calls=%inner"
    ended = "ROOT %e = f32[8]{0} async-done(%s), calls=%inner"
    found = hlo.collectives(program(started, ended, computations=text), MESH, unknown_trips=1)
    assert list(found.values()) == [32 * 7 // 8]


def test_a_collective_spread_over_fusions_counts_where_it_starts():
    """The TPU compiler repeats the collective in every fusion that does part of it."""
    shown = f"%g = f32[8]{{0}} all-gather(%x), {ROWS}, async_collective_fusion_config={{}}"
    text = f"""
%starting (x: f32[2]) -> f32[8] {{
  {shown}
  ROOT %c = f32[8]{{0}} custom-call(%g), custom_call_target="AsyncCollectiveStart"
}}

%going_on (x: f32[2]) -> f32[8] {{
  {shown}
  ROOT %c = f32[8]{{0}} custom-call(%g), custom_call_target="AsyncCollectiveDone"
}}
"""
    lines = ("%a = f32[8]{0} fusion(%x), calls=%starting", "ROOT %b = f32[8]{0} fusion(%a), calls=%going_on")
    found = hlo.collectives(program(*lines, computations=text), MESH, unknown_trips=1)
    assert found == {Collective("all-gather", ("fsdp",), 4): 24}


def loop(condition, attributes=""):
    text = f"""
%body (s: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {{
  ROOT %r = f32[8,16]{{1,0}} all-gather(%s), {ROWS}, dimensions={{0}}
}}

{condition}
"""
    line = f"ROOT %w = (s32[], f32[8,16]) while(%x), condition=%test, body=%body{attributes}"
    return program(line, computations=text)


PLAIN = """
%test (s: (s32[], f32[8,16])) -> pred[] {
  %limit = s32[]{:T(128)} constant(48)
  %i = s32[]{:T(128)} get-tuple-element(%s), index=0
  ROOT %c = pred[]{:T(512)} compare(%i, %limit), direction=LT
}
"""
FUSED = """
%inner (i: s32[], limit: s32[]) -> pred[] {
  %i = s32[] parameter(0)
  %limit = s32[] parameter(1)
  ROOT %c = pred[] compare(%i, %limit), direction=LT
}

%test (s: (s32[], f32[8,16])) -> pred[] {
  %i = s32[] get-tuple-element(%s), index=0
  %forty = s32[] constant(40)
  ROOT %f = pred[] fusion(%i, %forty), kind=kLoop, calls=%inner
}
"""
OPEN = """
%test (s: (s32[], f32[8,16])) -> pred[] {
  ROOT %c = pred[] get-tuple-element(%s), index=1
}
"""
KNOWN = ', backend_config={"known_trip_count":{"n":"7"}}'
LOOPS = {
    "a constant in its condition": (loop(PLAIN), 48),
    "a constant given to a fused condition": (loop(FUSED), 40),
    "a number beside it": (loop(OPEN, KNOWN), 7),
    "nothing": (loop(OPEN), None),
}


@pytest.mark.parametrize(("module", "times"), LOOPS.values(), ids=LOOPS)
def test_trip_counts(module, times):
    (found,) = hlo.collectives(module, MESH, unknown_trips=5).values()
    assert found == 384 * (5 if times is None else times)
    assert hlo.unknown_loops(module) == (times is None)


def test_the_most_expensive_branch_of_a_conditional_counts():
    text = """
%cheap (x: f32[8]) -> f32[8] {
  ROOT %a = f32[8]{0} all-gather(%x), replica_groups={}, dimensions={0}
}

%dear (x: f32[8]) -> f32[8] {
  ROOT %b = f32[80]{0} all-gather(%x), replica_groups={}, dimensions={0}
}
"""
    for branches in (
        "branch_computations={%cheap, %dear, %cheap}",
        "true_computation=%dear, false_computation=%cheap",
    ):
        line = f"ROOT %c = f32[8]{{0}} conditional(%p, %x, %x), {branches}"
        found = hlo.collectives(program(line, computations=text), MESH, unknown_trips=1)
        assert list(found.values()) == [320 * 7 // 8]


def test_the_fallback_for_rows_beyond_the_buffer_does_not_count():
    text = """
%usual (x: f32[8]) -> f32[8] {
  ROOT %a = f32[8]{0} fusion(%x), calls=%sends
}

%sends (x: f32[8]) -> f32[8] {
  ROOT %a = f32[8]{0} ragged-all-to-all(%x, %x, %i, %i, %i, %i), replica_groups={}
}

%around (x: f32[8]) -> f32[8] {
  ROOT %b = f32[80]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}
}
"""
    line = "ROOT %c = f32[8]{0} conditional(%p, %x, %x), branch_computations={%around, %usual}"
    found = hlo.collectives(program(line, computations=text), MESH, unknown_trips=1)
    assert found == {Collective("ragged-all-to-all", ("data", "fsdp"), 8): 28}


def test_a_ragged_all_to_all_sends_the_smaller_of_argument_and_buffer():
    lines = (
        "%x = f32[8]{0} parameter(0)",
        "%y = f32[80]{0} parameter(1)",
        "%a = f32[80]{0} ragged-all-to-all(%x, %y, %i, %i, %i, %i), replica_groups={}",
        "ROOT %b = f32[8]{0} ragged-all-to-all(%y, %x, %i, %i, %i, %i), replica_groups={}",
    )
    found = hlo.collectives(program(*lines), MESH, unknown_trips=1)
    assert found == {Collective("ragged-all-to-all", ("data", "fsdp"), 8): 2 * 28}


def test_unknown_loops_lists_outer_loops_only():
    text = """
%test (x: s32[]) -> pred[] {
  ROOT %p = pred[] parameter(0)
}

%inner (x: s32[]) -> s32[] {
  ROOT %x = s32[] parameter(0)
}

%outer (x: s32[]) -> s32[] {
  ROOT %w = s32[] while(%x), condition=%test, body=%inner
}
"""
    lines = (
        "%w = s32[] while(%x), condition=%test, body=%outer",
        "ROOT %v = s32[] while(%w), condition=%test, body=%inner",
    )
    assert hlo.unknown_loops(program(*lines, computations=text)) == 2


@pytest.mark.parametrize(
    ("type_", "sizes"),
    [
        ("f32[]", [4]),
        ("(bf16[2,3]{1,0:T(8,128)(2,1)}, pred[8]{0}, s32[0])", [12, 8, 0]),
        ("f8e4m3fn[16]", [16]),
        ("s4[3]", [2]),
    ],
)
def test_bytes_of_a_type(type_, sizes):
    assert [buffer.size for buffer in hlo.parse_type(type_)] == sizes


def test_a_text_without_an_entry_is_rejected():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parse("HloModule m\n")


def test_a_program_compiled_here():
    """A scan of known collectives on 8 devices: each is found with its axes and bytes, once per iteration."""
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"))

    def once(x, _):
        whole = jax.lax.all_gather(x, "fsdp", tiled=True)  # [4, 16] -> [16, 16]
        part = jax.lax.psum_scatter(jnp.sin(whole), "data", tiled=True)  # -> [8, 16]
        return jax.lax.ppermute(x + part[:4], "fsdp", [(i, (i + 1) % 4) for i in range(4)]), None

    def run(x):
        return jax.lax.scan(once, x, None, length=3)[0]

    spec = P(("data", "fsdp"))
    x = jax.ShapeDtypeStruct((32, 16), jnp.float32, sharding=NamedSharding(mesh, spec))
    mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    found = hlo.collectives(hlo.parse(mapped.lower(x).compile().as_text()), MESH, unknown_trips=0)
    assert found == {
        Collective("all-gather", ("fsdp",), 4): 3 * 1024 * 3 // 4,
        Collective("reduce-scatter", ("data",), 2): 3 * 1024 // 2,
        Collective("collective-permute", ("fsdp",), 2): 3 * 256,
    }


@needs_libtpu
def test_collectives_over_slices_as_libtpu_writes_them():
    """A sum over all axes is scattered in the slice, summed between slices and gathered again; one over `slice` alone
    moves a device's full array; a gather first sends the device's shard to the other slice."""
    mesh = jax.sharding.Mesh(
        np.array(chips.describe_devices(chips.parse_topology("2xv5e:2x2"))).reshape(2, 4), ("slice", "fsdp")
    )
    spec = P(("slice", "fsdp"))
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=NamedSharding(mesh, spec))
    part = 128 * 1024 * 4

    def found(function, out):
        mapped = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=out, check_vma=False))
        compiled = compile_program(Program(name="", lower=lambda: mapped.lower(x), resident=0))
        return hlo.collectives(hlo.parse(compiled.text), dict(mesh.shape), unknown_trips=1, slices=2)

    assert found(lambda x: jax.lax.psum(x, "slice"), spec) == {Collective("all-reduce", ("slice",), 2, dcn=True): part}
    assert found(lambda x: jax.lax.psum(x, ("slice", "fsdp")), P()) == {
        Collective("reduce-scatter", ("fsdp",), 4): part * 3 // 4,
        Collective("all-reduce", ("slice",), 2, dcn=True): part // 4,
        Collective("all-gather", ("fsdp",), 4): part * 3 // 4,
    }
    assert found(lambda x: jax.lax.all_gather(x, ("slice", "fsdp"), tiled=True), P()) == {
        Collective("all-gather", ("slice",), 2, dcn=True): part,
        Collective("all-gather", ("fsdp",), 4): 2 * part * 3,
    }
    assert found(lambda x: jax.lax.all_to_all(x, "slice", 0, 0, tiled=True), spec) == {
        Collective("all-to-all", ("slice",), 2, dcn=True): part // 2
    }
    assert found(lambda x: jax.lax.ppermute(x, "slice", [(0, 1), (1, 0)]), spec) == {
        Collective("collective-permute", ("slice",), 2, dcn=True): part
    }

"""Where arrays live: one mesh, one table from logical axes to mesh axes. One device is a mesh of size 1."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gspax import config, unstable
from gspax.config import ModelConfig
from gspax.errors import UserError

AXES = ("slice", "data", "fsdp", "expert", "context", "tensor")  # outermost first: neighbours share the innermost

RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("slice", "data", "fsdp", "expert"),  # rows of a batch, prompts of the sampler
    "time": "context",  # positions of a row
    "sample": ("slice", "data", "fsdp", "expert", "context"),  # rows while they grow by one position, not to be split
    "embed": ("fsdp", "expert"),  # the model dimension of parameters; gathered where a layer uses them
    "expert": "expert",
    "expert_embed": "fsdp",  # the same of an expert's matrices, whose axis expert is taken
    "heads": "tensor",  # of queries, of keys and values
    "mlp": "tensor",
    "vocab": "tensor",
    "router": None,  # a router's columns: every device routes its own rows
    "layer": None,
    "head": None,
    "norm": None,
    "rank": None,
}

ONES = config.Mesh(fsdp=1)
LARGEST_EXPERT_AXIS = 8  # a side of a TPU's torus; on it tokens go round at full speed
BREAK_EVEN_TOKENS = 4096  # on one device in one pass: more than this is rare, decoding has far fewer


def spec(*axes: str) -> PartitionSpec:
    """The mesh axes of an array with these logical axes.

    UserError for a name that the table does not have (not a silent replica), and for two that need one mesh axis.
    """
    unknown = [axis for axis in axes if axis not in RULES]
    if unknown:
        raise UserError(f"sharding: wanted logical axes out of {', '.join(RULES)}, got {unknown[0]!r}")
    used = [name for axis in axes for name in mesh_axes(axis)]
    twice = [name for name in used if used.count(name) > 1]
    if twice:
        raise UserError(f"sharding: wanted each mesh axis once in an array, got {twice[0]!r} twice in {axes}")
    return PartitionSpec(*(RULES[axis] for axis in axes))


def token_spec(mesh: jax.sharding.Mesh, rows: int, length: int) -> PartitionSpec:
    """Of arrays `[rows, length, ...]`: positions are split where the axis divides them; of single ones the rows are."""
    if length % mesh.shape["context"] == 0:
        return spec("batch", "time")
    return spec(sample_axis(mesh, rows) if length == 1 else "batch")


def sample_axis(mesh: jax.sharding.Mesh | None, rows: int) -> str:
    """The logical axis of so many rows that grow by one position at a time: "sample" where that divides them."""
    return "batch" if mesh is None or rows % (batch_shards(mesh) * mesh.shape["context"]) else "sample"


def constrain_tokens(x_BT: jax.Array, mesh: jax.sharding.Mesh | None) -> jax.Array:
    """`x [rows, length, ...]` inside a jitted function, split as `token_spec` says, whatever the compiler would do."""
    if mesh is None:
        return x_BT
    return jax.lax.with_sharding_constraint(x_BT, NamedSharding(mesh, token_spec(mesh, *x_BT.shape[:2])))


def mesh_shape(mesh: config.Mesh, devices: int, model: ModelConfig | None = None, *, slices: int = 1) -> dict[str, int]:
    """Axis sizes, in the order of `AXES`, with 0 and -1 filled in.

    UserError if they do not multiply to the number of devices or do not fit `slices`, the TPU slices that these are.
    """
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    sizes["slice"] = sizes["slice"] or slices
    if slices not in (1, sizes["slice"]):
        raise UserError(f"mesh.slice: wanted the {slices} TPU slices at hand, got {mesh.slice}")
    free = [axis for axis, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size > 0)
    if sizes["expert"] == 0:
        sizes["expert"] = expert_axis(model, devices // known) if free and devices % known == 0 else 1
        known *= sizes["expert"]
    if len(free) == 1 and devices % known == 0:
        sizes[free[0]] = devices // known
    if min(sizes.values()) < 1 or math.prod(sizes.values()) != devices:
        given = ", ".join(f"{axis}={size}" for axis in AXES if (size := getattr(mesh, axis)) != getattr(ONES, axis))
        raise UserError(
            f"mesh: the axes must multiply to the {devices} devices at hand (at most one may be -1); "
            f"got {given or 'all of size 1'}"
        )
    return sizes


def expert_axis(model: ModelConfig | None, devices: int) -> int:
    """The size of the expert axis when it is left to gspax: what `explain` says, or 1."""
    if model is None or break_even(model) < BREAK_EVEN_TOKENS:
        return 1
    common = math.gcd(model.num_experts, devices)
    return max(size for size in range(1, LARGEST_EXPERT_AXIS + 1) if common % size == 0)


def break_even(model: ModelConfig) -> int:
    """With fewer tokens than this on a device it is cheaper to send them to the experts than to fetch the experts.

    Per layer the three matrices of E experts are 3 E D F numbers; n tokens sent to A experts and back are 2 n A D.
    """
    return 3 * model.num_experts * model.moe_intermediate_size // (2 * max(model.num_experts_per_tok, 1))


def explain_mesh(mesh: config.Mesh, sizes: dict[str, int], model: ModelConfig) -> str:
    """One line: why the mesh of these sizes is as it is."""
    if all(getattr(mesh, axis) not in (0, -1) for axis in AXES):
        return "as given"
    if math.prod(sizes.values()) == 1:
        return "one device"
    if mesh.expert or not model.num_experts:
        return "parameters and rows split over the devices that are left"
    tokens = break_even(model)
    if sizes["expert"] > 1:
        return f"expert: below {tokens:,} tokens on a device it is cheaper to send them than to gather the experts"
    if tokens < BREAK_EVEN_TOKENS:
        return f"no expert axis: gathering the experts is cheaper from {tokens:,} tokens on a device"
    return "no expert axis: the experts do not divide over the devices that are left"


def mismatches(sizes: dict[str, int], model: ModelConfig) -> Iterator[str]:
    """One sentence for each dimension of the parameters that the mesh does not divide."""
    dimensions = {
        "hidden_size": "embed",
        "num_key_value_heads": "heads",  # which divide the query heads
        "vocab_size": "vocab",
        "intermediate_size": "mlp",
        "num_experts": "expert",
        "moe_intermediate_size": "mlp",
    }
    for name, axis in dimensions.items():
        size, parts = getattr(model, name), math.prod(sizes[each] for each in mesh_axes(axis))
        if size % parts:
            over = " x ".join(f"mesh.{each}" for each in mesh_axes(axis) if sizes[each] > 1)
            yield f"model.{name}: wanted a multiple of {over} ({parts}), got {size}"
    if sizes["expert"] > 1 and not model.num_experts:
        yield f"mesh.expert: wanted 1 for a model without experts, got {sizes['expert']}"


def make_mesh(
    mesh: config.Mesh, devices: Sequence[jax.Device] | None = None, model: ModelConfig | None = None
) -> jax.sharding.Mesh:
    """The device mesh, with the axes `AXES`, which the compiler partitions by itself (`AxisType.Auto`).

    On TPUs the axes are laid along the torus, and slices, which a slower network joins, lie along `slice`.

    Args:
      mesh: the sizes asked for.
      devices: all there are, unless given.
      model: what the size of the expert axis is chosen by, where that is left open.
    """
    found = jax.devices() if devices is None else list(devices)
    slices = by_slice(found)
    sizes = mesh_shape(mesh, len(found), model, slices=len(slices))
    shape = (sizes["slice"] // len(slices), *list(sizes.values())[1:])
    parts = [_grid(each, shape) for each in slices]
    return jax.sharding.Mesh(np.concatenate(parts), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def by_slice(devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
    """The devices of each TPU slice; other devices are all in one."""
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        number = getattr(device, "slice_index", None) if device.platform == "tpu" else None
        slices.setdefault(number or 0, []).append(device)
    return list(slices.values())


def _grid(devices: list[jax.Device], shape: tuple[int, ...]) -> np.ndarray:
    if devices[0].platform == "tpu":
        try:
            return unstable.create_device_mesh(shape, devices)
        except (AssertionError, NotImplementedError, ValueError):
            pass  # a part of a slice is no torus
    return np.array(devices).reshape(shape)


def named_sharding(mesh: jax.sharding.Mesh, *axes: str) -> NamedSharding:
    """`spec(*axes)` on this mesh; without axes, replicated."""
    return NamedSharding(mesh, spec(*axes))


def constrain(x: jax.Array, mesh: jax.sharding.Mesh | None, *axes: str) -> jax.Array:
    """x inside a jitted function, split over its logical axes as the table says; without a mesh just x."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, named_sharding(mesh, *axes))


def batch_shards(mesh: jax.sharding.Mesh | dict[str, int]) -> int:
    """Into how many parts the rows of a batch are split, on a mesh or with axes of these sizes."""
    sizes = mesh if isinstance(mesh, dict) else mesh.shape
    return math.prod(sizes[axis] for axis in mesh_axes("batch"))


def mesh_axes(axis: str) -> tuple[str, ...]:
    """The mesh axes that a logical axis is split over."""
    rule = RULES[axis]
    return (rule,) if isinstance(rule, str) else rule or ()

"""Defines one device mesh, and one table from the logical axes of all arrays to its axes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gspax import config, unstable
from gspax.config import ModelConfig
from gspax.errors import UserError

# outermost first: neighboring devices share the innermost
AXES = ("slice", "data", "fsdp", "expert", "context", "tensor")

Rules: TypeAlias = dict[str, str | tuple[str, ...] | None]
RULES: Rules = {
    "batch": ("slice", "data", "fsdp", "expert"),  # rows of a batch, prompts of the sampler
    "time": "context",  # positions of a row
    # rows in decoding steps, whose single position cannot be sharded
    "sample": ("slice", "data", "fsdp", "expert", "context"),
    "embed": ("fsdp", "expert"),  # the model dimension of parameters; gathered where a layer uses them
    "expert": "expert",
    "expert_embed": "fsdp",  # the model dimension of expert matrices, which already use the axis expert
    "heads": "tensor",  # of queries, of keys and values
    "mlp": "tensor",
    "vocab": "tensor",
    "router": None,  # columns of the router: every device routes its own rows
    "layer": None,
    "head": None,
    "norm": None,
    "group": None,  # value heads of a key head
    "tap": None,  # of a convolution
    "rate": None,  # of decay
    "rank": None,
}

PARAMETER_AXES = ("embed", "expert", "expert_embed", "heads", "mlp", "vocab")

# Inference weights are replicated but for experts, heads and vocabulary, so that no token gathers a weight, unless
# memory is short and `fsdp` is used (`sampler_layouts`).
INFERENCE_RULES = RULES | {"embed": "fsdp"}

ONES = config.Mesh(fsdp=1)
LARGEST_EXPERT_AXIS = 8  # at most one dimension of a TPU's torus, where tokens are exchanged at full speed
BREAK_EVEN_TOKENS = 4096  # per device and pass: a pass rarely has more tokens, and decoding has far fewer


def spec(*axes: str, rules: Rules = RULES) -> PartitionSpec:
    """Return the mesh axes of an array with these logical axes.

    UserError for an axis that is not in the table (rather than silent replication), and for two logical axes that use
    the same mesh axis.
    """
    unknown = [axis for axis in axes if axis not in RULES]
    if unknown:
        raise UserError(f"sharding: wanted logical axes out of {', '.join(RULES)}, got {unknown[0]!r}")
    used = [name for axis in axes for name in _as_tuple(rules[axis])]
    twice = [name for name in used if used.count(name) > 1]
    if twice:
        raise UserError(f"sharding: wanted each mesh axis once in an array, got {twice[0]!r} twice in {axes}")
    return PartitionSpec(*(rules[axis] for axis in axes))


def token_spec(mesh: jax.sharding.Mesh, rows: int, length: int) -> PartitionSpec:
    """Return the spec of `[rows, length, ...]`: time is sharded where `context` divides it, or rows if length is 1."""
    if length % mesh.shape["context"] == 0:
        return PartitionSpec(own_axes(mesh, "batch"), mesh_axes("time"))
    return PartitionSpec(own_axes(mesh, sample_axis(mesh, rows) if length == 1 else "batch"))


def sample_axis(mesh: jax.sharding.Mesh, rows: int) -> str:
    """Return the logical axis of this number of rows in decoding: "sample" if it divides them, else "batch"."""
    return "batch" if rows % (batch_shards(mesh) * mesh.shape["context"]) else "sample"


def constrain_tokens(x_BT: jax.Array, mesh: jax.sharding.Mesh) -> jax.Array:
    """Constrain `x [rows, length, ...]` inside a jitted function to `token_spec`."""
    return jax.lax.with_sharding_constraint(x_BT, NamedSharding(mesh, token_spec(mesh, *x_BT.shape[:2])))


def resolve_axes(
    mesh: config.Mesh, devices: int, model: ModelConfig | None = None, *, slices: int = 1
) -> dict[str, int]:
    """Return axis sizes in the order of `AXES`, with 0 and -1 resolved.

    UserError if their product is not the number of devices or they do not fit `slices`, the number of TPU slices.
    """
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    sizes["slice"] = sizes["slice"] or slices
    if slices not in (1, sizes["slice"]):
        raise UserError(f"mesh.slice: wanted the {slices} available TPU slices, got {mesh.slice}")
    free = [axis for axis, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size > 0)
    if sizes["expert"] == 0:
        sizes["expert"] = choose_expert_axis(model, devices // known) if free and devices % known == 0 else 1
        known *= sizes["expert"]
    if len(free) == 1 and devices % known == 0:
        sizes[free[0]] = devices // known
    if min(sizes.values()) < 1 or math.prod(sizes.values()) != devices:
        changed = ", ".join(f"{axis}={size}" for axis in AXES if (size := getattr(mesh, axis)) != getattr(ONES, axis))
        raise UserError(
            f"mesh: wanted axes whose product is the {devices} available devices (at most one may be -1), "
            f"got {changed or 'all of size 1'}"
        )
    return sizes


def choose_expert_axis(model: ModelConfig | None, devices: int) -> int:
    """Choose the size of the expert axis if the experiment leaves it open; `explain_mesh` gives the reason."""
    if model is None or break_even_tokens(model) < BREAK_EVEN_TOKENS:
        return 1
    common = math.gcd(model.num_experts, devices)
    return max(size for size in range(1, LARGEST_EXPERT_AXIS + 1) if common % size == 0)


def break_even_tokens(model: ModelConfig) -> int:
    """Return the tokens per device below which sending them to the experts is cheaper than gathering the experts.

    Per layer, the three matrices of E experts are 3 E D F elements; n tokens sent to A experts and back are 2 n A D.
    """
    return 3 * model.num_experts * model.moe_intermediate_size // (2 * max(model.num_experts_per_tok, 1))


def explain_mesh(mesh: config.Mesh, sizes: dict[str, int], model: ModelConfig) -> str:
    """Return one line with the reason for these axis sizes."""
    if all(getattr(mesh, axis) not in (0, -1) for axis in AXES):
        return "as given"
    if math.prod(sizes.values()) == 1:
        return "one device"
    if mesh.expert or not model.num_experts:
        return "parameters and rows sharded over the remaining devices"
    tokens = break_even_tokens(model)
    if sizes["expert"] > 1:
        return f"expert: below {tokens:,} tokens on a device, sending them is cheaper than gathering the experts"
    if tokens < BREAK_EVEN_TOKENS:
        return f"no expert axis: from {tokens:,} tokens on a device, gathering the experts is cheaper"
    return f"no expert axis: no size up to {LARGEST_EXPERT_AXIS} divides the experts and the remaining devices"


def sampler_layouts(sizes: dict[str, int], model: ModelConfig, rows: int) -> Iterator[dict[str, int]]:
    """Yield axis sizes for sampling on devices with axes of these sizes; each layout needs less memory than the last.

    Rows are sharded over all devices, experts over as many as hold whole experts. Everything else is replicated, and
    read once for each token. Then heads, widths and vocabulary are sharded over more and more of `tensor`, which splits
    experts too. The last layout is the given one, where every token gathers its weights.

    Args:
      rows: a multiple of the number of devices with different rows: the rows of a rollout, and slots.
    """
    devices = math.prod(sizes.values()) // sizes["slice"]
    heads = math.gcd(*(each.size for each in _dimensions(model) if each.axis == "heads"))
    for tensor in range(1, heads + 1):
        if heads % tensor or devices % tensor:
            continue
        expert = math.gcd(model.num_experts, devices // tensor) if model.num_experts else 1
        layout = dict.fromkeys(AXES, 1) | {"slice": sizes["slice"], "expert": expert, "tensor": tensor}
        layout["data"] = devices // tensor // expert
        if rows % batch_shards(layout) == 0 and not list(find_mismatches(layout, model)):
            yield layout
    yield sizes


def reshape_mesh(mesh: jax.sharding.Mesh, sizes: dict[str, int]) -> jax.sharding.Mesh:
    """Reshape a mesh, with its devices in their order, to axes of these sizes."""
    if dict(mesh.shape) == sizes:
        return mesh
    return jax.sharding.Mesh(mesh.devices.reshape(tuple(sizes.values())), AXES, axis_types=mesh.axis_types)


def find_mismatches(sizes: dict[str, int], model: ModelConfig) -> Iterator[str]:
    """Yield one sentence for each dimension of the parameters that the mesh does not divide evenly."""
    for name, size, axis in _dimensions(model):
        parts = math.prod(sizes[each] for each in mesh_axes(axis))
        if size % parts:
            over = " x ".join(f"mesh.{each}" for each in mesh_axes(axis) if sizes[each] > 1)
            yield f"model.{name}: wanted a multiple of {over} ({parts}), got {size}"
    if sizes["context"] > 1 and (found := config.obstacle(model, config.Feature.CONTEXT_PARALLEL)):
        yield f"mesh.context: wanted 1 in a model with {found}, got {sizes['context']}"
    if sizes["expert"] > 1 and not model.num_experts:
        yield f"mesh.expert: wanted 1 for a model without experts, got {sizes['expert']}"


def _dimensions(model: ModelConfig) -> list[config.Dimension]:
    """Return the dimensions of the parameters that a mesh shards, each once."""
    outer = ("hidden_size", model.hidden_size, "embed"), ("vocab_size", model.vocab_size, "vocab")
    inner = (
        each for layer in config.layers_of(model) for kind in (layer.mixer, layer.mlp) for each in kind.dimensions()
    )
    return list(dict.fromkeys((*map(config.Dimension._make, outer), *inner)))


def make_mesh(
    mesh: config.Mesh, devices: Sequence[jax.Device] | None = None, model: ModelConfig | None = None
) -> jax.sharding.Mesh:
    """Make the device mesh with the axes `AXES`, over which the compiler partitions automatically (`AxisType.Auto`).

    On TPU the axes follow the torus; slices, which a slower network connects, are along `slice`.

    Args:
      mesh: the sizes in the experiment.
      devices: default: all.
      model: determines the size of the expert axis if the experiment leaves it open, and has to fit the axes.

    Raises:
      UserError: the axes do not fit the devices, or the model does not fit the axes.
    """
    chosen = jax.devices() if devices is None else list(devices)
    slices = group_by_slice(chosen)
    sizes = resolve_axes(mesh, len(chosen), model, slices=len(slices))
    if model is not None and (misfits := list(find_mismatches(sizes, model))):
        raise UserError("\n".join(misfits))
    shape = (sizes["slice"] // len(slices), *list(sizes.values())[1:])
    grids = [_make_grid(each, shape) for each in slices]
    return jax.sharding.Mesh(np.concatenate(grids), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def split_devices(
    devices: Sequence[jax.Device], placement: config.Placement | None
) -> tuple[Sequence[jax.Device], Sequence[jax.Device]]:
    """Return the learner's devices, which come first, and those of a disaggregated sampler."""
    count = len(devices) - (placement.devices if placement is not None else 0)
    return devices[:count], devices[count:]


def single_device_mesh() -> jax.sharding.Mesh:
    """Make a mesh of the first device alone."""
    return make_mesh(ONES, jax.devices()[:1])


def platform(mesh: jax.sharding.Mesh) -> str:
    """Return the platform of a mesh's devices, which need not be this host's: "cpu", "gpu", or "tpu"."""
    return str(mesh.devices.flat[0].platform)


def group_by_slice(devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
    """Group devices by TPU slice; devices of other kinds form one slice."""
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        number = getattr(device, "slice_index", None) if device.platform == "tpu" else None
        slices.setdefault(number or 0, []).append(device)
    return list(slices.values())


def _make_grid(devices: list[jax.Device], shape: tuple[int, ...]) -> np.ndarray:
    """Arrange the devices of one slice in this shape, along the torus on TPU."""
    if devices[0].platform != "tpu":
        return np.array(devices).reshape(shape)
    if not _fill_box(devices):
        warnings.warn(
            f"mesh: {len(devices)} TPU devices do not fill a box of their slice, so that mesh axes do not follow the "
            "torus and collectives are slower",
            stacklevel=2,
        )
        return np.array(devices).reshape(shape)
    return unstable.create_device_mesh(shape, devices)


def _fill_box(devices: Sequence[jax.Device]) -> bool:
    """Return whether the devices fill a box of the torus, as `create_device_mesh` requires."""
    places = np.array([(*device.coords, device.core_on_chip) for device in devices])
    return math.prod((places.max(axis=0) - places.min(axis=0) + 1).tolist()) == len(devices)


def named_sharding(mesh: jax.sharding.Mesh, *axes: str, rules: Rules = RULES) -> NamedSharding:
    """Return `spec(*axes)` on this mesh; without axes, replicated.

    Mesh axes of size 1 are left out, as in the shardings of a compiled program's results: jax compares shardings as
    they are written, and would compile a step again for a state that it returned itself.
    """
    large = [
        tuple(name for name in names if mesh.shape[name] > 1 and name not in mesh.manual_axes)
        for names in map(_as_tuple, spec(*axes, rules=rules))
    ]
    while large and not large[-1]:
        large.pop()
    return NamedSharding(mesh, PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in large)))


def _as_tuple(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names or ()


def constrain(x: jax.Array, mesh: jax.sharding.Mesh, *axes: str) -> jax.Array:
    """Constrain x inside a jitted function to its logical axes."""
    return jax.lax.with_sharding_constraint(x, named_sharding(mesh, *axes))


def batch_shards(mesh: jax.sharding.Mesh | dict[str, int]) -> int:
    """Return the number of shards of a batch's rows, on a mesh or with axes of these sizes."""
    sizes = mesh if isinstance(mesh, dict) else axis_sizes(mesh)
    return math.prod(sizes[axis] for axis in mesh_axes("batch"))


def mesh_axes(axis: str) -> tuple[str, ...]:
    """Return the mesh axes that a logical axis is sharded over."""
    return _as_tuple(RULES[axis])


def replica_axes(mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    """Return the mesh axes of size 2 or more over which rows are sharded and every parameter is replicated."""
    sharded = {axis for logical in PARAMETER_AXES for axis in mesh_axes(logical)}
    return tuple(axis for axis in mesh_axes("batch") if mesh.shape[axis] > 1 and axis not in sharded)


def within_replica(mesh: jax.sharding.Mesh, axes: tuple[str, ...]) -> jax.sharding.Mesh:
    """Return the mesh for code inside a `jax.shard_map` over these axes, where arrays are local along them.

    The functions of this module leave these axes of the mesh out.
    """
    types = [AxisType.Manual if name in axes else type_ for name, type_ in zip(AXES, mesh.axis_types, strict=True)]
    return jax.sharding.Mesh(mesh.devices, AXES, axis_types=tuple(types))


def own_axes(mesh: jax.sharding.Mesh, axis: str) -> tuple[str, ...]:
    """Return `mesh_axes` without the axes of a surrounding `within_replica`."""
    return tuple(name for name in mesh_axes(axis) if name not in mesh.manual_axes)


def axis_sizes(mesh: jax.sharding.Mesh) -> dict[str, int]:
    """Return the number of devices along each axis; 1 for the axes of a surrounding `within_replica`."""
    return {name: 1 if name in mesh.manual_axes else size for name, size in mesh.shape.items()}

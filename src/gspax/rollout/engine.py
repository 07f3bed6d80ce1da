"""The decoding loop: slots that draw one token each at a time, and take the next sample when theirs has ended.

`start` prefills all prompts once and draws the first token of every sample; `advance` decodes until no sample is left;
`admit` puts new groups in the places of others, while the rest is being drawn. The samples that wait are a queue of
indices on the devices, so the loop runs without the host. On a mesh a device's slots take samples of the device's own
rows, so that no cache is moved.

With a slot for every sample nobody waits: slot b has sample b, all slots are at one position, and a prompt's cache is
read once for all its samples. With fewer, or where groups are admitted, each slot has a position of its own.

Axes: P prompts, G samples per prompt, B = P·G samples, W slots, Q devices that have rows of their own, S prompt
positions, C completion positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gspax.config import ModelConfig, Sampling, expert_id_dtype
from gspax.experiment.memory import count_slots, prefill_chunk
from gspax.model import decoding
from gspax.model.decoding import Cache
from gspax.rollout.drawing import draw_at, is_stop
from gspax.rollout.slots import Drawn, Rows, describe_slots, empty_queue, fill, settle
from gspax.sharding import AXES, batch_shards, constrain, sample_axis, spec
from gspax.types import Array, Params

NARROWEST = 4  # slots; fewer save nothing


class Settings(NamedTuple):
    """What is fixed when the loop is compiled."""

    config: ModelConfig
    sampling: Sampling
    stop_ids: tuple[int, ...]
    mesh: jax.sharding.Mesh | None
    keep_experts: bool = False  # record the chosen experts
    keep_versions: bool = False  # record the version of the weights that drew each token
    greedy: int = 0  # of each prompt's samples, the last so many are decoded greedily
    admits: bool = False  # groups are put in the places of others (`admit`)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class State:
    """The loop's state between two tokens."""

    rows: Rows
    step: Array  # int32    decoding passes so far
    cache: Cache
    prompt_expert_PSLA: Array | None  # as `Rows.expert_BCLA`


def start(
    params: Params,
    tokens_PS: Array,
    length_P: Array,
    id_P: Array,
    key: Array,
    settings: Settings,
) -> State:
    """Prefill the prompts, draw the first token of every sample, and fill the slots.

    Args:
      id_P: of each prompt's first sample; its others have the ids after it.
    """
    state = _draw_first(params, tokens_PS, length_P, id_P, key, settings)
    if state.rows.queue is None:
        return state
    fresh_B = jnp.ones(state.rows.length_B.shape, bool)
    return replace(state, rows=_on_devices(fill, settings, state.rows)(state.rows, fresh_B))


def admit(
    params: Params,
    before: State | None,
    prompts: tuple[Array, Array, Array],
    key: Array,
    settings: Settings,
    *,
    fresh_P: Array,
    version: Array | int,
) -> State:
    """`start` for some of the P places of groups; their samples are queued behind those that wait.

    Every place is prefilled, though only the fresh ones are read: a group stays on the devices of its place, and how
    many places of a device are fresh is not known when this is compiled.

    Args:
      before: the state whose other places are kept; None: they are empty.
      prompts: `tokens_PS`, `length_P` and `id_P`, as for `start`.
      settings: with `admits`.
      fresh_P: bool, the places to take; those of `before` must hold groups that have ended.
      version: of the parameters, which draw the first tokens.
    """
    new = _draw_first(params, *prompts, key, settings, version=version)
    fresh_B = jnp.repeat(fresh_P, new.rows.length_B.shape[0] // fresh_P.shape[0])
    if before is None:
        state = replace(new, rows=replace(new.rows, finished_B=new.rows.finished_B | ~fresh_B))
    else:
        samples = [each.name for each in fields(Rows) if each.name not in ("queue", "token_W", "drawn_W", "live_W")]
        rows = replace(
            before.rows,
            **{name: _choose(fresh_B, getattr(new.rows, name), getattr(before.rows, name)) for name in samples},
        )
        caches = _choose(fresh_P, [each.prompt for each in new.cache], [each.prompt for each in before.cache])
        cache = tuple(each._replace(prompt=own) for each, own in zip(before.cache, caches, strict=True))
        expert_PSLA = _choose(fresh_P, new.prompt_expert_PSLA, before.prompt_expert_PSLA)
        state = replace(before, rows=rows, cache=cache, prompt_expert_PSLA=expert_PSLA)
    return replace(state, rows=_on_devices(fill, settings, state.rows)(state.rows, fresh_B))


def prefill(
    params: Params, tokens_PS: Array, length_P: Array, settings: Settings
) -> tuple[Array, decoding.PromptCache, Array]:
    """`decoding.prefill` in the chunks and with the cache of the settings."""
    config, sampling, mesh = settings.config, replace(settings.sampling, prompts=len(length_P)), settings.mesh
    chunk = prefill_chunk(config, sampling, _axis_sizes(mesh))
    dtype = sampling.kv_cache_dtype
    return decoding.prefill(params, config, tokens_PS, length_P, chunk=chunk, kv_cache_dtype=dtype, mesh=mesh)


def _choose(fresh_X: Array, new: Any, old: Any) -> Any:
    """The fresh rows of the arrays of a tree, and the others of an older one."""
    return jax.tree.map(lambda x, y: jnp.where(fresh_X.reshape(-1, *[1] * (x.ndim - 1)), x, y), new, old)


def _draw_first(
    params: Params,
    tokens_PS: Array,
    length_P: Array,
    id_P: Array,
    key: Array,
    settings: Settings,
    *,
    version: Array | int = 0,
) -> State:
    """The prefilled prompts and the first token of every sample; only a sample with a slot of its own is in it."""
    config, sampling, stop_ids, mesh = settings[:4]
    P, G, C = tokens_PS.shape[0], sampling.group, sampling.max_tokens
    B = P * G
    W = _count_slots(config, sampling, P, mesh)
    queued = W < B or settings.admits
    with jax.named_scope("prefill"):
        last_PD, prompts, expert_PSLA = prefill(params, tokens_PS, length_P, settings)
    number_B = jnp.tile(jnp.arange(G, dtype=jnp.uint32), P)  # of a prompt's samples
    id_B = jnp.repeat(id_P, G) + number_B
    greedy_B = number_B >= G - settings.greedy if settings.greedy else None
    prompt_length_B = jnp.repeat(length_P, G)
    logits_BV = jnp.repeat(decoding.logits(params, last_PD), G, axis=0)
    token_B, logp_B = draw_at(logits_BV, key, id_B, prompt_length_B, sampling, greedy_B)
    stops_B = is_stop(token_B, stop_ids)
    kept_PSLA = expert_PSLA.astype(expert_id_dtype(config)) if settings.keep_experts else None

    def first(x_B: Array) -> Array:
        return jnp.zeros((B, C), x_B.dtype).at[:, 0].set(x_B)

    rows = Rows(
        prompt_B=jnp.arange(B, dtype=jnp.int32) // G % (P if mesh is None else P // batch_shards(mesh)),
        prompt_length_B=prompt_length_B,
        id_B=id_B,
        greedy_B=greedy_B,
        tokens_BC=first(token_B),
        logp_BC=first(logp_B),
        length_B=jnp.ones(B, jnp.int32),
        finished_B=stops_B,
        expert_BCLA=None
        if kept_PSLA is None
        else jnp.full((B, C, *kept_PSLA.shape[2:]), config.num_experts, kept_PSLA.dtype),
        version_BC=first(jnp.full(B, version, jnp.int32)) if settings.keep_versions else None,
        queue=empty_queue(B, W, _row_shards(mesh, B, W)) if queued else None,
        token_W=token_B[:W],
        drawn_W=jnp.ones(W, jnp.int32),
        live_W=jnp.zeros(W, bool) if queued else ~stops_B & (C > 1),
    )
    rows = jax.tree.map(lambda leaf: constrain(leaf, mesh, _row_axis(mesh, B, W)), rows)
    cache = decoding.new_cache(prompts, config, W, C, kv_cache_dtype=sampling.kv_cache_dtype, mesh=mesh)
    return State(rows=rows, step=jnp.int32(0), cache=cache, prompt_expert_PSLA=kept_PSLA)


def advance(
    params: Params,
    state: State,
    key: Array,
    settings: Settings,
    tokens: Array | int = 2**30,
    version: Array | int = 0,
) -> State:
    """Decode until no sample is left, or `tokens` times.

    The parameters may be newer than those of the tokens drawn before; what is cached of these is not recomputed.
    """
    last = state.step + tokens
    return _decode_while(lambda state: state.step < last, params, state, key, settings, version=version)


def finish(params: Params, state: State, key: Array, settings: Settings) -> State:
    """`advance` until no sample is left; the state may then have fewer slots.

    On a CPU a pass costs as much as it has slots, dead ones included. Once no sample waits and few are left, these move
    together, so that the longest samples are drawn in a quarter of the slots, and at last in a sixteenth.
    """
    for slots in _narrower(state, settings):

        def crowded(state: State, slots: int = slots) -> Array:
            queue = state.rows.queue
            assert queue is not None
            return (queue.taken_Q < queue.waiting_Q).any() | (state.rows.live_W.sum() > slots)

        state = _keep_live(_decode_while(crowded, params, state, key, settings), slots)
    return advance(params, state, key, settings)


def _narrower(state: State, settings: Settings) -> list[int]:
    """The numbers of slots that `finish` goes on with, one after the other."""
    mesh, W = settings.mesh, len(state.rows.live_W)
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    if state.rows.queue is None or platform != "cpu" or (mesh is not None and mesh.size > 1):
        return []
    return [W // part for part in (4, 16) if W // part >= NARROWEST]


def _keep_live(state: State, slots: int) -> State:
    """The state with so many slots, those with a live sample first."""
    rows, kept = state.rows, jnp.argsort(~state.rows.live_W)[:slots]
    assert rows.queue is not None
    of_slot = {name: getattr(rows, name)[kept] for name in ("token_W", "drawn_W", "live_W")}
    queue = replace(rows.queue, sample_W=rows.queue.sample_W[kept])
    cache = tuple(
        layer._replace(completion=jax.tree.map(lambda leaf: leaf[kept], layer.completion)) for layer in state.cache
    )
    return replace(state, rows=replace(rows, queue=queue, **of_slot), cache=cache)


def _decode_while(
    go_on: Callable[[State], Array],
    params: Params,
    state: State,
    key: Array,
    settings: Settings,
    *,
    version: Array | int = 0,
) -> State:
    """Decode while samples are left and `go_on` holds."""
    config, sampling, stop_ids, mesh = settings[:4]
    settle_locally = _on_devices(partial(settle, stop_ids=stop_ids), settings, state.rows)

    def decode(state: State) -> State:
        rows = state.rows
        slots, id_W, greedy_W = _on_devices(describe_slots, settings, rows)(rows)
        if rows.queue is None:  # read each prompt once where its slots are on one device
            whole = mesh is None or mesh.shape["context"] == 1
            slots = slots._replace(step=state.step, **({"prompt_W": None} if whole else {}))
        with jax.named_scope("decode"):
            hidden_WD, cache, expert_WLA = decoding.decode(params, config, rows.token_W, state.cache, slots, mesh=mesh)
        logits_WV = decoding.logits(params, hidden_WD)
        position_W = slots.prompt_length_W + rows.drawn_W
        token_W, logp_W = draw_at(logits_WV, key, id_W, position_W, sampling, greedy_W)
        drawn = Drawn(token_W, logp_W, expert_WLA if settings.keep_experts else None)
        rows = settle_locally(rows, drawn, state.step, jnp.asarray(version, jnp.int32))
        return replace(state, rows=rows, step=state.step + 1, cache=cache)

    return jax.lax.while_loop(lambda state: go_on(state) & state.rows.live_W.any(), decode, state)


def _count_slots(config: ModelConfig, sampling: Sampling, prompts: int, mesh: jax.sharding.Mesh | None) -> int:
    """W, for so many prompts; at least one on each device."""
    sizes = _axis_sizes(mesh)
    return max(count_slots(config, replace(sampling, prompts=prompts), sizes), batch_shards(sizes))


def _axis_sizes(mesh: jax.sharding.Mesh | None) -> dict[str, int]:
    return dict.fromkeys(AXES, 1) if mesh is None else dict(mesh.shape)


def _row_axis(mesh: jax.sharding.Mesh | None, B: int, W: int) -> str:
    """The logical axis of samples and slots."""
    return "sample" if sample_axis(mesh, B) == sample_axis(mesh, W) == "sample" else "batch"


def _row_shards(mesh: jax.sharding.Mesh | None, B: int, W: int) -> int:
    """Q."""
    if mesh is None:
        return 1
    return batch_shards(mesh) * (mesh.shape["context"] if _row_axis(mesh, B, W) == "sample" else 1)


def _on_devices(function: Callable[..., Any], settings: Settings, rows: Rows) -> Callable[..., Any]:
    """The function on each device's own rows. Arguments but scalars, and all results, have a leading axis of rows."""
    mesh = settings.mesh
    if mesh is None or mesh.size == 1:
        return function
    (over,) = spec(_row_axis(mesh, len(rows.length_B), len(rows.live_W)))
    by_row = PartitionSpec(over)

    def mapped(*args: Any) -> Any:
        specs = jax.tree.map(lambda leaf: by_row if jnp.ndim(leaf) else PartitionSpec(), args)
        return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=by_row, check_vma=False)(*args)

    return mapped

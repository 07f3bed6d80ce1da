"""Every public function has on a mesh, in `shard_map`, and under `vmap` the values and gradients of one device.

All losses are compared, of the other functions those in `VALUES`; all of them with `pytest -m slow`.

`jax.make_mesh` makes explicit axes by default, where a sort or a scan along a split axis does not even trace.
"""

import functools
import inspect
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import mesh_calls
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_calls import ARRAYS, AXES, CALLS, POLICY

from gspax import losses

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
ROWS = {"B": "data", "P": "data"}
SPLITS = {  # the shape of a mesh, its axes' names, and what is split over them
    "rows": ((4,), ("data",), ROWS),
    "all": ((2, 2, 2), ("data", "time", "model"), ROWS | {"T": "time", "V": "model", "E": "model"}),
    "one argument": ((4,), ("data",), ROWS),  # the others are whole, such as a mask that the program makes
}
ONE = ("logp", "logits", "hidden", "router_logits", "router_prob", "reward", "reward_PGR", "entropy", "router_logp")
VALUES = (  # those whose program differs on a mesh with explicit axes, and one of each kind besides
    *POLICY,
    "gspo_loss",
    "gspo_loss, packed",
    "token_logp",
    "token_logp, kept",
    "chunked_token_logp",
    "kl.sequence_kl, packed",
    "correction.reject_sequences, largest, packed",
    "selection.second_moment",
    "selection.top_entropy",
    "proximal.interpolated_logp",
    "regularizers.load_balance",
    "distill.select_logp",
    "distill.chunked_divergence",
    "router_shift.log_factor",
    "advantages.reinforce_plus_plus",
    "advantages.best_of_group",
    "advantages.gdpo",
    "advantages.by_group",
)
FLOATS = [name for name, x in ARRAYS.items() if x.dtype == np.float32]
compared = pytest.mark.parametrize(
    "names", [VALUES, pytest.param(tuple(CALLS), marks=pytest.mark.slow)], ids=("losses and kinds", "all functions")
)


def every_call(arrays, names=VALUES):
    """The results of the calls by name and, as "gradient", that of a function of all of them by all floats."""

    def total(floats):
        results = {name: CALLS[name](SimpleNamespace(**(arrays | floats))) for name in names}
        leaves = [leaf for leaf in jax.tree.leaves(results) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        return sum(jnp.sum(jnp.tanh(leaf)) / (n + 1) for n, leaf in enumerate(leaves)), results

    gradient, results = jax.grad(total, has_aux=True)({name: arrays[name] for name in FLOATS})
    return results | {"gradient": gradient}


@functools.cache
def alone(names):
    """The function that one device runs, compiled once."""
    return jax.jit(functools.partial(every_call, names=names))


def placed(split, mesh):
    parts = SPLITS[split][2]

    def put(name, x):
        whole = split == "one argument" and name not in ONE
        return jax.device_put(x, NamedSharding(mesh, P() if whole else P(*(parts.get(axis) for axis in AXES[name]))))

    return {name: put(name, x) for name, x in ARRAYS.items()}


def assert_equal(got, want):
    for name in want:
        compare = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5, err_msg=name)
        jax.tree.map(compare, jax.device_get(got[name]), want[name])


@compared
@pytest.mark.parametrize("kind", (EXPLICIT, AUTO), ids=lambda kind: kind.name)
def test_a_mesh_equals_one_device(kind, names, split="all"):
    shape, axes, _ = SPLITS[split]
    mesh = jax.make_mesh(shape, axes, axis_types=(kind,) * len(axes))
    want = jax.device_get(alone(names)(ARRAYS))  # outside the mesh, which a function could ask for
    with jax.set_mesh(mesh):
        assert_equal(jax.jit(functools.partial(every_call, names=names))(placed(split, mesh)), want)


@compared
def test_vmap_gives_each_batch_what_it_gets_alone(names):
    batches = [ARRAYS, {name: np.flip(x, -1) if x.dtype == np.float32 else x for name, x in ARRAYS.items()}]
    both = {name: np.stack([batch[name] for batch in batches]) for name in ARRAYS}
    got = jax.device_get(jax.jit(jax.vmap(functools.partial(every_call, names=names)))(both))
    for n, batch in enumerate(batches):
        want = jax.device_get(alone(names)(batch))
        assert_equal(jax.tree.map(lambda x, n=n: x[n], got), want)


@pytest.mark.parametrize("split", ("all", "one argument"))
def test_explicit_axes_refuse_no_call(split):
    """A mesh refuses while a program is traced, so nothing is compiled here."""
    shape, names, _ = SPLITS[split]
    mesh = jax.make_mesh(shape, names, axis_types=(EXPLICIT,) * len(names))
    with jax.set_mesh(mesh):
        jax.eval_shape(functools.partial(every_call, names=tuple(CALLS)), placed(split, mesh))


def test_every_public_function_is_called():
    """A new function is one more call, or is named here with the reason why no mesh matters to it."""
    without = {  # on numbers of Python or numpy, on functions, or a helper of the learner's passes
        *("advantages.across_groups", "advantages.compares_groups"),
        *("advantages.non_negative", "advantages.takes_negative"),
        *(["calibration.next_range", "calibration.range_warnings", "ratio_spread.fit_exponent"]),
        *(["logprobs.checked_logits", "logprobs.in_chunks", "logprobs.logp_and_entropy", "logprobs.shift"]),
    }
    called = {name.split(",")[0] for name in CALLS}
    for module in (*mesh_calls.MODULES, losses):
        prefix = "" if module is losses else module.__name__.rpartition(".")[2] + "."
        for name, function in vars(module).items():
            own = module is losses or getattr(function, "__module__", "") == module.__name__
            if own and inspect.isfunction(function) and not name.startswith("_"):
                assert {prefix + name} & (called | without | {"has_traits", "traits_of"}), prefix + name


@compared
def test_shard_map_gives_what_a_device_gives_for_its_rows(names):
    mesh = jax.make_mesh((2,), ("data",))
    whole = {name for name in ARRAYS if not set(AXES[name]) & set("BP")}
    names = [name for name in names if "by_group" not in name]  # an id is in one group, so all of its rows are needed
    specs = {name: P(*(ROWS.get(axis) for axis in AXES[name])) for name in ARRAYS}

    def of_rows(arrays):
        floats = {name: jax.lax.pcast(arrays[name], "data", to="varying") for name in whole}
        return jax.tree.map(lambda x: x[None], every_call(arrays | floats, names))

    mapped = jax.jit(jax.shard_map(of_rows, mesh=mesh, in_specs=(specs,), out_specs=P("data")))
    with jax.set_mesh(mesh):
        got = jax.device_get(mapped(placed("rows", mesh)))
    alone = jax.jit(functools.partial(every_call, names=names))
    for shard in range(2):

        def part(name, shard=shard):
            axis = next((n for n, letter in enumerate(AXES[name]) if letter in "BP"), None)
            return ARRAYS[name] if axis is None else np.split(ARRAYS[name], 2, axis)[shard]

        want = jax.device_get(alone({name: part(name) for name in ARRAYS}))
        assert_equal(jax.tree.map(lambda x, shard=shard: x[shard], got), want)


def test_the_lines_of_the_page_are_the_loss_of_all_rows():
    """Of rows whose devices have different weights, where a mean over devices is another number."""
    page = (Path(__file__).parents[2] / "docs" / "losses.md").read_text(encoding="utf-8")
    (block,) = [text.partition("```")[0] for text in page.split("```python\n") if "jax.lax.psum" in text]
    defined = {}
    exec(block, defined)  # on all devices, with rows of equal weight
    key = jax.random.split(jax.random.key(0), 3)
    logp, old_logp = (jax.random.normal(each, (8, 4)) - 2 for each in key[:2])
    advantage, mask = (
        jax.random.normal(key[2], (8,)),
        jnp.arange(4)[None] < jnp.array([4, 4, 1, 3, 2, 1, 4, 1])[:, None],
    )

    def whole(logp):
        return losses.reduce(losses.grpo(logp, old_logp, advantage, mask, aggregate=losses.by_token))[0]

    with jax.set_mesh(defined["mesh"]):
        rows = jax.device_put((logp, old_logp, advantage, mask), defined["rows"])
        got = jax.device_get(jax.jit(jax.value_and_grad(defined["loss"]))(*rows))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), got, jax.value_and_grad(whole)(logp)
    )

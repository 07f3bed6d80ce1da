"""Evaluates the printed equation of an experiment on a random batch, and compares it with what the learner computes."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from api import (
    Adapted,
    Batch,
    Outputs,
    Passes,
    Routing,
    RoutingSettings,
    UpdateConstants,
    interpolate_old_logp,
    make_objective,
)

from gspax.experiment import explanation
from gspax.losses import reduce, traits_of
from gspax.losses.selection import Minibatch
from gspax.model.terms.centering import Centers, center
from gspax.model.terms.teacher import KeptLogp

L, B, T, E, A, K, V = 2, 6, 7, 4, 2, 3, 5
UPDATES = 5, 2  # updates done, and updates of a rollout: a half of the third rollout


def draw(seed, *shape, low=None):
    """Normal numbers, or numbers from `low` to 0."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape) if low is None else rng.uniform(low, 0, shape), jnp.float32)


def mask():
    mask_BT = np.random.default_rng(0).random((B, T)) < 0.7
    mask_BT[:, 0] = mask_BT[2] = False
    return jnp.asarray(mask_BT)


def near(logp_BT, seed, width):
    """Log-probs near others, below 0."""
    return jnp.minimum(logp_BT + width * draw(seed, B, T), -0.01)


def inputs():
    """What has a gradient: the policy's outputs."""
    return {
        "logp": draw(1, B, T, low=-2.0) - 0.2,
        "entropy": 1 + jnp.abs(draw(2, B, T)),
        "router_logits": draw(3, L, B, T, E),
        "kept_logp": draw(4, B, T, K, low=-3.0) - 0.1,
        "logp_v": jax.nn.log_softmax(draw(5, B, T, V)),
    }


def batch_of(scale):
    """A minibatch; log-ratios to the old policy have this scale."""
    logp_BT = inputs()["logp"]
    return Batch(
        tokens_BT=jnp.zeros((B, T), jnp.int32),
        segment_BT=jnp.ones((B, T), jnp.int32),
        mask_BT=mask(),
        old_logp_BT=near(logp_BT, 11, scale),
        advantage=draw(12, B),
        sampler_logp_BT=near(logp_BT, 13, 2 * scale),
        ref_logp_BT=near(logp_BT, 14, 0.3),
        teacher_logp_BT=near(logp_BT, 15, 0.3),
        expert_BLTA=jnp.asarray(np.random.default_rng(16).integers(0, E, (B, L, T, A)), jnp.uint8),
        router_logp_BLTA=draw(17, B, L, T, A, low=-2.0),
        version_BT=jnp.asarray(np.random.default_rng(18).integers(0, 3, (B, T)), jnp.int32),
    )


OLD_ENTROPY = 1 + jnp.abs(draw(21, B, T))
TEACHER_V = jax.nn.log_softmax(draw(22, B, T, V))
SAMPLER_V = jax.nn.log_softmax(inputs()["logp_v"] + 0.3 * draw(26, B, T, V))
KEPT_TEACHER = draw(23, B, T, K, low=-3.0) - 0.1
KEPT_SAMPLED = jnp.asarray(draw(24, B, T) > 0, jnp.float32)
KEY = jax.random.key(7)
CONSTANTS = UpdateConstants(Adapted(*jnp.array([0.01, 0.02, 0.03])), jnp.abs(draw(25, L, E)), UPDATES[0])


def prepared(experiment, scale):
    """The batch as the steps before an update fill it."""
    batch, passes = batch_of(scale), Passes(experiment)
    if passes.old_logp == "sampler":
        batch = replace(batch, old_logp_BT=batch.sampler_logp_BT)
    arrays = batch.old_logp_BT, batch.sampler_logp_BT, OLD_ENTROPY
    minibatch = Minibatch(*arrays, jnp.broadcast_to(batch.advantage[:, None], (B, T)), batch.mask_BT, KEY)
    return replace(batch, **{column: select(minibatch) for column, select in passes.selections.items()})


def learner_loss(experiment, given, scale):
    """The loss that an update minimizes."""
    passes, batch = Passes(experiment), prepared(experiment, scale)
    router, teacher = experiment.model.router, experiment.teacher
    compared = None
    if teacher is not None and teacher.divergence is not None:
        compared = teacher.divergence(given["logp_v"], TEACHER_V)
    elif experiment.center_scores:
        rows = (x_BTV.reshape(B * T, V) for x_BTV in (given["logp_v"], SAMPLER_V))
        inside_NV = jnp.ones((B * T, V), bool)
        centers = Centers(*map(partial(center, experiment.loss, *rows, inside_NV), (1.0, -1.0)))
        compared = jax.tree.map(lambda x_N: x_N.reshape(B, T), centers)
    elif teacher is not None:
        compared = KeptLogp(given["kept_logp"], KEPT_TEACHER, batch.teacher_logp_BT, KEPT_SAMPLED)
    routing = Routing(jnp.zeros((L, B, T, A), int), given["router_logits"])
    if passes.old_logp == "update":
        batch = interpolate_old_logp(batch, given["logp"], *UPDATES)
    objective = make_objective(
        experiment.loss,
        passes.terms,
        calibration=experiment.calibration,
        routing=RoutingSettings(router, experiment.router_shift),
    )
    return reduce(objective(Outputs(given["logp"], given["entropy"], routing, compared), batch, CONSTANTS))[0]


def printed_loss(experiment, given, scale, lines=None, held=None):
    """The loss that the printed equation gives, in float64.

    Args:
      held: the constants, what `sg` got in order: appended if it is empty, else given back. None: no constants.
    """
    batch, router, mask_BT = prepared(experiment, scale), experiment.model.router, np.asarray(mask())
    arrays = {
        "old_logp": batch.old_logp_BT,
        "sampler_logp": batch.sampler_logp_BT,
        "ref_logp": batch.ref_logp_BT,
        "teacher_logp": batch.teacher_logp_BT,
        "advantage": batch.advantage[:, None],
        "old_entropy": OLD_ENTROPY,
        "age": jnp.maximum(UPDATES[0] // UPDATES[1] - batch.version_BT, 0),
        "progress": UPDATES[0] % UPDATES[1] / UPDATES[1],
        "load": CONSTANTS.load_LE[:, None, None],
        "kept_teacher_logp": KEPT_TEACHER,
        "teacher_logp_v": TEACHER_V,
        "sampler_logp_v": SAMPLER_V,
        "clip_low": CONSTANTS.adapted.clip_low,
        "clip_high": CONSTANTS.adapted.clip_high,
        "entropy_coefficient": CONSTANTS.adapted.entropy,
    }
    names = {name: np.asarray(value, np.float64) for name, value in (arrays | given).items()}
    names |= vocabulary(mask_BT, held) | {"sampled_is_kept": np.asarray(KEPT_SAMPLED) > 0}
    logits_LBTE = names["router_logits"]
    if router.scoring == "softmax":
        names["router_prob"] = _softmax(logits_LBTE)
    now_BLTA = np.take_along_axis(np.log(_softmax(logits_LBTE)).swapaxes(0, 1), np.asarray(batch.expert_BLTA, int), -1)
    distance_BT = np.abs(now_BLTA - batch.router_logp_BLTA).mean((1, 3))
    names["router_distance"] = names["sg"](np.pad(distance_BT[:, :-1], ((0, 0), (1, 0))))
    lines = lines or loss_lines(experiment)
    if experiment.center_scores:
        names["weight_v"] = weight_v(lines, names)
    return evaluate(lines, names)["loss"]


def weight_v(lines, names):
    """The derivative of the printed objective by logp, over the advantage, for each token of the vocabulary."""

    def objective(logp, old_logp, sg):
        own = {"logp": logp, "old_logp": old_logp, "sampler_logp": old_logp, "sg": sg}
        return evaluate([line for line in lines if not line.lstrip().startswith("loss ")], names | own)["objective"]

    def slope(logp, old_logp, step=1e-6):
        constants = []
        objective(logp, old_logp, lambda x: constants.append(x) or x)
        above, below = (objective(logp + x, old_logp, partial(next, iter(constants))) for x in (step, -step))
        return (above - below) / (2 * step)

    of_vocabulary = (np.moveaxis(names[name], -1, 0) for name in ("logp_v", "sampler_logp_v"))
    weights = [slope(*logps) / names["advantage"] for logps in zip(*of_vocabulary, strict=True)]
    return np.stack(np.broadcast_arrays(*weights), -1)


def printed_slope(experiment, given, along, scale, lines=None):
    """The loss of the printed equation, and its derivative along a direction, by differences around it."""
    constants, step = [], 1e-6
    value = printed_loss(experiment, given, scale, lines, constants)
    beside = [
        printed_loss(
            experiment,
            {name: np.asarray(x, np.float64) + sign * step * np.asarray(along[name]) for name, x in given.items()},
            scale,
            lines,
            [*constants],
        )
        for sign in (1, -1)
    ]
    return value, (beside[0] - beside[1]) / (2 * step)


def loss_lines(experiment):
    """The part of the printed text that says what an update minimizes."""
    title = "Each update minimizes `loss`, over the response tokens of a minibatch\n"
    return explanation.explain(Passes(experiment)).partition(title)[2].partition("\n\n")[0].splitlines()


def evaluate(lines, names):
    """The names after the assignments of a text."""
    names = dict(names)
    for line in lines:
        name, _, text = (part.strip() for part in line.partition(" = "))
        if name.endswith("(x)"):
            names[name.removesuffix("(x)")] = partial(_call, text, names)
        else:
            names[name] = eval(text, {"__builtins__": {}}, names)
    return names


def _call(text, names, x):
    return eval(text, {"__builtins__": {}}, names | {"x": x})


def _softmax(x):
    weight = np.exp(x - x.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True)


def vocabulary(mask_BT, held=None):
    """The functions of formulas, over rows of one sequence each; `held` as for `printed_loss`."""
    replayed = iter(held) if held else None

    def sg(x):
        if replayed is not None:
            return next(replayed)
        if held is not None:
            held.append(x)
        return x

    def total(x):
        return np.sum(np.where(mask_BT, x, 0))

    def row_sum(x):
        return np.sum(np.where(mask_BT, x, 0), 1, keepdims=True)

    length_B1 = np.maximum(mask_BT.sum(1, keepdims=True), 1)

    def ranked(x):
        return -np.sort(-np.where(mask_BT, x, -np.inf).ravel())

    def count(share):
        return int(max(round(share * int(mask_BT.sum())), 1))

    def small_mean(x, limit):
        x_N = -ranked(-x)
        kept = max(int((np.cumsum(x_N) / np.arange(1, x_N.size + 1) < limit).sum()), 1)
        return (mask_BT & (x <= x_N[kept - 1])) * 1.0

    def drawn(flag, share):
        random_BT = np.where(mask_BT & flag, jax.random.uniform(KEY, mask_BT.shape), -np.inf)
        return flag & (random_BT >= -np.sort(-random_BT.ravel())[count(share) - 1])

    return dict(
        exp=np.exp, log=np.log, min=np.minimum, max=np.maximum, abs=np.abs, clip=np.clip, where=np.where,
        sigmoid=lambda x: 1 / (1 + np.exp(-x)), sg=sg, inf=np.inf,
        k1=lambda x: x, k2=lambda x: x**2 / 2, k3=lambda x: np.exp(-x) - 1 + x,
        inside=lambda x, a, b: ((a <= x) & (x <= b)) * 1.0, sum=total, average=lambda x: total(x) / mask_BT.sum(),
        mean_t=lambda x: row_sum(x) / length_B1, sum_t=row_sum,
        max_t=lambda x: np.max(np.where(mask_BT, x, -np.inf), 1, keepdims=True),
        from_t=lambda x: np.cumsum(np.where(mask_BT, x, 0)[:, ::-1], 1)[:, ::-1],
        mean_l=lambda x: x.mean(0), sum_e=lambda x: x.sum(-1), logsumexp_e=lambda x: np.log(np.exp(x).sum(-1)),
        sum_k=lambda x: x.sum(-1), sum_v=lambda x: x.sum(-1),
        top=lambda x, share: (mask_BT & (x >= ranked(x)[count(share) - 1])) * 1.0, small_mean=small_mean, drawn=drawn,
        length=length_B1, sequences=mask_BT.any(1).sum(), tokens=mask_BT.sum(),
    )  # fmt: skip


def compare(experiment, lines=None):
    """Assert that the loss of the printed equation is the learner's, and its derivative along a random direction.

    Log-ratios are as large as the widths of clip ranges in use, so that some are clipped and others are not.
    """
    scale = 1e-3 if traits_of(experiment.loss).ratio == "sequence" else 0.2
    given = inputs()
    along = {name: draw(31 + number, *value.shape) for number, (name, value) in enumerate(given.items())}
    ours = jax.jvp(lambda given: learner_loss(experiment, given, scale), (given,), (along,))
    theirs = printed_slope(experiment, given, along, scale, lines)
    np.testing.assert_allclose(theirs[0], ours[0], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(theirs[1], ours[1], rtol=5e-4, atol=2e-5, err_msg="the gradient")


def advantage_names(reward_PG, length_PG):
    """The functions and arrays of the formulas of advantages, [P, G] or [P, G, R]."""

    def mean_g(x):
        return x.mean(1, keepdims=True)

    def std(x, axis, ddof):
        size = x.shape[axis] if axis is not None else x.size
        centered = x - x.mean(axis, keepdims=True)
        return jnp.sqrt((centered**2).sum(axis, keepdims=True) / (size - ddof))

    def max_others(x):
        ordered = jnp.sort(x, 1, descending=True)
        return jnp.where(x == ordered[:, :1], ordered[:, 1:2], ordered[:, :1])

    return SimpleNamespace(
        reward=reward_PG, length=length_PG, group=reward_PG.shape[1], mean_g=mean_g,
        sum_g=lambda x: x.sum(1, keepdims=True), std_g=lambda x, d: std(x, 1, d), mean_b=lambda x: x.mean(),
        std_b=lambda x, d: std(x, None, d).squeeze(), sum_r=lambda x: x.sum(-1), max_others_g=max_others,
        up_to_t=lambda x: jnp.cumsum(x, -1), weights=lambda *x: jnp.array(x)[None, None], max=jnp.maximum,
        where=jnp.where, clip=jnp.clip,
    ).__dict__  # fmt: skip

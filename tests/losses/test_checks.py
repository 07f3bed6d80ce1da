"""Invalid arguments of losses, and error messages: the argument, what was wanted, and what was given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_cases import (
    CASES,
    CISPO,
    DAPO,
    DPPO_KL,
    DPPO_TV,
    DR_GRPO,
    FAMILY,
    GMPO,
    GRPO,
    GSPO,
    GSPO_TOKEN,
    MINIMUM,
    SAPO,
    VESPO,
    Packed,
)

from gspax import losses

over_family = pytest.mark.parametrize("member", FAMILY, ids=str)
over_banded = pytest.mark.parametrize("member", (*MINIMUM, CISPO, GMPO), ids=str)


def arguments(member, **replaced):
    names = ("logp", "old_logp", "advantage", "mask")
    return dict(zip(names, CASES["ragged-0.3"].arguments(member), strict=True)) | replaced


WRONG = {
    "float64": ("logp", lambda x: x.astype(np.float64), TypeError, "float32.*got float64 \\[8, 9\\]"),
    "bfloat16": ("logp", lambda x: jnp.asarray(x, jnp.bfloat16), TypeError, "float32.*clip band.*got bfloat16"),
    "float16_old": ("old_logp", lambda x: x.astype(np.float16), TypeError, "float32.*clip band.*got float16"),
    "a_list": ("logp", lambda x: x.tolist(), TypeError, "float32 array \\[B, T\\]; got list"),
    "integers": ("advantage", lambda x: x.astype(np.int32), TypeError, "float32.*got int32"),
    "float64_advantage": ("advantage", lambda x: x.astype(np.float64), TypeError, "float32.*got float64"),
    "float_mask": ("mask", lambda x: x.astype(np.float32), TypeError, "bool array \\[B, T\\]; got float32"),
    "integer_mask": ("mask", lambda x: x.astype(np.int32), TypeError, "bool array \\[B, T\\]; got int32"),
    "one_row": ("logp", lambda x: x[0], ValueError, "\\[B, T\\]; got float32 \\[9\\]"),
    "short_old": ("old_logp", lambda x: x[:, 1:], ValueError, "\\[8, 9\\], as logp has; got \\[8, 8\\]"),
    "short_mask": ("mask", lambda x: x[:, :-1], ValueError, "\\[8, 9\\], as logp has; got \\[8, 8\\]"),
    "one_mask": ("mask", lambda x: x[:1], ValueError, "\\[8, 9\\], as logp has; got \\[1, 9\\]"),
    "short_advantage": ("advantage", lambda x: x[:4], ValueError, "as logp.*has; got \\[4"),
    "number_advantage": ("advantage", lambda x: np.float32(1), ValueError, "\\[B\\]; got float32 \\[\\]"),
    "deep_advantage": ("advantage", lambda x: np.zeros((8, 9, 1), np.float32), ValueError, "got float32 \\[8, 9, 1\\]"),
}


# jit turns a list into scalars and float64 into float32 before the loss is called.
SEEN_UNDER_JIT = [key for key in WRONG if key not in ("a_list", "float64", "float64_advantage")]


@over_family
@pytest.mark.parametrize(
    "wrong, traced",
    [pytest.param(key, False, id=key) for key in WRONG]
    + [pytest.param(key, True, id=f"{key}-jit") for key in SEEN_UNDER_JIT],
)
def test_invalid_arrays_are_rejected(member, wrong, traced):
    name, change, error, message = WRONG[wrong]
    given = arguments(member)
    given[name] = change(given[name])
    with pytest.raises(error, match=f"^{name} must .*{message}"):
        (jax.jit(member.loss) if traced else member.loss)(**given)


@pytest.mark.parametrize("member", (GSPO, GRPO, VESPO), ids=str)
@pytest.mark.parametrize("columns", (9, 8, 1))
def test_sequence_losses_reject_advantages_per_token(member, columns):
    """Also [B, 1], and [B, T] with B == T: nothing is broadcast by accident."""
    with pytest.raises(ValueError, match=r"^advantage must be a float32 array \[B\]; got float32 \[8, "):
        member.loss(**arguments(member, advantage=np.zeros((8, columns), np.float32)))


def test_gspo_token_rejects_advantages_of_another_length():
    with pytest.raises(ValueError, match=r"^advantage must have shape \[8, 9\], as logp has; got \[8, 8\]"):
        GSPO_TOKEN.loss(**arguments(GSPO_TOKEN, advantage=np.zeros((8, 8), np.float32)))


@over_banded
@pytest.mark.parametrize("name", ("clip_low", "clip_high"))
@pytest.mark.parametrize(
    "value, error, message",
    (
        (-1e-4, ValueError, "at least 0.*got -0.0001"),
        (float("nan"), ValueError, "at least 0.*got nan"),
        ("0.2", TypeError, "Python number.*got str"),
        (None, TypeError, "Python number.*got NoneType"),
        (True, TypeError, "Python number.*got bool"),
        (jnp.full(2, 0.2), TypeError, "Python number.*got ArrayImpl"),
        (jnp.bfloat16(0.2), TypeError, "Python number.*got ArrayImpl"),
    ),
)
def test_invalid_clip_widths_are_rejected(member, name, value, error, message):
    with pytest.raises(error, match=f"^{name} must .*{message}"):
        member.loss(**arguments(member), **{name: value})


@over_banded
def test_traced_clip_widths_equal_numbers(member):
    """Up to rounding: 1 + width is rounded once for a number and twice for an array."""

    @jax.jit
    def loss(clip_low, clip_high):
        return member.loss(**arguments(member), clip_low=clip_low, clip_high=clip_high)[0]

    wanted = member.loss(**arguments(member), clip_low=0.25, clip_high=0.5)[0]
    np.testing.assert_allclose(loss(jnp.float32(0.25), jnp.float32(0.5)), wanted, rtol=1e-6)
    assert loss(jnp.float32(0.0), jnp.float32(0.0)) != wanted, "no constant of the compiled program"
    assert loss._cache_size() == 1


@over_banded
def test_clip_widths_are_keyword_only(member):
    with pytest.raises(TypeError, match="positional"):
        member.loss(*arguments(member).values(), 0.2, 0.3)
    with pytest.raises(TypeError, match="positional"):
        member.terms(*arguments(member).values(), 0.2, 0.3)


@over_banded
def test_numpy_numbers_are_accepted_as_clip_widths(member):
    """The loss stays in float32 even with x64 enabled."""
    given = arguments(member)
    with jax.enable_x64(True):
        loss = member.loss(**given, clip_low=np.float32(0.25), clip_high=np.float64(0.5))[0]
    assert loss.dtype == jnp.float32 and loss == member.loss(**given, clip_low=0.25, clip_high=0.5)[0]


def test_clip_widths_and_options_are_keyword_only():
    for member in FAMILY:
        with pytest.raises(TypeError, match="positional"):
            member.function(*arguments(member).values(), losses.by_token)


NUMBERS = (
    (GRPO, "dual_clip", "above 1", (1.0, 0.5, float("nan"))),
    (DR_GRPO, "dual_clip", "above 1", (1.0,)),
    (DAPO, "dual_clip", "above 1", (1.0,)),
    (SAPO, "tau_positive", "finite and above 0", (0.0, -1.0, float("inf"), float("nan"))),
    (SAPO, "tau_negative", "finite and above 0", (0.0,)),
    (VESPO, "k_positive", "finite and at least 0", (-1.0, float("nan"))),
    (VESPO, "k_negative", "finite and at least 0", (-1.0,)),
    (VESPO, "lambda_positive", "finite and at least 0", (-1.0, float("inf"))),
    (VESPO, "lambda_negative", "finite and at least 0", (-1.0,)),
    (DPPO_TV, "threshold", "at least 0", (-1e-9, float("nan"))),
    (DPPO_KL, "ratio_limit", "finite and above 0", (0.0, float("inf"))),
)


@pytest.mark.parametrize("member, name, wanted, values", NUMBERS, ids=lambda x: x if isinstance(x, str) else None)
def test_invalid_options_are_rejected(member, name, wanted, values):
    for value in values:
        with pytest.raises(ValueError, match=f"^{name} must be {wanted}.*; got {value}$"):
            member.loss(**arguments(member), **{name: value})
    for value in ("1", True, jnp.float32(2)):
        with pytest.raises(TypeError, match=f"^{name} must be a Python number.*got {type(value).__name__}"):
            member.loss(**arguments(member), **{name: value})


WRONG_KEYWORDS = {
    "segments_of_another_dtype": (dict(segment_ids=np.ones((8, 9))), TypeError, "^segment_ids must .*int32.*float64"),
    "segments_of_rows": (dict(segment_ids=np.ones(8, np.int32)), ValueError, r"^segment_ids must .*\[B, T\].*\[8\]"),
    "short_segments": (
        dict(segment_ids=np.ones((8, 8), np.int32)),
        ValueError,
        r"^segment_ids must .*\[8, 9\].*\[8, 8\]",
    ),
    "corrections_of_another_dtype": (dict(correction=np.ones(8)), TypeError, "^correction must .*float32.*float64"),
    "short_correction": (dict(correction=np.ones(7, np.float32)), ValueError, r"^correction must .*\[8\].*\[7\]"),
    "short_corrections": (
        dict(correction=np.ones((8, 1), np.float32)),
        ValueError,
        r"^correction must .*\[8, 9\].*\[8, 1\]",
    ),
    "one_correction": (dict(correction=1.5), TypeError, "^correction must .*got float"),
    "an_aggregate_by_name": (dict(aggregate="by_token"), TypeError, "^aggregate must be a function.*got str"),
}


@over_family
@pytest.mark.parametrize("wrong", WRONG_KEYWORDS)
def test_invalid_keywords_are_rejected(member, wrong):
    keywords, error, message = WRONG_KEYWORDS[wrong]
    given = arguments(member)
    if "segment_ids" in keywords:
        given["advantage"] = CASES["ragged-0.3"].advantage
    with pytest.raises(error, match=message):
        member.loss(**given, **keywords)


@over_family
def test_packed_rows_require_advantage_and_correction_per_token(member):
    packed = Packed(CASES["ragged-0.3"], sequences_per_row=4)
    logp, old_logp, advantage, mask = packed.arguments(member)
    keywords = dict(segment_ids=packed.segment_ids)
    with pytest.raises(ValueError, match=r"^advantage must be a float32 array \[B, T\]; got float32 \[2\]"):
        member.loss(logp, old_logp, advantage[:, 0], mask, **keywords)
    with pytest.raises(ValueError, match=r"^correction must be a float32 array \[B, T\]; got float32 \[2\]"):
        member.loss(logp, old_logp, advantage, mask, **keywords, correction=np.ones(2, np.float32))


def test_invalid_arguments_of_aggregates_are_rejected():
    value, mask = np.ones((2, 3), np.float32), np.ones((2, 3), bool)
    for aggregate in (losses.by_sequence, losses.by_token, losses.by_constant):
        with pytest.raises(TypeError, match=r"^value must be a float32 array"):
            aggregate(value.astype(np.int32), mask)
        with pytest.raises(ValueError, match=r"^mask must have shape \[2, 3\], as value has; got \[2, 2\]"):
            aggregate(value, mask[:, :2])
        with pytest.raises(ValueError, match=r"^segment_ids must have shape \[2, 3\], as value has; got \[2, 2\]"):
            aggregate(value, mask, np.ones((2, 2), np.int32))
    with pytest.raises(ValueError, match=r"^length must be finite and above 0; got 0"):
        losses.by_constant(value, mask, length=0)

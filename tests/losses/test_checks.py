"""What the losses refuse, and that the message names the argument, what was wanted and what came."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_cases import CASES, FAMILY, GRPO, GSPO, GSPO_TOKEN

over_family = pytest.mark.parametrize("member", FAMILY, ids=str)


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


# jit makes scalars of a list, and float32 of float64, before the loss sees it.
SEEN_UNDER_JIT = [key for key in WRONG if key not in ("a_list", "float64", "float64_advantage")]


@over_family
@pytest.mark.parametrize(
    "wrong, traced",
    [pytest.param(key, False, id=key) for key in WRONG]
    + [pytest.param(key, True, id=f"{key}-jit") for key in SEEN_UNDER_JIT],
)
def test_wrong_arrays(member, wrong, traced):
    name, change, error, message = WRONG[wrong]
    given = arguments(member)
    given[name] = change(given[name])
    with pytest.raises(error, match=f"^{name} must .*{message}"):
        (jax.jit(member.loss) if traced else member.loss)(**given)


@pytest.mark.parametrize("member", (GSPO, GRPO), ids=str)
@pytest.mark.parametrize("columns", (9, 8, 1))
def test_advantages_per_token_are_refused_where_the_loss_has_one_per_sequence(member, columns):
    """Also [B, 1], and [B, T] with B == T: nothing is broadcast by chance."""
    with pytest.raises(ValueError, match=r"^advantage must be a float32 array \[B\]; got float32 \[8, "):
        member.loss(**arguments(member, advantage=np.zeros((8, columns), np.float32)))


def test_gspo_token_refuses_advantages_of_another_length():
    with pytest.raises(ValueError, match=r"^advantage must have shape \[8, 9\], as logp has; got \[8, 8\]"):
        GSPO_TOKEN.loss(**arguments(GSPO_TOKEN, advantage=np.zeros((8, 8), np.float32)))


@over_family
@pytest.mark.parametrize("name", ("clip_low", "clip_high"))
@pytest.mark.parametrize(
    "value, error, message",
    (
        (-1e-4, ValueError, "at least 0.*got -0.0001"),
        (float("nan"), ValueError, "at least 0.*got nan"),
        ("0.2", TypeError, "Python number.*got str"),
        (None, TypeError, "Python number.*got NoneType"),
        (True, TypeError, "Python number.*got bool"),
        (jnp.float32(0.2), TypeError, "Python number.*got ArrayImpl"),
    ),
)
def test_wrong_clip_widths(member, name, value, error, message):
    with pytest.raises(error, match=f"^{name} must .*{message}"):
        member.loss(**arguments(member), **{name: value})


@over_family
def test_clip_widths_are_keyword_only(member):
    with pytest.raises(TypeError, match="positional"):
        member.loss(*arguments(member).values(), 0.2, 0.3)
    with pytest.raises(TypeError, match="positional"):
        member.terms(*arguments(member).values(), 0.2, 0.3)


@over_family
def test_numpy_numbers_are_clip_widths_too(member):
    """And the loss stays in float32 where jax would compute in float64."""
    given = arguments(member)
    with jax.enable_x64(True):
        loss = member.loss(**given, clip_low=np.float32(0.25), clip_high=np.float64(0.5))[0]
    assert loss.dtype == jnp.float32 and loss == member.loss(**given, clip_low=0.25, clip_high=0.5)[0]

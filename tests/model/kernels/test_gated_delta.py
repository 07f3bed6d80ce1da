"""Gated delta nets against the recurrence in float64, token by token; layers of transformers: test_delta_net.py."""

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from api import make_mesh

from gspax.config import Mesh
from gspax.model.kernels.convolution import convolve
from gspax.model.kernels.gated_delta import (
    Tokens,
    chunked_rule,
    recurrent_step,
    rule_over_devices,
    unit_lower_inverse,
)

K, R, H, U = 2, 2, 8, 12  # key heads, value heads of each, dimensions of a key and of a value
CHUNK = 16
SEGMENTS = {  # 50 tokens: three chunks and a part
    "one segment": [50],
    "segments that end at chunks": [16, 32, 2],
    "segments within a chunk": [3, 5, 1, 1, 20, 20],
    "padding after a few": [7, -43],
    "padding after several": [20, 13, -17],
    "one token": [1, -49],
    "nothing": [-50],
}
UNITS = {  # 50 tokens: prompts, each with what continues it; one length is a sequence of its own
    "prompts within a chunk": [[3, 4, 5, 1], [2, 6], [1, 9, 9]],
    "a prompt of several chunks": [[20, 5, 3, 14]],
    "prompts that end at a chunk": [[16, 16, 2], [14, 1, 1]],
    "sequences between": [[9], [18, 2, 7], [3], [5, 4, 2]],
    "continuations of several chunks": [[2, 25, 20]],
}
chunked = jax.jit(partial(chunked_rule, chunk=CHUNK))
step = jax.jit(recurrent_step)


def numbers(lengths):
    """Segment numbers; negative lengths are padding."""
    segments = [np.full(abs(length), number if length > 0 else 0) for number, length in enumerate(lengths, 1)]
    return np.concatenate(segments).astype(np.int32)


def rows():
    return jnp.asarray(np.stack([numbers(lengths) for lengths in SEGMENTS.values()]))


def random_tokens(B=7, T=50, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((B, T, *shape)) for shape in ((K, H), (K, H), (K, R, U)))
    decay, beta = -rng.exponential(0.3, (B, T, K, R)), rng.uniform(0, 1, (B, T, K, R))
    return Tokens(*(jnp.asarray(x, jnp.float32) for x in (q, k, v, decay, beta)))


def recurrence(tokens, segment_BT, state=None):
    """The rule token by token: outputs and the last state, in the dtype of the tokens."""
    B = len(segment_BT)
    unit = [x / jnp.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (tokens.q_BTKH, tokens.k_BTKH)]
    q, k = (jnp.repeat(x[:, :, :, None], R, axis=3) for x in (unit[0] * H**-0.5, unit[1]))
    state = jnp.zeros((B, K, R, H, U), q.dtype) if state is None else jnp.asarray(state, q.dtype)

    def run(carry, inputs):
        state, last = carry
        q, k, v, decay, beta, segment = inputs
        live, new = segment > 0, (segment != last) & (last > 0) & (segment > 0)
        before = jnp.where(new[:, None, None, None, None], 0, state)
        after = jnp.exp(decay)[..., None, None] * before
        wrong = v - jnp.einsum("bkrhu,bkrh->bkru", after, k)
        after = after + beta[..., None, None] * k[..., None] * wrong[:, :, :, None]
        out = jnp.where(live[:, None, None, None], jnp.einsum("bkrhu,bkrh->bkru", after, q), 0)
        return (jnp.where(live[:, None, None, None, None], after, before), jnp.where(live, segment, last)), out

    by_time = jax.tree.map(lambda x: x.swapaxes(0, 1), (q, k, *tokens[2:], segment_BT))
    (state, _), out = jax.lax.scan(run, (state, jnp.zeros(B, jnp.int32)), by_time)
    return out.swapaxes(0, 1), state


@contextlib.contextmanager
def double():
    with jax.enable_x64(True):
        yield


def wanted(tokens, segment_BT, state=None):
    """`recurrence` in float64."""
    with double():
        exact = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), tokens)
        return [np.asarray(x) for x in jax.jit(recurrence)(exact, segment_BT, state)]


def close(found, wanted, tolerance=2e-6):
    np.testing.assert_allclose(found, wanted, atol=tolerance * max(1.0, np.abs(wanted).max()), rtol=0)


def test_chunks_of_packed_rows_are_the_recurrence_with_empty_states_at_segments():
    tokens, segment_BT = random_tokens(), rows()
    out, state = chunked(tokens, segment_BT)
    assert out.dtype == state.dtype == jnp.float32
    for found, exact in zip((out, state), wanted(tokens, segment_BT), strict=True):
        close(found, exact)


def test_gradients_of_packed_rows_are_those_of_the_recurrence():
    tokens, segment_BT, rng = random_tokens(), rows(), np.random.default_rng(1)
    start, weights = (rng.standard_normal((len(SEGMENTS), *shape)) for shape in ((K, R, H, U), (50, K, R, U)))

    def value(run, tokens, start):
        out, state = run(tokens, segment_BT, start)
        return (out * jnp.asarray(weights, out.dtype)).sum() + (state**2).sum()

    found = jax.jit(jax.grad(partial(value, chunked), argnums=(0, 1)))(tokens, jnp.asarray(start, jnp.float32))
    with double():
        exact = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), (tokens, start))
        exact = jax.tree.map(np.asarray, jax.jit(jax.grad(partial(value, recurrence), argnums=(0, 1)))(*exact))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        assert np.abs(theirs).max() > 0.1
        close(ours, theirs, 5e-6)


def shared_rows():
    """Segments and prefixes [B, T] of rows of units, and the rows [N, T] without sharing.

    Of the rows without sharing: the tokens' places in the others (row, column), their segments, and where each token of
    the shared rows stands in them first.
    """
    segment_BT, prefix_BT = np.zeros((2, len(UNITS), 50), np.int32)
    own, where = [], np.zeros((2, len(UNITS), 50), int)
    for row, units in enumerate(UNITS.values()):
        number = end = 0
        for prompt, *rest in units:
            root = number + 1
            for length in (prompt, *rest):
                number, start, end = number + 1, end, end + length
                segment_BT[row, start:end], prefix_BT[row, start:end] = number, root if number > root else 0
                first = start if number == root else first  # noqa: F821
                if number > root or not rest:
                    path = [*range(first, first + prompt), *range(start, end)] if rest else [*range(start, end)]
                    for place, column in enumerate(path):
                        if not rest or column >= start or number == root + 1:
                            where[:, row, column] = len(own), place
                    own.append([(row, column) for column in path])
    places = np.array([path + [(0, 0)] * (50 - len(path)) for path in own]).transpose(2, 0, 1)
    single_NT = np.array([np.arange(50) < len(path) for path in own]).astype(np.int32)
    return jnp.asarray(segment_BT), jnp.asarray(prefix_BT), (tuple(places), jnp.asarray(single_NT), tuple(where))


def test_segments_that_share_a_prompt_are_rows_of_their_own():
    """The rule forward and backward, in float64 for the rows without sharing; and the convolution, bit for bit."""
    segment_BT, prefix_BT, (places, single_NT, where) = shared_rows()
    tokens, rng = random_tokens(B=len(UNITS)), np.random.default_rng(1)
    weights = rng.standard_normal((*segment_BT.shape, K, R, U))
    last = [where[0][row, np.flatnonzero(segments)[-1]] for row, segments in enumerate(np.asarray(segment_BT))]

    def shared(tokens):
        out, state = chunked_rule(tokens, segment_BT, None, prefix_BT, chunk=CHUNK)
        return (out * jnp.asarray(weights, out.dtype)).sum() + (state**2).sum(), (out, state)

    def separate(tokens):
        out, state = recurrence(jax.tree.map(lambda x: x[places], tokens), single_NT)
        out, state = jnp.where((segment_BT > 0)[..., None, None, None], out[where], 0), state[jnp.asarray(last)]
        return (out * jnp.asarray(weights, out.dtype)).sum() + (state**2).sum(), (out, state)

    found, gradient = jax.jit(jax.grad(shared, has_aux=True))(tokens)[::-1]
    with double():
        exact = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), tokens)
        wanted = jax.tree.map(np.asarray, jax.jit(jax.grad(separate, has_aux=True))(exact)[::-1])
    for ours, theirs in zip(jax.tree.leaves((found, gradient)), jax.tree.leaves(wanted), strict=True):
        assert np.abs(theirs).max() > 0.1
        close(ours, theirs, 5e-6)
    x, weight = jnp.asarray(rng.standard_normal((len(UNITS), 50, 5)), jnp.float32), jnp.asarray(rng.random((5, 4)))
    y, _ = convolve(x, weight, segment_BT, None, prefix_BT)
    alone, _ = convolve(x[places], weight, single_NT)
    np.testing.assert_array_equal(y[segment_BT > 0], alone[where][segment_BT > 0])


@pytest.mark.parametrize("shared", [False, True], ids=["segments", "prompts"])
def test_rows_on_several_devices_are_those_of_one(shared):
    """Parts of 13 tokens on four devices, forward and backward, whose states are joined; heads on two."""
    segment_BT, *prefix_BT = shared_rows()[:2] if shared else (rows(),)
    segment_BT, *prefix_BT = (jnp.pad(x, ((0, 0), (0, 2))) for x in (segment_BT, *prefix_BT))
    tokens, mesh = random_tokens(len(segment_BT), 52), make_mesh(Mesh(fsdp=1, context=4, tensor=2), jax.devices()[:8])
    weights = jnp.asarray(np.random.default_rng(1).standard_normal((*segment_BT.shape, K, R, U)), jnp.float32)

    def value(run, tokens):
        out, state = run(tokens)
        out = jnp.where((segment_BT > 0)[..., None, None, None], out, 0)
        return (out * weights).sum() + (state**2).sum(), (out, state)

    def together(tokens):
        return chunked_rule(tokens, segment_BT, None, *prefix_BT)

    with jax.set_mesh(mesh):
        spread = jax.jit(
            jax.grad(partial(value, lambda each: rule_over_devices(mesh, each, segment_BT, *prefix_BT)), has_aux=True)
        )
        found = jax.device_get(spread(tokens))
    wanted = jax.jit(jax.grad(partial(value, together), has_aux=True))(tokens)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.abs(theirs).max() > 0.1
        close(ours, theirs, 5e-6)


def test_repeated_keys_and_forgetting_tokens_lose_no_digits():
    """A series for the inverse cancels where keys repeat; sums of decays do where some tokens forget everything."""
    tokens, segment_BT = random_tokens(B=2, T=200), jnp.ones((2, 200), jnp.int32)
    same = jnp.broadcast_to(tokens.k_BTKH[:, :1], tokens.k_BTKH.shape)
    repeated = tokens._replace(
        k_BTKH=same, beta_BTKR=jnp.ones((2, 200, K, R)), decay_BTKR=jnp.full((2, 200, K, R), -1e-4)
    )
    every_third = jnp.arange(200)[None, :, None, None] % 3 == 0
    forgetful = tokens._replace(decay_BTKR=jnp.where(every_third, -320.3, tokens.decay_BTKR * 0.01))
    for each in (repeated, forgetful):
        out, state = jax.jit(chunked_rule)(each, segment_BT)
        for found, exact in zip((out, state), wanted(each, segment_BT), strict=True):
            close(found, exact, 1e-5)


def test_the_state_of_a_padded_prompt_continues_step_by_step():
    lengths, tokens = np.array([50, 23, 16, 1]), random_tokens(B=4, T=60)
    whole, _ = wanted(tokens, np.ones((4, 60), np.int32))
    _, state = chunked(tokens, jnp.asarray(np.arange(60)[None] < lengths[:, None], jnp.int32))
    for number in range(10):
        here = jax.tree.map(lambda x, number=number: x[np.arange(4), lengths + number], tokens)
        out, state = step(here, state, jnp.ones(4, bool))
        close(out, whole[np.arange(4), lengths + number])


def test_blocks_continue_a_state_and_rows_without_tokens_keep_it_bit_for_bit():
    tokens = random_tokens(B=3, T=20)
    state = jnp.asarray(np.random.default_rng(2).standard_normal((3, K, R, H, U)), jnp.float32).at[2].set(-0.0)
    count = np.array([20, 9, 0])
    segment_BT = jnp.asarray(np.arange(20)[None] < count[:, None], jnp.int32)
    out, after = chunked(tokens, segment_BT, state)
    for found, exact in zip((out, after), wanted(tokens, segment_BT, state), strict=True):
        close(found, exact)
    assert np.asarray(after[2]).tobytes() == np.asarray(state[2]).tobytes()
    here, live = jax.tree.map(lambda x: x[:, 0], tokens), jnp.asarray([True, False, True])
    _, stepped = step(here, state, live)
    assert np.asarray(stepped[1]).tobytes() == np.asarray(state[1]).tobytes()
    assert (np.asarray(stepped[0]) != np.asarray(state[0])).any()


@pytest.mark.parametrize("size", [1, 2, 7, 16, 33])
def test_the_inverse_of_a_unit_lower_triangular_matrix_and_its_gradient(size):
    rng = np.random.default_rng(size)
    a, weight = (np.tril(rng.uniform(-1, 1, (3, 2, size, size)), -1), rng.standard_normal((3, 2, size, size)))
    inverse, backward = jax.vjp(unit_lower_inverse, jnp.asarray(a, jnp.float32))
    exact = np.linalg.inv(np.eye(size) + a)
    close(inverse, exact, 1e-5)
    transposed = exact.swapaxes(-1, -2)
    gradient = -np.tril(transposed @ weight @ transposed, -1)
    close(backward(jnp.asarray(weight, jnp.float32))[0], gradient, 1e-5)


def test_a_convolution_reads_its_segment_and_what_comes_before_the_row():
    rng, C, J = np.random.default_rng(0), 5, 3
    segment_BT = rows()
    x, weight = rng.standard_normal((*segment_BT.shape, C)), rng.standard_normal((C, J + 1))
    before = rng.standard_normal((len(segment_BT), J, C))
    y, after = convolve(*(jnp.asarray(each, jnp.float32) for each in (x, weight)), segment_BT, jnp.asarray(before))
    for row, segments in enumerate(np.asarray(segment_BT)):
        first = segments[0]
        inputs, numbers = np.concatenate([before[row], x[row]]), np.concatenate([[first] * J, segments])
        for t in range(50):
            total = sum(weight[:, tap] * inputs[t + tap] for tap in range(J + 1) if numbers[t + tap] == numbers[t + J])
            if segments[t]:
                np.testing.assert_allclose(y[row, t], total, atol=1e-5)
        count = (segments > 0).sum()
        np.testing.assert_array_equal(after[row], inputs[count : count + J].astype(np.float32))
    none, _ = convolve(jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32), segment_BT)
    zeros, _ = convolve(*(jnp.asarray(each, jnp.float32) for each in (x, weight)), segment_BT, jnp.zeros_like(before))
    np.testing.assert_array_equal(none, zeros)


def test_a_convolution_of_single_tokens_is_that_of_the_row():
    rng, C, J = np.random.default_rng(0), 5, 3
    x, weight = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((2, 9, C), (C, J + 1)))
    y, after = convolve(x, weight, jnp.ones((2, 9), jnp.int32))
    state = jnp.zeros((2, J, C), jnp.bfloat16)
    for t in range(9):
        one, moved = convolve(x[:, t : t + 1], weight, jnp.ones((2, 1), jnp.int32), state)
        _, kept = convolve(x[:, t : t + 1], weight, jnp.zeros((2, 1), jnp.int32), state)
        np.testing.assert_array_equal(kept, state)
        np.testing.assert_array_equal(one[:, 0], y[:, t])
        state = moved
    np.testing.assert_array_equal(state, after)

"""Conversations against a slow reference that runs every turn from scratch, and their episodes on the host."""

import functools
import pickle
import time
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from api import (
    Inputs,
    Prompts,
    assemble,
    begin_conversation,
    check_batch,
    forward,
    interact,
    make_inference_weights,
    make_mesh,
    make_sampler,
    pad_replies,
    reward_completions,
    reward_metrics,
    sample_conversations,
    sample_tokens,
    sampler,
    transformer,
)
from eight_bits import rounded

from gspax import config, losses
from gspax.config import Grading, Sampling, Turns
from gspax.data import CharChat, Problem
from gspax.errors import UserError
from gspax.rewards.calls import concurrent
from gspax.rewards.environments import Step
from gspax.rewards.scores import reward_calls
from gspax.sampler import stops

P, G = 3, 2
STOPS = (0, 1, 2, 3)
LENGTHS = np.array([3, 8, 5], np.int32)
IDS = np.array([14, 16, 18], np.uint32)  # of the first conversation of each prompt


@functools.partial(jax.jit, static_argnames=("model", "sampling"))
def from_scratch(model, params, rollout, key, sampling):
    """By whole forward passes: the log-prob of every token, the token sampled at each position, and the routing."""
    total_B = rollout.prompt_length_B + rollout.length_B
    T = rollout.tokens_BT.shape[1]
    segment_BT = (jnp.arange(T)[None] < total_B[:, None]).astype(jnp.int32)
    outputs = forward(params, tiny.settings(model), Inputs(rollout.tokens_BT, segment_BT))
    hidden_BTD, routing = transformer.apply(params, model, rollout.tokens_BT, segment_BT, mesh=tiny.one_device())
    logits_BTV = transformer.logits(params, hidden_BTD, model.logit_cap)
    id_B = np.repeat(IDS, G) + np.tile(np.arange(G, dtype=np.uint32), P)

    def sample(id_, position, logits_V):
        at = jax.random.fold_in(jax.random.fold_in(key, id_), position)
        return sample_tokens(logits_V[None], at[None], sampling)[0][0]

    by_position = jax.vmap(sample, in_axes=(None, 0, 0))
    sampled_BT = jax.vmap(by_position, in_axes=(0, None, 0))(id_B, jnp.arange(1, T), logits_BTV[:, :-1])
    return outputs.logp_BT, jnp.pad(sampled_BT, ((0, 0), (1, 0))), routing


LONG = (100, 50)  # positions in several segments of the cache, and replies of several blocks
MODELS = tiny.CONFIGS | tiny.OTHERS | {"delta": tiny.DELTA}
# A layer of each kind: the whole models compile twice or three times as long.
FEW = {name: tiny.first_layers(MODELS[name], 2) for name in ("dense", "moe", "sinks and biased experts")}
FEW |= {"latent attention": tiny.first_layers(MODELS["latent attention"], 2)}
FEW |= {"delta": replace(tiny.DELTA, num_hidden_layers=2, delta_layers=(0,))}
EIGHT_BITS = ("moe", "tied", "some layers slide", "latent attention")


@pytest.mark.parametrize(
    ("name", "size", "dtypes"),
    [
        ("dense", (60, 16), ("int8", "int8")),
        ("moe", (60, 16), ("auto", "auto")),
        ("delta", (60, 16), ("auto", "auto")),
        pytest.param("delta", (60, 16), ("int8", "auto"), marks=pytest.mark.slow),
        ("sinks and biased experts", (60, 16), ("auto", "auto")),
        pytest.param("delta", LONG, ("auto", "auto"), marks=pytest.mark.slow),
        pytest.param("delta", LONG, ("int8", "auto"), marks=pytest.mark.slow),
        ("latent attention", (60, 16), ("auto", "auto")),
        *(
            pytest.param(name, LONG, (dtype, cached), marks=pytest.mark.slow)
            for name, dtype, cached in (
                *((name, "auto", "auto") for name in MODELS if name != "delta"),
                *((name, "int8", cached) for name in EIGHT_BITS for cached in ("auto", "int8")),
            )
        ),
    ],
)
def test_conversations_are_those_of_whole_forward_passes(name, size, dtypes):
    """Conversations that end early, and a row without a reply beside others with one; in 8 bits, of rounded weights."""
    model = (MODELS if size == LONG else FEW)[name]
    rng, key = np.random.default_rng(0), jax.random.key(1)
    sampling = Sampling(prompts=P, group=G, max_prompt_tokens=8, max_tokens=size[0], kv_cache_dtype=dtypes[1])
    whole = rounded(tiny.params(model), model) if dtypes[0] == "int8" else tiny.params(model)
    options = tiny.options(model, sampling, STOPS, turns=True, keep_experts=True)
    params = make_inference_weights(tiny.params(model), model, tiny.one_device(), weights_dtype=dtypes[0])
    tokens_PS = rng.integers(4, 23, (P, 8)).astype(np.int32)
    state, _ = sampler.start(params, Prompts(tokens_PS, LENGTHS, IDS), key, options=options)
    appended = [[] for _ in range(P * G)]
    for longest in (8, size[1]):
        state, _ = sampler.advance_chunk(params, state, key, 0, options=options)
        assert not state.rows.active_W.any()
        replies = [rng.integers(4, 23, rng.integers(1, longest)).tolist() if row != 1 else [] for row in range(P * G)]
        room_B = size[0] - 1 - np.asarray(state.rows.length_B)  # beside the token after the reply
        replies = [reply[: max(room, 0)] for reply, room in zip(replies, room_B.tolist(), strict=True)]
        for row, reply in enumerate(replies):
            appended[row] += reply
        state, _ = sampler.resume(params, state, pad_replies(replies), key, 0, options=options)
    state, _ = sampler.advance_chunk(params, state, key, 0, options=options)
    rollout = assemble(tokens_PS, state, options=options)

    logp_BT, sampled_BT, routing = from_scratch(model, whole, rollout, key, sampling)
    mask_BT = np.asarray(rollout.mask_BT)
    error = np.abs(rollout.logp_BT - logp_BT)[mask_BT]
    total_B = np.asarray(rollout.prompt_length_B + rollout.length_B)
    run_BT = np.arange(mask_BT.shape[1])[None] < total_B[:, None] - 1
    if dtypes[1] == "int8":  # the rounding of keys and values, which whole passes do not have
        other_BLTA = np.sort(rollout.expert_BLTA, -1) != np.sort(routing.expert.swapaxes(0, 1), -1)
        rerouted_BT = np.pad((run_BT[:, None, :, None] & other_BLTA).any((1, 3))[:, :-1], ((0, 0), (1, 0)))
        rerouted = rerouted_BT[mask_BT]  # by that rounding, so that the output jumps
        assert rerouted.mean() < 0.05 and error[~rerouted].max() < 0.1, (rerouted.mean(), error[~rerouted].max())
        assert 1e-4 < error.mean() < 0.03
    else:
        # a gated norm amplifies the rounding of an output that is nearly 0
        assert error.max() < (3e-4 if model.delta is not None else 1e-5 if dtypes[0] == "auto" else 1e-4)
        assert np.median(error) < 3e-6
        np.testing.assert_array_equal(np.asarray(rollout.tokens_BT)[mask_BT], np.asarray(sampled_BT)[mask_BT])
        experts = np.where(run_BT[None, ..., None], routing.expert, model.num_experts)
        np.testing.assert_array_equal(np.asarray(rollout.expert_BLTA).swapaxes(0, 1), experts)
    assert not np.asarray(rollout.logp_BT)[~mask_BT].any()
    for row in range(P * G):
        start = LENGTHS[row // G]
        inside = slice(start, start + int(rollout.length_B[row]))
        tokens, own = np.asarray(rollout.tokens_BT)[row, inside], mask_BT[row, inside]
        np.testing.assert_array_equal(tokens[~own], appended[row])
        assert int(rollout.reply_B[row]) == len(appended[row])
        assert not np.asarray(rollout.tokens_BT)[row, inside.stop :].any()


def test_a_conversation_that_waits_on_is_not_changed_by_the_replies_to_others():
    """Replies to the even rows first, to the others after a chunk; or to all at once."""
    model, rng, key = tiny.CONFIGS["dense"], np.random.default_rng(0), jax.random.key(1)
    options = tiny.options(model, Sampling(prompts=P, group=G, max_prompt_tokens=8, max_tokens=60), STOPS, turns=True)
    params = make_inference_weights(tiny.params(model), model, tiny.one_device())
    tokens_PS = rng.integers(4, 23, (P, 8)).astype(np.int32)
    replies = pad_replies([rng.integers(4, 23, 1 + row % 5).tolist() for row in range(P * G)])
    rollouts = []
    even_B = np.arange(P * G) % 2 == 0
    for parts in ([even_B | ~even_B], [even_B, ~even_B]):
        state, _ = sampler.start(params, Prompts(tokens_PS, LENGTHS, IDS), key, options=options)
        state, progress = sampler.advance_chunk(params, state, key, 0, options=options)
        waits_B = np.asarray(progress.waiting_B)
        for now_B in parts:
            given = replies._replace(count_B=np.where(now_B, replies.count_B, -1))
            state, progress = sampler.resume(params, state, given, key, 0, options=options)
            assert not np.asarray(state.rows.finished_B)[waits_B].any()
            assert np.asarray(progress.waiting_B)[waits_B & ~now_B].all() or now_B is not parts[0]
            state, _ = sampler.advance_chunk(params, state, key, 0, options=options)
        rollouts.append(jax.device_get(assemble(tokens_PS, state, options=options)))
    assert waits_B[even_B].any() and waits_B[~even_B].any()
    once, apart = rollouts
    for name in ("tokens_BT", "mask_BT", "length_B", "reply_B"):
        np.testing.assert_array_equal(getattr(once, name), getattr(apart, name), err_msg=name)
    np.testing.assert_allclose(once.logp_BT, apart.logp_BT, atol=1e-6)


# Episodes: an environment that counts, and a policy that is untrained

CHARS = CharChat("0123456789abcdefghijkl", user="{}", tool="k{}l")  # 23 ids; the last one is the stop


@dataclass(frozen=True)
class Counting:
    """Answers with the number of the turn; ends after `turns` of them."""

    turns: int = 3
    sleep: float = 0.0

    def reset(self, problem):
        return 0, [{"role": "user", "content": problem.prompt}]

    @concurrent(8)
    def step(self, state, message):
        if "a" in message:
            time.sleep(self.sleep)
        if message.startswith("b"):
            raise RuntimeError("the server is gone")
        done = state + 1 >= self.turns
        return Step(state + 1, [{"role": "tool", "content": str(state)}], 0.5, done, {"letters": len(message)})


def length_of(problem, completion):
    return float(len(completion))


PROBLEMS = [Problem(prompt="012", answer="x"), Problem(prompt="34567", answer="y")]
# a stop token about every fifth token, so that turns end
MODEL = replace(tiny.CONFIGS["dense"], vocab_size=23, initializer_range=0.02)


@functools.cache
def inference_weights(model, dtype="auto"):
    return make_inference_weights(tiny.params(model), model, tiny.one_device(), weights_dtype=dtype)


TURNS, LENIENT = Turns(), Grading(max_failed=1.0)


def hold(environment, turns=TURNS, grading=LENIENT, problems=PROBLEMS, mesh=None, ids=(3, 4), model=MODEL, **sampling):
    settings = {"prompts": len(problems), "group": 4, "max_prompt_tokens": 8, "max_tokens": 60} | sampling
    calls = reward_calls(length_of, grading)
    interaction = interact(environment, CHARS, calls, turns, grading)
    with calls, interaction.steps:
        key, dtype = jax.random.key(0), sampling.get("weights_dtype", "auto")
        if mesh is None:
            params = inference_weights(model, dtype)
        else:
            params = make_sampler(model, mesh, mesh, dtype).push(tiny.params(model))
        ready = [begin_conversation(problem, interaction) for problem in problems]
        sampling = Sampling(**settings)
        matcher = stops.make_matcher(CHARS, sampling, model.vocab_size)
        options = tiny.options(model, sampling, CHARS.stop_ids, mesh, matcher=matcher)
        rollout, started = sample_conversations(interaction, params, dict(enumerate(ready)), ids, key, options)
        return rollout, reward_completions(problems, rollout, tokenizer=CHARS, calls=calls, started=started)


def test_turns_replies_and_rewards_of_an_episode():
    rollout, rows = hold(Counting())
    assert any(len(row.turns.spans) == 3 for row in rows) and any(row.error for row in rows)
    for index, row in enumerate(rows):
        start = rollout.prompt_length_B[index]
        tokens = np.asarray(rollout.tokens_BT)[index, start : start + rollout.length_B[index]].tolist()
        mask = np.asarray(rollout.mask_BT)[index, start : start + rollout.length_B[index]]
        position, texts = 0, []
        for number, (first, end) in enumerate(row.turns.spans):
            if number:
                reply = f"k{number - 1}l"
                assert tokens[position:first] == CHARS.encode_completion(reply)
                texts.append(str(number - 1))
            assert first == position + (3 if number else 0) and mask[first:end].all()
            texts.append(CHARS.decode(tokens[first:end]))
            position = end
        assert position == len(tokens) and row.texts.completion == "\n".join(texts)
        assert row.length == mask.sum() == sum(end - first for first, end in row.turns.spans)
        assert rollout.reply_B[index] == len(tokens) - row.length
        failed = texts[-1].startswith("b") and bool(rollout.finished_B[index] or row.error)
        assert bool(row.error) == failed
        if failed:
            assert row.error.startswith("RuntimeError: the server is gone (tests/") and row.reward == 0.0
            assert row.turns.rewards == (0.0,) * len(row.turns.spans)
        else:
            stopped = [tokens[end - 1] == 22 for _, end in row.turns.spans]
            assert row.turns.rewards == (*[0.5] * (len(stopped) - 1), 0.5 * stopped[-1] + len(texts[-1]))
            assert row.reward == sum(row.turns.rewards)
            assert row.finished == (len(stopped) == 3 and stopped[-1])
    metrics = reward_metrics(rows, 4)
    assert metrics["rollout/turns"] == np.mean([len(row.turns.spans) for row in rows])
    assert metrics["reward/failed"] == np.mean([bool(row.error) for row in rows])
    assert metrics["rollout/letters"] == np.mean([row.turns.environment.get("letters", 0) for row in rows])


def test_a_stop_string_ends_a_turn():
    """The token that completes it belongs to the turn; the end of the turn is added before the reply, unsampled."""
    stop, ended = ("5", "01", "k0"), 0
    rollout, rows = hold(Counting(), stop=stop, slots=3)
    for index, row in enumerate(rows):
        start = rollout.prompt_length_B[index]
        tokens = np.asarray(rollout.tokens_BT)[index, start : start + rollout.length_B[index]].tolist()
        mask = np.asarray(rollout.mask_BT)[index, start : start + rollout.length_B[index]]
        position = 0
        for number, (first, end) in enumerate(row.turns.spans):
            text = CHARS.decode(tokens[first:end])
            assert not any(string in text[:-1] for string in stop), "no token follows a stop string"
            if number + 1 < len(row.turns.spans):
                assert tokens[end - 1] == CHARS.turn_end or any(string in text for string in stop)
            if number:
                cut = [] if tokens[position - 1] == CHARS.turn_end else [CHARS.turn_end]
                assert tokens[position:first] == [*cut, *CHARS.encode_completion(f"k{number - 1}l")]
                assert not mask[position:first].any()
                ended += bool(cut)
            position = end
    assert ended > 2


def test_a_conversation_depends_on_its_id_alone():
    """Alone, in chunks of 3 tokens: the same tokens, and log-probs up to rounding."""
    rollout, rows = hold(Counting())
    alone, of_alone = hold(Counting(), problems=PROBLEMS[1:], ids=(4,))
    chunked, of_chunked = hold(Counting(), chunk=3)
    np.testing.assert_array_equal(chunked.tokens_BT, rollout.tokens_BT)
    np.testing.assert_array_equal(alone.tokens_BT, np.asarray(rollout.tokens_BT)[4:])
    np.testing.assert_allclose(alone.logp_BT, np.asarray(rollout.logp_BT)[4:], atol=1e-5)
    np.testing.assert_allclose(chunked.logp_BT, rollout.logp_BT, atol=1e-5)
    assert [row.turns.spans for row in of_chunked] == [row.turns.spans for row in rows]
    assert [row.reward for row in of_alone] == [row.reward for row in rows[4:]]


@pytest.mark.parametrize(
    ("slots", "chunk", "drafts", "model"),
    [
        (3, 0, 0, MODEL),
        pytest.param(1, 0, 0, MODEL, marks=pytest.mark.slow),
        pytest.param(3, 4, 0, replace(MODEL, sliding_window=3, sliding_layers=(0, 2)), marks=pytest.mark.slow),
        pytest.param(0, 0, 3, MODEL, marks=pytest.mark.slow),
        pytest.param(3, 4, 3, replace(MODEL, sliding_window=3, sliding_layers=(0, 2)), marks=pytest.mark.slow),
    ],
)
def test_conversations_do_not_depend_on_the_slots(slots, chunk, drafts, model):
    """With fewer slots than prompts, or than samples of a prompt, and with drafts from the own text."""
    rollout, rows = hold(Counting(), model=model)
    few, of_few = hold(Counting(), slots=slots, chunk=chunk, drafts=drafts, model=model)
    assert not drafts or few.passes_B.sum() < np.sum(rollout.length_B - rollout.reply_B), "some drafts are right"
    for name in ("tokens_BT", "mask_BT", "length_B", "finished_B", "reply_B"):
        np.testing.assert_array_equal(getattr(few, name), getattr(rollout, name), err_msg=name)
    np.testing.assert_allclose(few.logp_BT, rollout.logp_BT, atol=1e-5)
    assert of_few == rows


def test_a_waiting_slot_keeps_its_conversation_and_that_of_a_finished_one_takes_the_next():
    model, key, reply = tiny.CONFIGS["dense"], jax.random.key(1), [5, 6, 7]
    sampling = Sampling(prompts=P, group=G, max_prompt_tokens=8, max_tokens=60, slots=2)
    options = tiny.options(model, sampling, STOPS, turns=True)
    params = make_inference_weights(tiny.params(model), model, options.mesh)
    tokens_PS = np.random.default_rng(0).integers(4, 23, (P, 8)).astype(np.int32)
    state, progress = sampler.start(params, Prompts(tokens_PS, LENGTHS, IDS), key, options=options)
    held = [state.rows.sample_W.tolist()]
    for replies in ({0: reply}, {2: reply}, {}):
        state, progress = sampler.advance_chunk(params, state, key, 0, options=options)
        waiting, lengths = np.flatnonzero(progress.waiting_B), progress.length_B
        assert sorted(waiting) == sorted(held[-1]) and not progress.ended_B[waiting].any()
        padded = pad_replies([replies.get(row, []) for row in range(P * G)])
        state, progress = sampler.resume(params, state, padded, key, 0, options=options)
        for row in waiting:
            assert progress.ended_B[row] == (row not in replies)
            assert progress.length_B[row] == lengths[row] + (len(reply) + 1 if row in replies else 0)
        held.append(state.rows.sample_W.tolist())
    assert held == [[0, 1], [0, 2], [3, 2], [4, 5]]
    assert progress.left


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["auto", "int8"])
@pytest.mark.parametrize(
    "axes", [{"data": 2, "context": 2, "tensor": 2}, {"fsdp": 8}], ids=["all axes", "split groups"]
)
def test_conversations_on_a_mesh_are_those_of_one_device(axes, dtype):
    """Slots over rows and positions, heads over devices; and more devices than prompts."""
    even, dtypes = replace(MODEL, vocab_size=24), {"weights_dtype": dtype, "kv_cache_dtype": dtype}
    rollout, rows = hold(Counting(), model=even, **dtypes)
    mesh = make_mesh(config.Mesh(**{"fsdp": 1} | axes), jax.devices()[:8])
    on_mesh, others = hold(Counting(), model=even, mesh=mesh, **dtypes)
    np.testing.assert_array_equal(on_mesh.tokens_BT, rollout.tokens_BT)
    np.testing.assert_allclose(on_mesh.logp_BT, rollout.logp_BT, atol=1e-5 if dtype == "auto" else 1e-3)
    assert [row.turns.rewards for row in others] == [row.turns.rewards for row in rows]


def test_limits_of_turns_and_tokens_cut_conversations():
    rollout, rows = hold(Counting(turns=9), turns=Turns(limit=2))
    assert {len(row.turns.spans) for row in rows} <= {1, 2}
    cut = [row for row in rows if len(row.turns.spans) == 2]
    assert cut and not any(row.finished for row in cut)
    rollout, rows = hold(Counting(turns=9), turns=Turns(limit=9), max_tokens=12)
    assert (np.asarray(rollout.length_B) <= 12).all() and not any(row.finished for row in rows if not row.error)


def test_a_conversation_ends_with_the_token_after_a_reply_that_leaves_room_for_one():
    alone = {"problems": PROBLEMS[:1], "ids": (3,), "group": 1}
    _, (row,) = hold(Counting(), **alone)
    (_, end), *others = row.turns.spans
    assert others, "the environment has replied"
    rollout, (row,) = hold(Counting(), max_tokens=end + len("k0l") + 1, **alone)
    assert row.turns.spans == ((0, end), (end + 3, end + 4)) and rollout.length_B.tolist() == [end + 4]
    assert not row.finished and not row.error and not rollout.finished_B.any()


def test_a_late_step_costs_its_own_conversation():
    _, prompt = hold(Counting(turns=2))
    _, rows = hold(Counting(turns=2, sleep=30.0), grading=Grading(max_failed=1.0, timeout=0.3))
    late = [index for index, row in enumerate(rows) if "late: no answer after 0.3 s" in row.error]
    assert late
    others = [index for index in range(len(rows)) if index not in late]
    assert [rows[index].reward for index in others] == [prompt[index].reward for index in others]


def test_too_many_failures_end_the_run_with_a_sentence():
    _, rows = hold(Counting())
    said = (
        r"^environment: its step failed for \d of 8 completions "
        r".*the server is gone \(tests/sampler/test_conversations.py:\d+\)"
    )
    with reward_calls(length_of, Grading(max_failed=0.0)) as calls, pytest.raises(UserError, match=said):
        check_batch(rows, calls)


def test_a_failing_reset_is_one_sentence():
    class Broken(Counting):
        def reset(self, problem):
            raise KeyError("gone")

    with pytest.raises(UserError, match=r"^environment: reset raised KeyError: 'gone' \(.*\) for the prompt '012'$"):
        hold(Broken())


def test_states_are_picklable_and_steps_are_pure():
    step = Counting().step(0, "c")
    assert pickle.loads(pickle.dumps(step)) == step == Counting().step(0, "c")


def test_a_mask_with_holes_is_only_a_mask_to_the_losses():
    """GSPO on a rollout row with replies is GSPO on the sampled tokens next to one another."""
    rng = np.random.default_rng(0)
    mask = np.array([[0, 0, 1, 1, 0, 0, 1, 1, 1, 0]], bool)
    logp, old = (jnp.asarray(rng.normal(size=mask.shape), jnp.float32) for _ in range(2))
    close = jnp.asarray(mask[mask][None])
    holes = losses.gspo(logp, old, jnp.ones(1), jnp.asarray(mask), clip_low=5.0, clip_high=50.0)
    whole = losses.gspo(logp[mask][None], old[mask][None], jnp.ones(1), close, clip_low=5.0, clip_high=50.0)
    np.testing.assert_allclose(holes.value, whole.value, rtol=1e-6)

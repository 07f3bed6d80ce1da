"""A dialogue against whole forward passes over the conversation as one row of tokens."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from api import make_inference_weights, make_mesh, sample_tokens, transformer

from gspax.config import Mesh, Sampling
from gspax.data import CharChat, CharTokenizer
from gspax.errors import UserError
from gspax.losses import token_logp
from gspax.tools.dialogue import Dialogue

KEY = jax.random.key(5)
CHAT = CharChat("abcdefghijklmnopqrst#", user="{}#")  # with the stop id 22 ids
MODEL = tiny.first_layers(tiny.CONFIGS["dense"], 1)
SAMPLING = Sampling(max_prompt_tokens=8, max_tokens=40)
STOPS = (0, 1, CHAT.turn_end)


def dialogue(tokenizer=CHAT, mesh=None, **changes):
    mesh = mesh or tiny.one_device()
    weights = make_inference_weights(tiny.params(MODEL), MODEL, mesh)
    return Dialogue(weights, tokenizer, tiny.options(MODEL, replace(SAMPLING, **changes), STOPS, mesh), KEY)


def last(answers):
    """The whole answer, after each beginning of it was longer than the one before by a token."""
    answers = list(answers)
    assert all(answer == answers[-1][: number + 1] for number, answer in enumerate(answers))
    return answers[-1]


def check_answer(row, answer, logp, temperature):
    """The answer's tokens are those that the logits of the whole row give at their positions, and so are log-probs."""
    tokens_BT, whole = np.zeros((1, 48), np.int32), [*row, *answer]  # one length for all, so that one program runs
    tokens_BT[0, : len(whole)] = whole
    expected_T, logp_T = expect(tokens_BT, len(whole), Sampling(temperature=temperature))
    assert answer == expected_T[len(row) - 1 : len(whole) - 1].tolist()
    np.testing.assert_allclose(logp, logp_T[len(row) : len(whole)], rtol=1e-3, atol=1e-4)


@functools.partial(jax.jit, static_argnums=2)
def expect(tokens_BT, length, sampling):
    """The token that follows each position of a row, and the log-prob of each token after those before."""
    segment_BT = (jnp.arange(tokens_BT.shape[1])[None] < length).astype(jnp.int32)
    hidden_BTD, _ = transformer.apply(tiny.params(MODEL), MODEL, tokens_BT, segment_BT, mesh=tiny.one_device())
    logits_BTV = jnp.einsum("btd,dv->btv", hidden_BTD, transformer.head(tiny.params(MODEL)))
    key = jax.random.fold_in(KEY, 0)
    key_T = jax.vmap(lambda position: jax.random.fold_in(key, position))(jnp.arange(1, tokens_BT.shape[1] + 1))
    expected_T, _ = sample_tokens(logits_BTV[0], key_T, sampling)
    return expected_T, token_logp(logits_BTV / (sampling.temperature or 1), tokens_BT)[0]


def test_answers_continue_the_conversation():
    """Turns that end with any stop token, and turns that are cut, get the turn's end with the next message."""
    talk, row, ends = dialogue(), [], set()
    for message, temperature, limit in (("abc", 1.0, 1), ("hello", 0.0, 3), ("de", 1.0, 1), ("tt", 1.0, 9)):
        ids = last(talk.ask(message, sampling=replace(SAMPLING, temperature=temperature), limit=limit))
        if row and row[-1] in STOPS:
            row.pop()  # another stop id than the one before a message
        if row:
            row.append(CHAT.turn_end)
        row += CHAT.encode_reply([{"role": "user", "content": message}])
        check_answer(row, ids, talk.logp(), temperature)
        row += ids
        ends.add(ids[-1] if ids[-1] in STOPS else None)
    assert None in ends and ends - {None, CHAT.turn_end}, ends


class Tooled(CharChat):
    def with_tools(self, tools):
        return replace(self, user=tools[0]["user"])


def test_later_messages_are_written_with_the_tools_of_the_first():
    talk = dialogue(Tooled("abcdefghijklmnopqrst#", user="{}#"))
    talk.tools = ({"user": "##{}#"},)
    assert talk._encode("de", continues=True) == [CHAT.turn_end, *CHAT.encode_completion("##de#")]


def test_devices_with_rows_of_their_own_give_the_same_answer():
    talks = [dialogue(), dialogue(mesh=make_mesh(Mesh()))]
    for message in ("abc", "hello"):
        one, eight = (last(talk.ask(message, sampling=SAMPLING, limit=5)) for talk in talks)
        assert one == eight and len(one) <= 5


def test_a_caller_may_stop_an_answer():
    talk, again = dialogue(), dialogue()
    for ids in talk.ask("abc", sampling=SAMPLING, limit=9):
        if len(ids) == 3:
            break
    assert ids == last(again.ask("abc", sampling=SAMPLING, limit=3))
    assert last(talk.ask("de", sampling=SAMPLING, limit=4)) == last(again.ask("de", sampling=SAMPLING, limit=4))


def test_a_conversation_that_is_full_is_one_sentence_and_starts_again():
    talk = dialogue(max_tokens=12)
    last(talk.ask("abc", sampling=SAMPLING, limit=8))
    with pytest.raises(UserError, match="the conversation is full: wanted at most 12 tokens after its first message, "):
        last(talk.ask("abcdefgh", sampling=SAMPLING, limit=8))
    talk.reset()
    assert last(talk.ask("abc", sampling=SAMPLING, limit=8))


def test_without_conversations_every_message_stands_alone_and_has_its_own_noise():
    tokenizer = CharTokenizer(CHAT.alphabet)
    talk = dialogue(tokenizer=tokenizer)
    greedy = replace(SAMPLING, temperature=0.0)
    first, second = (last(talk.ask("abc", sampling=greedy, limit=6)) for _ in range(2))
    assert first == second
    check_answer(tokenizer.encode("abc"), first, talk.logp(), 0.0)
    sampled = {tuple(last(talk.ask("abc", sampling=SAMPLING, limit=6))) for _ in range(4)}
    assert len(sampled) > 1


@pytest.mark.parametrize(("message", "sentence"), [("abC", "'C' of 'abC' is not in"), ("a" * 9, "prompt of 1 to 8")])
def test_a_message_that_cannot_be_a_prompt_is_one_sentence(message, sentence):
    with pytest.raises(UserError, match=sentence):
        last(dialogue(tokenizer=CharTokenizer(CHAT.alphabet)).ask(message, sampling=SAMPLING, limit=1))

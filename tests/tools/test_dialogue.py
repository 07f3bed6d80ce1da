"""A dialogue against whole forward passes over the conversation as one row of tokens."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from gspax.config import Mesh, Sampling
from gspax.data import CharChat, CharTokenizer
from gspax.errors import UserError
from gspax.losses import token_logp
from gspax.model import transformer
from gspax.parallel.sharding import make_mesh
from gspax.sampler.inference_weights import make_inference_weights
from gspax.sampler.token_sampling import sample_tokens
from gspax.tools.dialogue import Dialogue

KEY = jax.random.key(5)
CHAT = CharChat("abcdefghijklmnopqrst#", user="{}#")  # with the stop id 22 ids
SAMPLING = Sampling(max_prompt_tokens=8, max_tokens=40)
STOPS = (0, 1, CHAT.turn_end)


def dialogue(tokenizer=CHAT, mesh=None, **changes):
    model, mesh = tiny.CONFIGS["dense"], mesh or tiny.one_device()
    weights = make_inference_weights(tiny.params(model), model, mesh)
    return Dialogue(weights, tokenizer, tiny.options(model, replace(SAMPLING, **changes), STOPS, mesh), KEY)


def last(answers):
    """The whole answer, after each beginning of it was longer than the one before by a token."""
    answers = list(answers)
    assert all(answer == answers[-1][: number + 1] for number, answer in enumerate(answers))
    return answers[-1]


def check_answer(row, answer, logp, temperature):
    """The answer's tokens are those that the logits of the whole row give at their positions, and so are log-probs."""
    model, sampling = tiny.CONFIGS["dense"], Sampling(temperature=temperature)
    tokens_BT = jnp.array([[*row, *answer]])
    hidden_BTD, _ = transformer.apply(
        tiny.params(model), model, tokens_BT, jnp.ones_like(tokens_BT), mesh=tiny.one_device()
    )
    logits_BTV = jnp.einsum("btd,dv->btv", hidden_BTD, transformer.head(tiny.params(model)))
    key_B = [jax.random.fold_in(jax.random.fold_in(KEY, 0), position) for position in range(len(row), tokens_BT.size)]
    expected, _ = sample_tokens(logits_BTV[0, len(row) - 1 : -1], jnp.stack(key_B), sampling)
    assert answer == expected.tolist()
    expected_BT = token_logp(logits_BTV / (temperature or 1), tokens_BT)
    np.testing.assert_allclose(logp, expected_BT[0, len(row) :], rtol=1e-3, atol=1e-4)


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

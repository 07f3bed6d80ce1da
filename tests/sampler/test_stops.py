"""A stop string ends a sample at the token that completes it, as a decoder that looks at the text would find it."""

import functools
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from api import Answer, CompletionRequest, check_answer, make_inference_weights, make_mesh, sampler
from small_experiment import experiment

from gspax.config import Mesh, Sampling
from gspax.data import CharTokenizer, hf_tokenizer
from gspax.data.token_bytes import read_token_bytes
from gspax.errors import UserError
from gspax.experiment import validate
from gspax.sampler.stops import always_stopping, find_stop, make_matcher, stop_ids

QWEN = Path(__file__).parents[3] / "shared" / "data" / "qwen3_tokenizer"
LETTERS = CharTokenizer("abcdefghijklmnopqrstuv")  # one fewer than tiny's vocabulary: its last id is the stop token
STRINGS = ("ab", "bcb", "ccd", "dd", "a", "éa\n", "\n\n", "cbcd")
SAMPLING = Sampling(group=3, max_prompt_tokens=16, max_tokens=12)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [2, 2]]


def first_stop(tokenizer, ids, strings):
    """The slow reference: decode after each token."""
    for count in range(1, len(ids) + 1):
        if any(string in tokenizer.decode(ids[:count]) for string in strings):
            return count
    return 0


def matcher_of(tokenizer, strings, size=None):
    return make_matcher(tokenizer, Sampling(stop=strings), size or tokenizer.vocab_size)


def test_the_automaton_stops_where_the_decoded_text_first_holds_a_stop_string():
    rng, tokenizer, found = np.random.default_rng(0), CharTokenizer("abcdé\n"), 0
    for _ in range(200):
        strings = tuple(rng.choice(STRINGS, rng.integers(1, 4), replace=False).tolist())
        ids = rng.integers(0, 6, 20).tolist()
        want = first_stop(tokenizer, ids, strings)
        assert find_stop(ids, matcher_of(tokenizer, strings, 9)) == want, (strings, tokenizer.decode(ids))
        if not 0 < want <= 3:
            assert find_stop(ids[3:], matcher_of(tokenizer, strings, 9), ids[:3]) == max(0, want - 3)
        found += want > 0
    assert 100 < found < 200


@pytest.mark.skipif(not QWEN.exists(), reason="the Qwen3 tokenizer is not here")
def test_a_stop_string_is_found_across_the_tokens_of_a_byte_level_tokenizer():
    tokenizer, rng = hf_tokenizer(QWEN), np.random.default_rng(0)
    strings = ("\n\n", "Question:", "日本", "<|im_start|>", " 😀 ")
    matcher = matcher_of(tokenizer, strings, 151_936)
    texts = ["a\n", "\n", " \n\nb", "Quest", "ion:", "Question", ":", "日", "本語", "<|im_start|>", " 😀", " ", "é"]
    pieces = [i for text in texts for i in tokenizer.encode(text)]
    assert len(tokenizer.encode("Question:")) > 1
    found = 0
    for _ in range(60):
        ids = rng.choice(pieces, 30).tolist()
        want = first_stop(tokenizer, ids, strings)
        assert find_stop(ids, matcher) == want, tokenizer.decode(ids)
        found += want > 0
    assert 20 < found < 60
    assert set(tokenizer.encode("\n\n")) <= {*always_stopping(matcher)} and not {*tokenizer.encode("\n")} & {
        *always_stopping(matcher)
    }


def test_the_bytes_of_tokens_follow_from_the_decoder():
    space, ids = "\u2581", {"\u2581a": 0, "<0xC3>": 1, "<0xA9>": 2, "\u0120a": 3, "b\u2581c": 5}
    parts = [
        {"type": "Replace", "pattern": {"String": space}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}

    def read(decoder, first=False):
        return read_token_bytes(decoder, ids, 6, first=first, where="it")

    gemma = {"type": "Sequence", "decoders": parts}
    llama = {"type": "Sequence", "decoders": [*parts, strip]}
    assert read(gemma) == read(gemma, first=True) == read(llama)
    assert read(gemma) == [b" a", b"\xc3", b"\xa9", "\u0120a".encode(), b"", b"b c"]
    assert read(llama, first=True)[0] == b"a"
    assert read({"type": "Metaspace", "replacement": space, "prepend_scheme": "first"}, first=True)[0] == b"a"
    assert read({"type": "ByteLevel"})[3] == b" a"
    for other in ({"type": "WordPiece"}, None, {"type": "Sequence", "decoders": []}):
        with pytest.raises(UserError, match="wanted a decoder of bytes"):
            read(other)


@functools.cache
def generate(stop=(), own=(), turns=False, devices=1, **settings):
    config = replace(tiny.first_layers(tiny.TOGETHER["dense"], 1), vocab_size=24)
    sampling = replace(SAMPLING, stop=stop, stop_token_ids=own, **settings)
    mesh = make_mesh(Mesh(), jax.devices()[:devices])
    weights, key = make_inference_weights(tiny.params(config), config, mesh), jax.random.key(0)
    matcher = make_matcher(LETTERS, sampling, config.vocab_size)
    options = tiny.options(config, sampling, stop_ids(LETTERS, sampling), mesh, matcher=matcher, turns=turns)
    return jax.device_get(sampler.sample(weights, PROMPTS, range(4), key, options))


def completions(rollout):
    ends = rollout.prompt_length_B + rollout.length_B
    return [t[a:e].tolist() for t, a, e in zip(rollout.tokens_BT, rollout.prompt_length_B, ends, strict=True)]


def chosen_strings():
    """Stop strings of one, two and three letters out of what is sampled without any."""
    texts = [LETTERS.decode(ids) for ids in completions(generate())]
    long = [text for text in texts if len(text) > 8]
    return long[0][3:5], long[1][5:8], long[2][:1], long[3][1:3]


@pytest.mark.parametrize(
    "settings",
    [{}, {"slots": 5}, {"drafts": 3}, {"drafts": 2, "slots": 5, "chunk": 2}, {"devices": 4, "slots": 8, "chunk": 2}],
    ids=str,
)
def test_samples_end_at_the_token_that_completes_a_stop_string(settings):
    stop, plain = chosen_strings(), generate()
    own = completions(plain)[4][5]  # a stop token of the experiment
    rollout, by_string = generate(stop, (own,), **settings), 0
    for row, (got, full) in enumerate(zip(completions(rollout), completions(plain), strict=True)):
        counts = first_stop(LETTERS, full, stop), full.index(own) + 1 if own in full else 0
        count = min(filter(None, counts), default=0)
        assert got == (full[:count] if count else full)
        assert rollout.finished_B[row] == (count > 0 or plain.finished_B[row])
        by_string += 0 < counts[0] == count != counts[1]
        end = rollout.prompt_length_B[row] + rollout.length_B[row]
        np.testing.assert_allclose(rollout.logp_BT[row, :end], plain.logp_BT[row, :end], atol=1e-5)
        assert not rollout.tokens_BT[row, end:].any() and not rollout.mask_BT[row, end:].any()
    assert 3 <= by_string < 12


def test_an_answer_of_a_server_is_cut_at_the_token_that_completes_a_stop_string():
    matcher = matcher_of(LETTERS, ("bc", "d"))
    ask = CompletionRequest([1, 1], 4, 0, Sampling(), False, (22,), False, matcher=matcher, turn=[1])
    assert ask.server_stops() == [22, 3]
    logps = [-1.0, -2.0, -3.0, -4.0]
    assert check_answer(ask, Answer([2, 0, 0, 0], logps, False, None), "it")[:3] == ([2], [-1.0], True)
    assert check_answer(ask, Answer([0, 1, 2, 0], logps, False, None), "it")[:3] == ([0, 1, 2], logps[:3], True)
    assert check_answer(ask, Answer([0, 3], logps[:2], True, None), "it").stopped
    assert check_answer(ask, Answer([0, 0, 0, 1], logps, False, None), "it")[2] is False


class Plain:
    """A tokenizer of somebody else."""

    stop_ids, vocab_size = (10,), 11
    encode = decode = staticmethod(list)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"stop": ("",)}, "sampling.stop: wanted texts that are not empty and have no U+FFFD"),
        ({"stop": ("a" * 257,)}, "sampling.stop: wanted at most 256 bytes in all, got 257"),
        ({"stop": "ab"}, "sampling.stop: wanted"),
        ({"stop_token_ids": (99,)}, "sampling.stop_token_ids: wanted ids below the tokenizer's"),
    ],
)
def test_stop_strings_that_cannot_be_found_are_errors(settings, said):
    (found,) = validate(replace(experiment, sampling=replace(experiment.sampling, **settings)))
    assert found.startswith(said)


def test_a_tokenizer_without_bytes_has_no_stop_strings():
    sampling = replace(experiment.sampling, stop=("a",))
    found = validate(replace(experiment, sampling=sampling, tokenizer=Plain()))
    assert any("sampling.stop: wanted a tokenizer that can be hashed and says what" in each for each in found)

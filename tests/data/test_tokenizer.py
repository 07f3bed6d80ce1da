import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspax.data import CharTokenizer, hf_tokenizer

ALPHABET = "0123456789=+ aé"
QWEN3 = Path(__file__).parents[3] / "shared" / "data" / "qwen3_tokenizer"


@given(st.text(alphabet=ALPHABET))
def test_characters_come_back(text):
    tokenizer = CharTokenizer(ALPHABET)
    ids = tokenizer.encode(text)
    assert all(0 <= i < len(ALPHABET) for i in ids) and len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_ids_follow_the_alphabet_and_the_stop_id_is_last():
    tokenizer = CharTokenizer("ab=")
    assert tokenizer.encode("=ab") == [2, 0, 1]
    assert tokenizer.stop_ids == (3,)
    assert tokenizer.vocab_size == 4
    assert tokenizer == CharTokenizer("ab=") and hash(tokenizer) == hash(CharTokenizer("ab="))


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([], ""),
        ([0, 1, 3], "ab"),
        ([0, 3, 1], "a"),  # whatever stands after the stop id is padding
        ([3], ""),
        ([0, 7, 1], "a\N{REPLACEMENT CHARACTER}b"),  # the model has more rows than the tokenizer ids
        ([0, -1], "a\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_decode(ids, text):
    tokenizer = CharTokenizer("ab=")
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(np.array(ids, np.int32)) == text


def test_an_unknown_character_is_named():
    with pytest.raises(ValueError, match=r"character 'x' of '1x=' is not in the alphabet '01='"):
        CharTokenizer("01=").encode("1x=")


@pytest.mark.parametrize("alphabet", ["", "00", "abca"])
def test_an_alphabet_has_different_characters(alphabet):
    with pytest.raises(ValueError, match="different characters"):
        CharTokenizer(alphabet)


def test_encode_gives_python_integers():
    assert {type(i) for i in CharTokenizer("01").encode("0110")} == {int}


@pytest.fixture
def small(tmp_path):
    """A word-level tokenizer in a local folder, as `save_pretrained` writes one."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    words = {"<end>": 0, "one": 1, "two": 2, "?": 3, "<turn>": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<end>", "<turn>"])
    # one that would put <turn> in front of every text, if special tokens were added
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<turn> $A", special_tokens=[("<turn>", 4)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_a_local_folder_has_the_same_four_members(small):
    tokenizer = hf_tokenizer(small)
    assert tokenizer.encode("two one") == [2, 1]
    assert tokenizer.decode([2, 1]) == "two one"
    assert tokenizer.stop_ids == (0,)
    assert tokenizer.vocab_size == 5


def test_decode_ends_before_the_stop_id_and_keeps_other_special_tokens(small):
    assert hf_tokenizer(small).decode(np.array([2, 4, 1, 0, 2])) == "two <turn> one"


@pytest.mark.parametrize(("more", "expected"), [(4, (0, 4)), ([4, 0], (0, 4)), (None, (0,))])
def test_stop_ids_of_the_generation_settings_are_added(small, more, expected):
    (small / "generation_config.json").write_text(json.dumps({"eos_token_id": more}))
    assert hf_tokenizer(small).stop_ids == expected


def test_a_tokenizer_that_cannot_stop_is_refused(small):
    (small / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        _ = hf_tokenizer(small).stop_ids


def test_a_folder_without_a_tokenizer_is_refused_at_once(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"wanted a folder that holds a tokenizer\.json"):
        hf_tokenizer(tmp_path / "nowhere")


def test_naming_a_tokenizer_reads_nothing_and_equals_its_path(small):
    one, other = hf_tokenizer(small), hf_tokenizer(str(small))
    assert one == other and hash(one) == hash(other)
    assert set(vars(one)) == {"path"}


@pytest.mark.skipif(not QWEN3.is_dir(), reason="needs the Qwen3 tokenizer beside the checkout (shared/data)")
def test_qwen3():
    pytest.importorskip("transformers")
    tokenizer = hf_tokenizer(QWEN3)
    assert tokenizer.stop_ids == (151645,)
    assert tokenizer.vocab_size == 151669
    for text in ["3142=", "Ein Satz, 你好 🙂\n\n  x² = 4", " leading and trailing "]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = "<|im_start|>user\nhi<|im_end|>\n"
    assert tokenizer.encode(chat)[0] == 151644
    assert tokenizer.decode(tokenizer.encode(chat)) == "<|im_start|>user\nhi"

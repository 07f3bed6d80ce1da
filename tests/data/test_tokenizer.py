import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspax.data import CharTokenizer, hf_tokenizer
from gspax.data import tokenizer as module
from gspax.errors import UserError

ALPHABET = "0123456789=+ aé"
QWEN3 = Path(__file__).parents[3] / "shared" / "data" / "qwen3_tokenizer"


@given(st.text(alphabet=ALPHABET))
def test_characters_round_trip(text):
    tokenizer = CharTokenizer(ALPHABET)
    ids = tokenizer.encode(text)
    assert all(0 <= i < len(ALPHABET) for i in ids) and len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_completion(text) == ids


def test_ids_follow_the_alphabet_and_the_stop_id_comes_last():
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
        ([0, 3, 1], "a"),  # everything after the stop id is padding
        ([3], ""),
        ([0, 7, 1], "a\N{REPLACEMENT CHARACTER}b"),  # the model's vocabulary is larger than the tokenizer's
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
def test_repeated_characters_in_an_alphabet_are_rejected(alphabet):
    with pytest.raises(ValueError, match="different characters"):
        CharTokenizer(alphabet)


def test_encode_returns_python_integers():
    assert {type(i) for i in CharTokenizer("01").encode("0110")} == {int}


def configure(folder, **changes):
    """Write tokenizer_config.json."""
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"} | changes
    (folder / "tokenizer_config.json").write_text(json.dumps(content))


@pytest.fixture
def small(tmp_path):
    """A word-level tokenizer in a local folder, as written by `save_pretrained`."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    words = {"<end>": 0, "one": 1, "two": 2, "?": 3, "<turn>": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<end>", "<turn>"])
    # adding special tokens would put <turn> in front of every text
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<turn> $A", special_tokens=[("<turn>", 4)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    configure(tmp_path)
    return tmp_path


def test_a_tokenizer_from_a_folder_has_the_same_interface(small):
    tokenizer = hf_tokenizer(small)
    assert tokenizer.encode_completion("two one") == [2, 1]
    assert tokenizer.encode("two one") == tokenizer.encode("<turn> two one") == [4, 2, 1]  # as transformers
    assert tokenizer.decode([2, 1]) == "two one"
    assert tokenizer.stop_ids == (0,)
    assert tokenizer.vocab_size == 5


def test_decode_stops_before_the_stop_id_and_keeps_other_special_tokens(small):
    assert hf_tokenizer(small).decode(np.array([2, 4, 1, 0, 2])) == "two <turn> one"


@pytest.mark.parametrize(("more", "expected"), [(4, (0, 4)), ([4, 0], (0, 4)), (None, (0,))])
def test_stop_ids_of_the_generation_config_are_added(small, more, expected):
    (small / "generation_config.json").write_text(json.dumps({"eos_token_id": more}))
    assert hf_tokenizer(small).stop_ids == expected


@pytest.mark.parametrize(("eos", "expected"), [({"__type": "AddedToken", "content": "two"}, (2,)), ("<turn>", (4,))])
def test_the_end_of_sequence_token_is_read_in_either_form(small, eos, expected):
    configure(small, eos_token=eos)
    tokenizer = hf_tokenizer(small)
    assert tokenizer.stop_ids == expected == (tokenizer._tokenizer.eos_token_id,)


def test_tokens_only_in_tokenizer_config_are_counted(small):
    configure(small, eos_token="<bye>", added_tokens_decoder={"9": {"content": "<bye>"}})
    tokenizer = hf_tokenizer(small)
    assert tokenizer.vocab_size == 10 and tokenizer.stop_ids == (9,)


def test_a_unigram_vocabulary_is_counted(tmp_path):
    table = {"model": {"vocab": [["<unk>", 0.0], ["a", -1.5], ["b", -2.0]]}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    configure(tmp_path, eos_token="b")
    tokenizer = hf_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 3 and tokenizer.stop_ids == (2,)


def test_its_file_is_parsed_once(small, monkeypatch):
    read, read_object = [], module.read_object
    monkeypatch.setattr(module, "read_object", lambda path: read.append(path.name) or read_object(path))
    found = hf_tokenizer(small)
    _ = found.ids, found.added_tokens, found.vocab_size
    for first in (False, True):
        with pytest.raises(UserError, match="wanted a decoder of bytes"):
            found.token_bytes(4, first=first)
    assert read.count("tokenizer.json") == 1


def test_a_dry_run_does_not_need_transformers(small):
    code = (
        "import sys; from gspax.data import hf_tokenizer; t = hf_tokenizer(sys.argv[1]);"
        "assert (t.stop_ids, t.vocab_size) == ((0,), 5);"
        "sys.exit(f'imported {m}' if (m := {'transformers', 'tokenizers', 'jax'} & {*sys.modules}) else 0)"
    )
    subprocess.run([sys.executable, "-c", code, str(small)], check=True)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("tokenizer.json", '{"model": ', r"tokenizer\.json: cannot be read: Expecting value"),
        ("tokenizer.json", "[]", r"tokenizer\.json: wanted a JSON object, got \[\]"),
        ("tokenizer.json", '{"model": {}}', r"not in the form of a tokenizer: KeyError\('vocab'\)"),
        ("tokenizer.json", '{"model": {"vocab": {"a": 0}}, "added_tokens": [3]}', "not in the form of a tokenizer"),
        (
            "tokenizer.json",
            '{"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": null, "id": 1}]}',
            "not in the form of a tokenizer: .*wanted texts as tokens, got None",
        ),
        ("tokenizer.json", '{"model": {"vocab": {"a": "x"}}}', "not in the form of a tokenizer: ValueError"),
        ("tokenizer.json", '{"model": {"vocab": {}}}', r"not in the form of a tokenizer: ValueError\('no tokens'\)"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json: cannot be read"),
        ("tokenizer_config.json", '{"eos_token": "<none>"}', "has no token '<none>', which it names as its eos_token"),
        ("tokenizer_config.json", '{"eos_token": ["x"]}', r"has no token \['x'\], which it names as its eos_token"),
        ("tokenizer_config.json", "{}", "names no end-of-sequence token, so nothing could stop"),
        ("generation_config.json", "\0", r"generation_config\.json: cannot be read"),
        ("generation_config.json", '{"eos_token_id": ["</s>"]}', r"wanted ids in eos_token_id, got \['</s>'\]"),
    ],
)
def test_a_broken_file_is_named(small, name, content, sentence):
    (small / name).write_text(content)
    with pytest.raises(UserError, match=sentence):
        _ = hf_tokenizer(small).vocab_size, hf_tokenizer(small).stop_ids


def test_a_token_that_is_null_in_one_file_is_that_of_the_other_as_in_transformers(small):
    """Unless the settings list the added tokens: then transformers does not read special_tokens_map.json."""
    (small / "generation_config.json").unlink(missing_ok=True)
    (small / "special_tokens_map.json").write_text('{"eos_token": {"content": "<end>"}}')
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": None}
    (small / "tokenizer_config.json").write_text(json.dumps(settings))
    assert hf_tokenizer(small).stop_ids == (hf_tokenizer(small)._tokenizer.eos_token_id,) == (0,)
    (small / "tokenizer_config.json").write_text(json.dumps(settings | {"added_tokens_decoder": {}}))
    with pytest.raises(UserError, match="names no end-of-sequence token"):
        _ = hf_tokenizer(small).stop_ids


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ('{"model": ', r"tokenizer\.json: cannot be read"),
        ('{"model": {"vocab": {"<end>": 0}, "type": "Telepathy"}}', r"the tokenizer in .* cannot be read: \S.*"),
    ],
)
def test_a_folder_that_transformers_cannot_read_is_one_error(small, table, sentence):
    (small / "tokenizer.json").write_text(table)
    with pytest.raises(UserError, match=sentence) as caught:
        hf_tokenizer(small).encode("one")
    assert len(str(caught.value).splitlines()) == 1


def test_a_tokenizer_with_remote_code_is_rejected_without_a_prompt(small, monkeypatch):
    configure(small, tokenizer_class="Strange", auto_map={"AutoTokenizer": [None, "strange.Strange"]})
    asked = []
    monkeypatch.setattr("builtins.input", asked.append)
    with pytest.raises(UserError, match="cannot be read"):
        hf_tokenizer(small).encode("one")
    assert not asked


def test_a_folder_without_a_tokenizer_is_rejected_at_load(tmp_path):
    with pytest.raises(UserError, match=r"wanted a folder that holds a tokenizer\.json"):
        hf_tokenizer(tmp_path / "nowhere")


def test_creating_a_tokenizer_reads_nothing_and_equality_is_by_path(small):
    one, other = hf_tokenizer(small), hf_tokenizer(str(small))
    assert one == other and hash(one) == hash(other)
    assert set(vars(one)) == {"path"}


@pytest.mark.skipif(not QWEN3.is_dir(), reason="needs the Qwen3 tokenizer beside the checkout (shared/data)")
def test_qwen3():
    pytest.importorskip("transformers")
    tokenizer = hf_tokenizer(QWEN3)
    assert tokenizer.stop_ids == (151645,) == (tokenizer._tokenizer.eos_token_id,)
    assert tokenizer.vocab_size == 151669 == 1 + max(tokenizer._tokenizer.get_vocab().values())
    for text in ["3142=", "Ein Satz, 你好 🙂\n\n  x² = 4", " leading and trailing "]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = "<|im_start|>user\nhi<|im_end|>\n"
    assert tokenizer.encode(chat)[0] == 151644
    assert tokenizer.decode(tokenizer.encode(chat)) == "<|im_start|>user\nhi"
    assert tokenizer.decode([9707, 151900, 11]) == "Hello,"  # ids beyond the tokenizer's vocabulary are skipped

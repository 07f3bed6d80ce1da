"""GGUF files give the weights, the configuration, and the tokens that transformers reads from them."""

import json
import resource
from pathlib import Path

import numpy as np
import pytest
from api import convert, family_of, main, read_config
from safetensors.numpy import load_file

from gspax.data import hf_tokenizer
from gspax.errors import UserError
from gspax.hf import hf
from gspax.hf.gguf import llama3_scaling, unpack
from gspax.hf.gguf_tokenizer import merges

gguf = pytest.importorskip("gguf")
QWEN3 = Path(__file__).parents[3] / "shared" / "data" / "qwen3_tokenizer"

TOKENS = ["<s>", "</s>", *"abcdefghijklmnopqrstuvwxyzĠ0123456789.", "ab"]
LAYERS, WIDTH, HEADS, KV_HEADS, FFN, VOCAB, EXPERTS = 2, 32, 4, 2, 64, len(TOKENS), 4
EXPERT_FFN = 768  # transformers 5.23 reads no other width
MODEL = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma3", "mixtral")


def head_size(architecture):
    """The size of a head: transformers 5.23 reads none from the files of Qwen3, and takes 128."""
    return 128 if architecture.startswith("qwen3") else WIDTH // HEADS


def keys(architecture):
    """The metadata of a tiny model, without that of its tokenizer."""
    sizes = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": WIDTH,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": head_size(architecture),
        "attention.value_length": head_size(architecture),
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 5e5,
    }
    if architecture in ("qwen3moe", "mixtral"):
        sizes |= {"expert_count": EXPERTS, "expert_used_count": 2}
    if architecture == "qwen3moe":
        sizes |= {"expert_feed_forward_length": EXPERT_FFN}
    if architecture == "gemma3":
        sizes |= {"attention.sliding_window": 16}
    return sizes


def shapes(architecture):
    """The tensors of a tiny model, as llama.cpp names them."""
    head = head_size(architecture)
    heads, kv_heads, inner = HEADS * head, KV_HEADS * head, EXPERT_FFN if architecture == "qwen3moe" else FFN
    layer = {"attn_norm.weight": (WIDTH,), "ffn_norm.weight": (WIDTH,), "attn_output.weight": (WIDTH, heads)}
    layer |= {"attn_q.weight": (heads, WIDTH)} | {f"attn_{part}.weight": (kv_heads, WIDTH) for part in "kv"}
    if architecture == "qwen2":
        layer |= {"attn_q.bias": (heads,), "attn_k.bias": (kv_heads,), "attn_v.bias": (kv_heads,)}
    if architecture in ("qwen3", "qwen3moe", "gemma3"):
        layer |= {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)}
    if architecture == "gemma3":
        layer |= {"post_attention_norm.weight": (WIDTH,), "post_ffw_norm.weight": (WIDTH,)}
    if architecture in ("qwen3moe", "mixtral"):
        layer |= {"ffn_gate_inp.weight": (EXPERTS, WIDTH), "ffn_down_exps.weight": (EXPERTS, WIDTH, inner)}
        layer |= {f"ffn_{part}_exps.weight": (EXPERTS, inner, WIDTH) for part in ("gate", "up")}
    else:
        layer |= {f"ffn_{part}.weight": (FFN, WIDTH) for part in ("gate", "up")} | {"ffn_down.weight": (WIDTH, FFN)}
    whole = {"token_embd.weight": (VOCAB, WIDTH), "output_norm.weight": (WIDTH,)}
    if architecture != "gemma3":  # its head is its embedding
        whole |= {"output.weight": (VOCAB, WIDTH)}
    return whole | {f"blk.{n}.{name}": shape for n in range(LAYERS) for name, shape in layer.items()}


TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3] + [1] * (len(TOKENS) - 2),
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.chat_template": "{{ messages[0].content }}",
}


def write(file, architecture, metadata=None, *, tensors=None, kind="F32", factors=None):
    """Write a GGUF file with random numbers of one type; norms are always float32."""
    name = "llama" if architecture == "mixtral" else architecture
    writer = gguf.GGUFWriter(file, name)
    content = TOKENIZER | {f"{name}.{key}": value for key, value in keys(architecture).items()} | (metadata or {})
    for key, value in content.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    rng = np.random.default_rng(0)
    for tensor, shape in (shapes(architecture) if tensors is None else tensors).items():
        numbers = rng.standard_normal(shape, np.float32)
        type_ = gguf.GGMLQuantizationType["F32" if len(shape) == 1 else kind]
        writer.add_tensor(tensor, gguf.quantize(numbers, type_), raw_dtype=type_)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def unpacked(file, dtype="float32"):
    folder = file.with_suffix("")
    folder.mkdir()
    unpack(file, folder, dtype)
    return folder


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("architecture", [name for name in MODEL if name != "mixtral"])
def test_weights_are_those_that_transformers_reads(architecture, kind, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, GgufConfig

    file = write(tmp_path / "model.gguf", architecture, kind=kind)
    ours = load_file(unpacked(file) / "model.safetensors")
    dequantized = {} if kind == "F32" else {"quantization_config": GgufConfig(dequantize=True)}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32, **dequantized)
    state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    for name, tensor in ours.items():
        if name not in state:  # the experts of transformers 5 are one tensor
            prefix, expert, part = name.rsplit(".", 3)[0], int(name.split(".")[5]), name.split(".")[6]
            whole = state[f"{prefix}.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"][expert]
            wanted = {"down_proj": whole, "gate_proj": whole[:EXPERT_FFN], "up_proj": whole[EXPERT_FFN:]}[part]
        else:
            wanted = state[name]
        np.testing.assert_array_equal(tensor, wanted, err_msg=name)


@pytest.mark.parametrize("architecture", MODEL)
def test_configurations_are_those_of_a_checkpoint(architecture, tmp_path):
    folder = unpacked(write(tmp_path / "model.gguf", architecture))
    config = read_config(folder)
    family = {"qwen3moe": "qwen3_moe", "gemma3": "gemma3_text"}.get(architecture, architecture)
    assert family_of(config) == family
    assert (config.rms_norm_eps, config.rope_theta, config.head_dim) == (1e-5, 5e5, head_size(architecture))
    assert config.tie_word_embeddings == (architecture == "gemma3")


def test_a_mixture_of_llamas_has_a_tensor_for_each_expert(tmp_path):
    ours = load_file(unpacked(write(tmp_path / "model.gguf", "mixtral")) / "model.safetensors")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    stored = {each.name: each.data for each in reader.tensors}
    for part, name in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
        for expert in range(EXPERTS):
            wanted = stored[f"blk.1.ffn_{part}_exps.weight"][expert]
            np.testing.assert_array_equal(
                ours[f"model.layers.1.block_sparse_moe.experts.{expert}.{name}.weight"], wanted
            )


def test_scaled_frequencies_give_the_numbers_of_llama_3(tmp_path):
    """transformers computes the same inverse frequencies from the configuration that is written."""
    rope = pytest.importorskip("transformers.modeling_rope_utils", exc_type=ImportError)
    pytest.importorskip("torch")
    from transformers import LlamaConfig

    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=scaling | {"rope_theta": 5e5})
    inverse, _ = rope.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    factors = (5e5 ** -(np.arange(0, 64, 2) / 64) / inverse.numpy()).astype(np.float32)
    sizes = {"head_dim": 64, "rope_theta": 5e5}
    assert llama3_scaling(factors, sizes) == pytest.approx(scaling)
    with pytest.raises(ValueError, match=r"wanted the factors of Llama 3\.1 or later"):
        llama3_scaling(factors[::-1], sizes)
    file = write(
        tmp_path / "model.gguf",
        "llama",
        {"llama.rope.freq_base": 5e5},
        factors=np.ones(WIDTH // HEADS // 2, np.float32),
    )
    assert read_config(unpacked(file)).rope_scaling.factor == 1


def test_a_file_is_converted(tmp_path, capsys):
    file = write(tmp_path / "model.gguf", "llama", kind="Q8_0")
    convert.run(str(file), tmp_path / "converted")
    assert hf(tmp_path / "converted").num_hidden_layers == LAYERS
    tokenizer = hf_tokenizer(tmp_path / "converted")
    assert (tokenizer.stop_ids, tokenizer.encode_completion("ab 12")) == (
        (1,),
        [TOKENS.index("ab"), *map(TOKENS.index, "Ġ12")],
    )
    assert {path.name for path in tmp_path.iterdir()} == {"model.gguf", "converted"}


@pytest.mark.parametrize("size", [100, 20_000, 60_000])  # the tokenizer, the weights, and the checkpoint do not fit
def test_a_full_disk_is_one_sentence_and_leaves_nothing(size, tmp_path, capsys):
    file = write(tmp_path / "model.gguf", "llama", kind="Q8_0")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        code = main.main(["convert", "--from", str(file), "--to", str(tmp_path / "converted")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    sentence = f"gspax: {tmp_path / 'converted'}: cannot be written: File too large\n"
    assert (code, capsys.readouterr().err) == (1, sentence)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.skipif(not QWEN3.exists(), reason=f"{QWEN3.name} is not there")
def test_tokens_are_those_of_the_published_tokenizer(tmp_path):
    from gspax.hf import gguf_tokenizer

    published = json.loads((QWEN3 / "tokenizer.json").read_text(encoding="utf-8"))
    ids = published["model"]["vocab"] | {each["content"]: each["id"] for each in published["added_tokens"]}
    special = {each["content"]: each["special"] for each in published["added_tokens"]}
    tokens = sorted(ids, key=ids.get)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*tokens, "[PAD151669]"],
        "tokenizer.ggml.token_type": [{None: 1, True: 3, False: 4}[special.get(token)] for token in tokens] + [5],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in published["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": ids["<|im_end|>"],
    }
    gguf_tokenizer.write(metadata, tmp_path)
    ours, theirs = hf_tokenizer(tmp_path), hf_tokenizer(QWEN3)
    problems = (QWEN3.parent / "math500" / "test.jsonl").read_text(encoding="utf-8")
    texts = [
        "I don't know: 12345 + 6.70 = ?\n\n\n  def f(x):\n\treturn x**2  # ok",
        "<|im_start|>user\n<think>e\u0301</think> Ünïcödé 日本語 🎉 we'LL<tool_call><|im_end|>\n",
        *(json.loads(line)["problem"] for line in problems.splitlines()),
    ]
    assert len(texts) > 400
    for text in texts:
        assert ours.encode_completion(text) == theirs.encode_completion(text)
    assert ours.ids == theirs.ids


@pytest.mark.parametrize("prefix", [False, True])
def test_sentence_pieces_are_merged_by_their_scores(prefix, tmp_path):
    from gspax.hf import gguf_tokenizer

    tokens = ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", "▁", "a", "b", "c", "ab", "bc", "▁a", "▁▁"]
    scores = [0.0] * 5 + [-9.0, -8.0, -8.0, -8.0, -2.0, -1.0, -3.0, 0.0]
    types = [2, 3, 3, 6, 6] + [1] * 7 + [4]
    assert merges(tokens, types, scores) == [("▁", "▁"), ("b", "c"), ("a", "b"), ("▁", "a")]
    metadata = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types, "eos_token_id": 2}
    metadata |= {"unknown_token_id": 0, "add_space_prefix": prefix}
    gguf_tokenizer.write({f"tokenizer.ggml.{key}": value for key, value in metadata.items()}, tmp_path)
    tokenizer = hf_tokenizer(tmp_path)
    for text, pieces in (("abc", ["a", "bc"]), ("b  é", ["b", "▁▁", "<0xC3>", "<0xA9>"]), ("c a", ["c", "▁a"])):
        wanted = (["▁"] if prefix else []) + pieces
        wanted = ["▁a", "bc"] if prefix and text == "abc" else wanted
        ids = tokenizer.encode_completion(text)
        assert [tokens[i] for i in ids] == wanted
        assert tokenizer.decode(ids) == text


BAD = {
    "architecture": ({"general.architecture": None}, "general.architecture: wanted one of llama, "),
    "a key": ({"llama.attention.scale": 2.0}, "llama.attention.scale: wanted no such key"),
    "a size": ({"llama.block_count": None}, "llama.block_count: wanted an integer above 0, got null"),
    "rope": ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count: wanted 8 (head_dim), got 4"),
    "scaling": ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type: wanted none, linear, or yarn"),
    "parts": ({"split.count": 2}, "split.count: wanted a whole model"),
    "no tokenizer": (dict.fromkeys(TOKENIZER), "tokenizer.ggml.model: wanted gpt2 or llama, got null"),
    "tokenizer": ({"tokenizer.ggml.model": "bert"}, 'tokenizer.ggml.model: wanted gpt2 or llama, got "bert"'),
    "pre": ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre: wanted one of gpt-2, smollm, qwen2, llama-bpe"),
    "no stop": ({"tokenizer.ggml.eos_token_id": None}, "tokenizer.ggml.eos_token_id: wanted this key"),
    "tokens": ({"tokenizer.ggml.tokens": [*TOKENS, "x"]}, "tokenizer.ggml.tokens: wanted at most 41, got 42"),
    "an id": ({"tokenizer.ggml.eos_token_id": 99}, "tokenizer.ggml: wanted ids below"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_implemented_is_one_sentence(name, tmp_path):
    metadata, words = BAD[name]
    architecture = "qwen2" if name == "architecture" else "llama"
    file = write(tmp_path / "model.gguf", architecture, metadata)
    if name == "architecture":
        content = file.read_bytes()
        file.write_bytes(content.replace(b"qwen2", b"rwkv7"))
    with pytest.raises(UserError) as caught:
        convert.run(str(file), tmp_path / "converted")
    assert str(caught.value).startswith(f"{file}: {words}") and "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_tensor_that_no_family_has_is_an_error(tmp_path):
    tensors = shapes("llama") | {"blk.0.attn_sinks.weight": (4,)}
    file = write(tmp_path / "model.gguf", "llama", tensors=tensors)
    with pytest.raises(UserError, match=r"blk.0.attn_sinks.weight: wanted no such tensor in a model of llama"):
        convert.run(str(file), tmp_path / "converted")


def test_damaged_files_are_one_sentence(tmp_path):
    whole = write(tmp_path / "model.gguf", "llama").read_bytes()
    damaged = {f"cut at {at}": whole[:at] for at in (0, 3, 20, 1000, len(whole) // 2, len(whole) - 5)}
    damaged |= {"text": b"{}" * 100, "magic": b"XXXX" + whole[4:], "counts": whole[:8] + b"\xff" * 16 + whole[24:]}
    for name, content in damaged.items():
        file = tmp_path / "damaged.gguf"
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"damaged.gguf: ") as caught:
            convert.run(str(file), tmp_path / "converted")
        assert "\n" not in str(caught.value), name
        assert not (tmp_path / "converted").exists(), name
    with pytest.raises(UserError, match=r"absent.gguf"):
        convert.run(str(tmp_path / "absent.gguf"), tmp_path / "converted")

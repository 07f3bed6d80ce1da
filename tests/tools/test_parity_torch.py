"""gspax against Qwen3 and Qwen3-MoE in transformers: random weights, every variant of the configuration.

The same without torch: test_transformer.py and test_greedy.py in tests/model against the numpy reference,
test_golden.py there against stored logits.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from api import (
    abstract_params,
    decoding,
    main,
    make_inference_weights,
    read_config,
    read_params,
    sample,
    to_json,
    transformer,
)

from gspax.config import Sampling, Yarn
from gspax.model.kernels.trees import positions

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
transformers = pytest.importorskip("transformers")

CONFIGS = {
    **{name: config for name, config in tiny.CONFIGS.items() if name not in ("one key head", "all experts")},
    "theta 5e6, wide heads": replace(tiny.MOE, rope_theta=5e6, head_dim=16),
    "yarn with its own factor": replace(
        tiny.CONFIGS["dense"],
        rope_scaling=Yarn(factor=2.0, original_max_position_embeddings=128, attention_factor=1.3),
    ),
    "the last layers slide": replace(tiny.MOE, num_experts=0, sliding_window=3, sliding_layers=(1, 2)),
}


def configs(*fast):
    """One config with every variant at once, one for each of these, and the others marked `slow`."""
    together = [pytest.param(config, id=f"{name}, all at once") for name, config in tiny.TOGETHER.items()]
    marks = {name: () if name in fast else pytest.mark.slow for name in CONFIGS}
    alone = [pytest.param(config, id=name, marks=marks[name]) for name, config in CONFIGS.items()]
    return pytest.mark.parametrize("config", together + alone)


TOKENS = 18


apply = jax.jit(transformer.apply, static_argnames=("config", "mesh"))
prefill = jax.jit(decoding.prefill, static_argnames=("config", "mesh"))
decode = jax.jit(decoding.decode, static_argnames=("config", "mesh"))


def make_pair(config, folder):
    """Parameters and config in gspax, and the model in transformers, from one folder."""
    torch.manual_seed(0)
    theirs = transformers.AutoConfig.for_model(**to_json(config))
    model = transformers.AutoModelForCausalLM.from_config(theirs, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # norms and biases too: they are initialized to 1 and 0
            parameter.copy_(0.3 * torch.randn_like(parameter) + ("norm" in name))
    model.save_pretrained(folder)
    read = read_config(folder)
    mesh = tiny.one_device()
    return read_params(folder, read, abstract_params(read, mesh)), read, model


def their_logits(model, tokens_BT, **kwargs):
    with torch.no_grad():
        return model(torch.tensor(tokens_BT), **kwargs).logits.numpy()


def random_tokens(config, *shape):
    return np.random.default_rng(0).integers(0, config.vocab_size, shape, dtype=np.int32)


@configs("yarn with its own factor")
def test_logits_of_full_left_padded_right_padded_and_packed_rows(config, tmp_path):
    params, config, model = make_pair(config, tmp_path)
    tokens_BT = random_tokens(config, 4, TOKENS)
    segment_BT = np.ones_like(tokens_BT)
    segment_BT[1, :5] = 0
    segment_BT[2, -5:] = 0
    segment_BT[3, 7:] = 2
    hidden, _ = apply(params, config, tokens_BT, segment_BT, mesh=tiny.one_device())
    ours_BTV = np.asarray(transformer.logits(params, hidden))
    position_BT = np.asarray(positions(jnp.asarray(segment_BT)))
    padded = their_logits(
        model,
        tokens_BT[:3],
        attention_mask=torch.tensor(segment_BT[:3]),
        position_ids=torch.tensor(position_BT[:3]),
        use_cache=False,
    )
    packed = their_logits(model, tokens_BT[3:], position_ids=torch.tensor(position_BT[3:]), use_cache=False)
    gap_BT = np.abs(ours_BTV - np.concatenate([padded, packed])).max(axis=-1)
    assert np.abs(padded).max() > 1
    assert gap_BT[segment_BT > 0].max() < 1e-4


@configs()
def test_prefill_and_decode_agree_with_transformers_cache(config, tmp_path):
    params, config, model = make_pair(config, tmp_path)
    length, steps = 7, TOKENS - 7
    tokens_1T = random_tokens(config, 1, TOKENS)
    cached = transformers.DynamicCache(config=model.config)
    theirs = [their_logits(model, tokens_1T[:, :length], past_key_values=cached, use_cache=True)[0, -1]]
    length_P, mesh = jnp.array([length]), tiny.one_device()
    weights = make_inference_weights(params, config, tiny.one_device())
    hidden, prompts, _ = prefill(weights, config, tokens_1T[:, :length], length_P, mesh=mesh)
    cache = decoding.new_cache(prompts, config, slots=1, max_tokens=steps, mesh=mesh)
    ours = [transformer.logits(params, hidden)[0]]
    for step in range(steps):
        token = tokens_1T[:, length + step]
        theirs.append(their_logits(model, token[None], past_key_values=cached, use_cache=True)[0, -1])
        slots = decoding.Slots(length_P, None, jnp.int32(step), jnp.ones(1, jnp.int32))
        hidden, cache, _ = decode(weights, config, token, cache, slots, mesh=mesh)
        ours.append(transformer.logits(params, hidden)[0])
    np.testing.assert_allclose(np.array(ours), np.array(theirs), atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["experts", "dense"])
def test_greedy_decoding_token_for_token(name, tmp_path):
    config = tiny.TOGETHER[name]
    params, config, model = make_pair(config, tmp_path)
    prompts = [row[:length].tolist() for row, length in zip(random_tokens(config, 2, 9), (9, 5), strict=True)]
    sampling = Sampling(group=1, max_prompt_tokens=9, max_tokens=64, temperature=0.0)
    weights = make_inference_weights(params, config, tiny.one_device())
    rollout = sample(weights, prompts, [0, 1], jax.random.key(0), tiny.options(config, sampling))
    drawn = set()
    for row, prompt in enumerate(prompts):
        theirs = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=64, eos_token_id=None)[0]
        assert len(theirs) == len(prompt) + 64
        np.testing.assert_array_equal(rollout.tokens_BT[row, : len(theirs)], theirs.numpy())
        drawn |= {*theirs[len(prompt) :].tolist()}
    assert len(drawn) > 3  # not a single repeated token


def test_the_command_accepts_an_unchanged_checkpoint_and_finds_a_changed_layer(tmp_path, capsys, monkeypatch):
    from api import parameters

    make_pair(CONFIGS["dense"], tmp_path)
    assert main.main(["parity", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("All parts agree to 0.0001.\n")

    def wrong(*args):
        params = read_params(*args)
        params["runs"][0]["attention"]["value"] = params["runs"][0]["attention"]["value"].at[2].multiply(1.01)
        return params

    monkeypatch.setattr(parameters, "read_params", wrong)
    assert main.main(["parity", str(tmp_path)]) == 1
    assert capsys.readouterr().out.endswith("The first part that differs by more than 0.0001 is: layer 2.\n")


def test_tokens_outside_the_vocabulary_are_rejected(tmp_path, capsys):
    make_pair(CONFIGS["dense"], tmp_path)
    assert main.main(["parity", str(tmp_path), "--tokens", "0", "23"]) == 2
    assert "tokens: wanted at least one, from 0 to 22, got [0, 23]" in capsys.readouterr().err

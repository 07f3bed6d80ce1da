"""The report on one token: the need by hand, live blocks of a kernel, repeated layers."""

from dataclasses import replace

import pytest
from api import AXES, Collective, fetched_at, hlo, inference_weights_bytes, presets, programs, traffic

from gspax.config import GatedDelta, Sampling, layers_of
from gspax.tools.aot import compile_report as report
from gspax.tools.aot.compile_report import Phase

ONES = dict.fromkeys(AXES, 1)
PAPER = Sampling(prompts=128, group=16, max_prompt_tokens=1024, max_tokens=7168)


def test_the_need_of_a_token_by_hand():
    """Qwen3-30B-A3B on 64 devices, two experts of each layer on each, 2 prompts of 16 samples."""
    experts = 48 * 2 * 3 * 2048 * 768 * 2
    attention = 48 * 2 * (2 * 2048 * 4096 + 2 * 2048 * 512)
    head = 2 * 151936 * 2048
    position = 2 * 2 * 48 * 4 * 128
    rest = 2 * (48 * (2048 * 128 + 2 * 2048 + 2 * 128) + 2048)  # routers and norms
    for part, length in (("start", 1), ("mean", 7169 / 2), ("end", 7168)):
        cache = position * (32 * length + 2 * 1024)
        found = report.needed(part, presets.qwen3_30b_a3b, PAPER, ONES | {"expert": 64})
        assert found == pytest.approx(experts + attention + head + rest + cache, rel=1e-6)


def test_the_need_of_windows_and_states_by_hand():
    """One device, 2 prompts of 4 tokens for 3 samples each: a layer that sees 5 tokens and one that sees all; then a
    gated delta net instead of the first."""
    sampling = Sampling(prompts=2, group=3, max_prompt_tokens=4, max_tokens=10)
    plain = replace(presets.tiny_moe, dtype="bfloat16")
    position = 2 * 2 * 2 * 16  # of a layer
    windows = replace(plain, sliding_window=5, sliding_layers=(0,))
    delta = GatedDelta(key_heads=1, value_heads=2, key_dim=3, value_dim=5)
    states = replace(plain, delta=delta, delta_layers=(0,))
    state = 4 * 2 * 3 * 5 + 2 * 3 * (3 + 3 + 2 * 5)  # of a row
    for part, own, of_prompt in (("start", (1, 1), (4, 4)), ("mean", (4, 5.5), (1, 4)), ("end", (5, 10), (0, 4))):
        cache = position * (6 * sum(own) + 2 * sum(of_prompt))
        weights = inference_weights_bytes(windows, sampling, ONES)
        assert report.needed(part, windows, sampling, ONES) == weights + cache
        cache = position * (6 * own[1] + 2 * of_prompt[1]) + 2 * 6 * state
        assert report.needed(part, states, sampling, ONES) == inference_weights_bytes(states, sampling, ONES) + cache


def test_the_kernel_fetches_whole_blocks_of_what_is_live():
    """4 rows of 2 key heads and 1024 positions of 8 numbers; two prompts of 512 for two samples each."""
    text = """
ENTRY %main (q: bf16[4,2,3,8]) -> f32[4,2,3,8] {
  %q = bf16[4,2,3,8]{3,2,1,0} parameter(0)
  %k = bf16[4,2,1024,8]{3,2,1,0} parameter(1)
  %g = bf16[2,2,6,8]{3,2,1,0} parameter(2)
  %p = bf16[2,2,512,8]{3,2,1,0} parameter(3)
  %a = f32[2,2,6,8]{3,2,1,0} custom-call(%g, %p, %p), metadata={op_name="decode/decode_attention/pallas_call"}
  ROOT %b = f32[4,2,3,8]{3,2,1,0} custom-call(%q, %k, %k), metadata={op_name="decode/decode_attention/pallas_call"}
}
"""
    module = hlo.parse(text)
    both = 2 * (192 * 2 + 192 * 4)  # queries and results
    prompts = 2 * 2 * 2 * 512 * 8 * 2
    sampling = Sampling(prompts=2, group=2, max_prompt_tokens=512, max_tokens=1024)
    for part, positions in (("start", 512), ("mean", 768), ("end", 1024)):
        fetched = fetched_at(part, sampling)
        assert traffic(module, unknown_trips=1, fetched=fetched) == both + prompts + 2 * 4 * 2 * positions * 8 * 2
    assert traffic(module, unknown_trips=1) == both + prompts + 2 * 4 * 2 * 1024 * 8 * 2
    near = fetched_at("end", sampling, [1024, 100])  # all of the response, or its second block
    assert traffic(module, unknown_trips=1, fetched=near) == both + prompts + 2 * 4 * 2 * 768 * 8 * 2


def test_phases_are_linear_in_repeated_layers():
    over = Collective("all-gather", ("expert",), 4)
    one, two = (
        Phase(
            name="decode",
            runs=3,
            model_flops=7.0,
            flops=7.0,
            moved=10 + 5 * number,
            sent={over: 2 * number},
            devices=4,
            moved_at={"mean": 10 + 5 * number},
        )
        for number in (4, 8)
    )
    (found,) = report.extrapolate_phases([one], [two], programs.Few(4, 8, 20))
    assert found == replace(one, moved=110, sent={over: 40}, moved_at={"mean": 110})


EQUAL = replace(presets.qwen3_30b_a3b, intermediate_size=8)


@pytest.mark.parametrize(
    ("changes", "few"),
    [
        ({}, (4, 6, 48)),
        ({"num_hidden_layers": 5}, None),
        ({"mlp_only_layers": (0,)}, (6, 8, 48)),
        ({"mlp_only_layers": (17,)}, (22, 24, 48)),
        ({"mlp_only_layers": (20,)}, None),
        ({"mlp_only_layers": (24,)}, None),
        ({"sliding_window": 8, "sliding_layers": tuple(range(0, 48, 2))}, (4, 6, 48)),
        ({"sliding_window": 8, "sliding_layers": tuple(range(0, 47, 2)), "num_hidden_layers": 47}, (5, 7, 47)),
        ({"sliding_window": 8, "sliding_layers": tuple(n for n in range(48) if n % 4 != 3)}, (4, 8, 48)),
    ],
)
def test_small_models_are_the_leading_layers_and_at_least_four_that_repeat_a_pattern(changes, few):
    model = replace(EQUAL, **changes)
    found = programs.few_layers(model)
    assert found == few
    if found is not None:
        whole, less = (layers_of(replace(model, num_hidden_layers=n)) for n in (found.layers, found.less))
        period = found.more - found.less
        assert less + less[-period:] * ((len(whole) - len(less)) // period) == whole

"""GSPO steps of TRL on a given shape; run by another interpreter, which need not have gspax.

    PYTHON trl_gspo.py '{"vocab_size": 512, ...}'     (the keys of `peers.shape`)

With `folder`, the model and the tokenizer are the ones there, with parameters of `dtype`; an update has `parts` passes.
`steps` are trained instead of 6.

Prints one line of JSON (`stopwatch.summarize`). No token ends a completion, so every one has `max_tokens` tokens; the
reward is the share of digits.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from typing import Any

from stopwatch import STEPS, Stopwatch, summarize

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TRL_EXPERIMENTAL_SILENCE": "1"}


def share_of_digits(completions: list[str], **_: Any) -> list[float]:
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]


def make_model(shape: dict[str, Any]) -> Any:
    """The model of a folder, or a Qwen3 or Qwen3-MoE with random float32 parameters; no token ends a text."""
    import torch
    import transformers

    if "folder" in shape:
        model = transformers.AutoModelForCausalLM.from_pretrained(shape["folder"], dtype=getattr(torch, shape["dtype"]))
        model.generation_config.eos_token_id = None
        return model
    torch.manual_seed(0)
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    common = {name: shape[name] for name in sizes} | {"tie_word_embeddings": False, "rope_theta": 1e6}
    common |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": shape["vocab_size"] - 1}
    if shape["num_experts"]:
        experts = {name: shape[name] for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")}
        config = transformers.Qwen3MoeConfig(**common, **experts, norm_topk_prob=True)
        model = transformers.Qwen3MoeForCausalLM(config)
    else:
        config = transformers.Qwen3Config(**common, intermediate_size=shape["intermediate_size"])
        model = transformers.Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = None
    return model


def make_tokenizer(shape: dict[str, Any]) -> Any:
    """That of a folder, or one id per character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if "folder" in shape:
        return AutoTokenizer.from_pretrained(shape["folder"])
    vocab_size = shape["vocab_size"]
    tokenizer = Tokenizer(models.WordLevel({chr(i): i for i in range(vocab_size)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": chr(0), "eos_token": chr(vocab_size - 1), "unk_token": "?"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def main(shape: dict[str, Any]) -> dict[str, Any]:
    """Train; what is printed."""
    import importlib.metadata

    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rows, parts, is_real = shape["prompts"] * shape["group"], shape.get("parts", 1), "folder" in shape
    steps = shape.get("steps", STEPS)
    rng = random.Random(0)
    sums = [{"prompt": f"{rng.randrange(1000)}+{rng.randrange(1000)}="} for _ in range(shape["prompts"] * steps)]
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=shape.get("dtype") == "bfloat16",
            gradient_checkpointing=False,
            per_device_train_batch_size=rows // parts,
            gradient_accumulation_steps=parts,
            num_generations=shape["group"],
            steps_per_generation=parts,
            max_completion_length=shape["max_tokens"],
            generation_kwargs={"min_new_tokens": shape["max_tokens"]},
            max_steps=steps,
            num_iterations=1,
            beta=0.0,
            epsilon=3e-4,
            epsilon_high=4e-4,
            importance_sampling_level="sequence",
            loss_type="grpo",
            learning_rate=1e-6 if is_real else 1e-3,
            temperature=1.0,
            report_to=[],
            logging_steps=10**6,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=make_model(shape),
            reward_funcs=share_of_digits,
            args=settings,
            train_dataset=Dataset.from_list(sums),
            processing_class=make_tokenizer(shape),
        )
        rollout = Stopwatch(trainer, "_generate")
        trainer.train()
    return summarize(importlib.metadata.version("trl"), rollout)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)

"""GRPO steps of google-tunix on a given shape; run by another interpreter, which need not have gspax.

    PYTHON tunix_grpo.py '{"vocab_size": 512, ...}'     (the keys of `peers.shape`)

Prints one line of JSON (`stopwatch.summarize`). No token ends a completion, so every one has `max_tokens` tokens; the
reward is the share of digits.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from stopwatch import STEPS, Stopwatch, summarize


class Bytes:
    """One id per byte after pad, begin and end."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [3 + byte for byte in text.encode()]

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(chr(int(i) - 3) if 3 <= int(i) < 131 else "?" for i in ids)

    def pad_id(self) -> int:
        return 0

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return 2


def share_of_digits(prompts: Any, completions: list[str], **_: Any) -> list[float]:
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]


def make_cluster(shape: dict[str, Any]) -> Any:
    """Tunix's policy and sampler, with random parameters, on one device."""
    import jax
    import numpy as np
    import optax
    from flax import nnx
    from tunix.models.qwen3 import model as qwen3
    from tunix.rl import rl_cluster
    from tunix.rl.rollout import base_rollout

    sparse = shape["num_experts"] > 0
    config = qwen3.ModelConfig(
        num_layers=shape["num_hidden_layers"],
        vocab_size=shape["vocab_size"],
        embed_dim=shape["hidden_size"],
        hidden_dim=shape["moe_intermediate_size"] if sparse else shape["intermediate_size"],
        num_heads=shape["num_attention_heads"],
        head_dim=shape["head_dim"],
        num_kv_heads=shape["num_key_value_heads"],
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=False,
        num_experts=shape["num_experts"] if sparse else None,
        num_experts_per_tok=shape["num_experts_per_tok"] if sparse else None,
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    with mesh:
        policy = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    role, P = rl_cluster.Role, shape["prompts"]
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adamw(1e-3),
        eval_every_n_steps=10**9,
        max_steps=STEPS,
        mini_batch_size=P,
        train_micro_batch_size=P,
        rollout_micro_batch_size=P,
        compute_logps_micro_batch_size=P,
        checkpoint_root_directory=None,
    )
    rollout = base_rollout.RolloutConfig(
        max_tokens_to_generate=shape["max_tokens"],
        max_prompt_length=shape["max_prompt_tokens"],
        kv_cache_size=shape["max_prompt_tokens"] + shape["max_tokens"] + 8,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        eos_tokens=[shape["vocab_size"] + 1],
    )
    return rl_cluster.RLCluster(
        actor=policy,
        reference=None,
        tokenizer=Bytes(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={role.ACTOR: mesh, role.REFERENCE: mesh, role.ROLLOUT: mesh},
            rollout_engine="vanilla",
            offload_to_cpu=False,
            training_config=training,
            rollout_config=rollout,
        ),
    )


def main(shape: dict[str, Any]) -> dict[str, Any]:
    """Train for STEPS steps; what is printed."""
    import importlib.metadata

    import jax
    import numpy as np
    from flax import nnx
    from tunix.rl.grpo import grpo_learner

    cluster = make_cluster(shape)
    algorithm = grpo_learner.GRPOConfig(
        num_generations=shape["group"], num_iterations=1, beta=0.0, epsilon=0.2, loss_algo="grpo"
    )
    learner = grpo_learner.GRPOLearner(rl_cluster=cluster, reward_fns=share_of_digits, algo_config=algorithm)

    def wait() -> None:
        jax.block_until_ready(jax.tree.leaves(nnx.state(cluster.actor_trainer.model)))

    rollout = Stopwatch(cluster, "generate")
    Stopwatch(cluster, "update_actor", wait)  # a step ends when its update is computed
    random = np.random.default_rng(0)
    sums = [[f"{a}+{b}=" for a, b in random.integers(0, 1000, (shape["prompts"], 2))] for _ in range(STEPS)]
    learner.train([{"prompts": np.array(prompts)} for prompts in sums])
    return summarize(importlib.metadata.version("google-tunix"), rollout)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # without waiting for tunix's threads

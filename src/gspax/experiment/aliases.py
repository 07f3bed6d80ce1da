"""Names and keys that have moved, so that runs written by older versions can be resumed and old overrides still work.

`MOVED` is the one table. A name in it stands for a function or a class of gspax (`gspax.losses.policy.gspo`), any other
entry for a key (`optimizer.b1`), which also matches below another part (`warm_start.optimizer.b1`). Add a line when
something that an experiment can name is renamed or moved; a field that is new needs none, as long as its default means
what older versions did.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOVED = {
    "gspax.model.config.ModelConfig": "gspax.config.ModelConfig",
    "gspax.model.config.Yarn": "gspax.config.Yarn",
    **{f"gspax.losses.policy.{name}": f"gspax.losses.{name}" for name in ("gspo", "gspo_token", "grpo")},
    **{f"gspax.losses.sequence_policy.{name}": f"gspax.losses.{name}" for name in ("gmpo", "luspo", "vespo")},
    **{
        f"gspax.losses.token_policy.{name}": f"gspax.losses.{name}"
        for name in ("cispo", "dapo", "dppo_kl", "dppo_tv", "dr_grpo", "sapo")
    },
    "gspax.losses.token_policy.reinforce": "gspax.losses.importance_sampling",
    "gspax.losses.reinforce": "gspax.losses.importance_sampling",
    **{f"gspax.losses.terms.{name}": f"gspax.losses.{name}" for name in ("by_sequence", "by_token", "by_constant")},
    "gspax.data.tokenizer.CharTokenizer": "gspax.data.CharTokenizer",
    "gspax.data.tokenizer.HFTokenizer": "gspax.data.HFTokenizer",
    "gspax.data.chat.ChatTokenizer": "gspax.data.ChatTokenizer",
    "gspax.data.chat.reward_answer": "gspax.data.reward_answer",
    **{f"optimizer.{name}": f"optimizer.transform.{name}" for name in ("b1", "b2", "eps", "weight_decay")},
}

LIMITS = ("grading.max_failed", "sampling.max_failed")


def current_key(key: str) -> str:
    """The key of today's version: `optimizer.transform.b1` for `optimizer.b1`."""
    parts = key.split(".")
    for start in range(len(parts)):
        moved = MOVED.get(".".join(parts[start:]))
        if moved is not None:
            return ".".join([*parts[:start], moved])
    return key


def current(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A flat description of any version, in the names and keys of today's."""
    moved = {
        current_key(key): MOVED.get(value, value) if isinstance(value, str) else value
        for key, value in flat.items()
        if key in LIMITS or not key.endswith(".max_failed")  # rewards had their own
    }
    for key, value in flat.items():
        if key == "routing_replay" and isinstance(value, bool):
            moved[key] = "old" if value else "off"
        if key.endswith("optimizer.weight_decay") and value:  # it applied to all parameters
            moved[current_key(key).replace("weight_decay", "decayed")] = "gspax.config.optimizers.everything"
    return moved

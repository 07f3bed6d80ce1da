"""A server on loopback with the requests and answers that SGLang documents, with gspax's own model inside.

No real SGLang server has been recorded: the fields are those of its pages "SGLang for RL Systems", "Native APIs" and
"Sampling Parameters".
"""

import base64
from dataclasses import dataclass
from pathlib import Path

from fake_vllm import Fake, flip_byte, forward


@dataclass
class FakeSGLang(Fake):
    """One server. `loaded` is the label of its weights."""

    program: str = "sglang"
    path: str = "/generate"
    is_paused: bool = False

    def answer(self, path, body):
        return getattr(self, path.removeprefix("/"))(body)

    def pause_generation(self, body):
        assert body == {"mode": "retract"}, "abort ends requests, and in_place keeps their keys"
        self.is_paused = True

    def continue_generation(self, body):
        self.is_paused = False

    def update_weights_from_disk(self, body):
        assert self.is_paused and body["flush_cache"] and body["load_format"] == "auto"
        if self.faults.flips_byte:
            flip_byte(Path(body["model_path"]) / "model.safetensors")
        self.read(body["model_path"])
        self.loaded = body["weight_version"]
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def get_model_info(self, body):
        label = self.faults.stays_at or self.loaded or "default"
        return {"model_path": "model", "tokenizer_path": "", "is_generation": True, "weight_version": label}

    def get_server_info(self, body):
        settings = {"context_length": self.max_tokens, "dtype": self.model.dtype, "enable_return_routed_experts": True}
        return settings | self.faults.state

    def generate(self, body):
        assert body["return_logprob"] and not self.is_paused
        params, prompt = body["sampling_params"], body["input_ids"][: self.faults.truncates or None]
        settings = params["max_new_tokens"], params["temperature"], params.get("sampling_seed", 0)
        tokens, laws, reason, experts = self.sample(prompt, *settings, params.get("stop_token_ids", ()))
        chosen = [[float(law[token]), token, None] for law, token in zip(laws, tokens, strict=True)]
        meta = {
            "id": "1",
            "finish_reason": {
                "type": reason,
                **({"matched": tokens[-1]} if reason == "stop" else {"length": len(tokens)}),
            },
            "prompt_tokens": len(prompt),
            "completion_tokens": len(tokens),
            "weight_version": self.loaded or "default",
            "output_token_logprobs": chosen,
        }
        if body.get("logprob_start_len") == 0:
            logps, _ = forward(self.params, self.model, prompt)
            entries = [[float(logps[t - 1, prompt[t]]), prompt[t], None] for t in range(1, len(prompt))]
            meta["input_token_logprobs"] = [[None, prompt[0], None], *entries]
        if body.get("return_routed_experts"):
            meta["routed_experts"] = base64.b64encode(experts.astype("<i4").tobytes()).decode()
        return {"text": "", "output_ids": tokens, "meta_info": meta}

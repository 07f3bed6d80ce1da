"""The rules of `Experiment.engine`: what servers cannot do is an error before a run starts, in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from gspax.config import Engine, ModelConfig, Sampling, filters_in_use

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM 0.30.0 on a CPU
IN_PROCESS = (
    *("chunk", "slots", "cache_gib", "prefill_prompts", "kv_cache_dtype", "weights_dtype"),
    *("drafts", "draft_cost", "noise"),
)


def engine_problems(engine: Engine, sampling: Sampling) -> Iterator[str]:
    """Check that the addresses can be called, and that nothing is asked for that servers do not have."""
    for address in engine.addresses:
        if not is_address(address):
            yield f"engine.addresses: wanted http://HOST:PORT, got {address[:200]!r}"
    if "://" in engine.folder:
        yield f"engine.folder: wanted a folder of a file system, which servers read too, got {engine.folder!r}"
    filters, size = filters_in_use(sampling), sampling.mask_replay
    if filters and engine.server == "sglang":
        yield (
            f"sampling.{filters[0]}: wanted no filter with an SGLang server, whose log-probs are over all tokens, got "
            f"{getattr(sampling, filters[0]):g}"
        )
    elif filters and not size:
        yield (
            f"sampling.mask_replay: wanted at least 1 with an engine and sampling.{filters[0]}: a server's log-probs "
            "are over the tokens that filters leave, got 0"
        )
    elif filters and not 0 < sampling.top_k <= size:
        yield (
            f"sampling.top_k: wanted 1 to {size} (sampling.mask_replay) with an engine and a filter: a server returns "
            f"a limited number of the tokens that filters leave, got {sampling.top_k}"
        )


def is_address(address: str) -> bool:
    """Return whether an address is http://HOST:PORT or https://HOST:PORT."""
    try:
        parts = urlsplit(address)
        return parts.scheme in ("http", "https") and bool(parts.hostname and parts.port) and parts.path in ("", "/")
    except ValueError:  # a port that is no number
        return False


def engine_warnings(engine: Engine, sampling: Sampling, model: ModelConfig) -> Iterator[str]:
    """Warn of settings that servers do not read, and of a model that vLLM has no kernel for."""
    if engine.server == "vllm" and model.head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        yield f"model.head_dim={model.head_dim}: vLLM on a CPU wants one of {known}, and ends at the first prompt"
    if sampling.stop:
        yield (
            "sampling.stop: servers stop only at tokens that hold a whole stop string; where one spans tokens they "
            "sample on to sampling.max_tokens, and what follows the string is dropped"
        )
    for name in IN_PROCESS:
        is_read = name == "chunk" and engine.partial is not None
        if not is_read and (value := getattr(sampling, name)) != getattr(Sampling(), name):
            yield f"sampling.{name}={value}: without effect, because servers sample (engine)"

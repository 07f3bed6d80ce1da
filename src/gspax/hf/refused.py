"""What gspax lacks of published models that it does not read: the reason in an error, for `hf.config_json`."""

_MISSING: dict[str, tuple[str, ...]] = {
    "a scale of queries by position": ("mistral4",),
    "sparse attention": ("deepseek_v32", "glm_moe_dsa"),
    "Kimi delta attention": ("kimi_linear",),
    "lightning attention": ("minimax", "bailing_hybrid"),
    "attention in chunks": ("llama4_text",),
    "a cap on attention scores": ("gemma2", "vaultgemma"),
    "its family": ("exaone_moe", "granite_swa", "granitemoeshared", "bamba", "arcee"),  # gspax has their layers
    "LayerNorm": (
        *("cohere", "cohere2", "starcoder2", "stablelm", "phi", "olmo", "nemotron", "dbrx", "persimmon"),
        *("gpt2", "gptj", "gpt_neox", "falcon", "opt", "bloom", "mpt"),
    ),
    "an embedding for each layer": ("gemma3n_text",),
    "a router that masks experts between its two choices": ("phimoe",),
    "an expert without weights": ("longcat_flash",),
    "hyper-connections": ("deepseek_v4",),
    "a head size for each kind of layers": ("mimo_v2_flash",),
    "a model of state spaces alone": ("mamba2",),
    "attention beside a state space in one layer": ("falcon_h1",),
    "a state space layer of Mamba-1": ("falcon_mamba", "jamba", "zamba", "mamba"),
    "a layer that shares its weights": ("zamba2",),
    "a recurrent layer": ("recurrent_gemma", "rwkv", "xlstm"),
}
MISSING = {name: part for part, names in _MISSING.items() for name in names}  # the unsupported part, by model_type
TOWERS = {"vision_config": "a vision tower", "audio_config": "an audio tower"}  # in families besides `WRAPPERS`

"""A folder with a small tokenizer and a chat template like Qwen3's, written without gspax."""

import json

import pytest

SPECIAL = ("<eot>", "<turn>", "<end>")
# Like Qwen3's: turns in special tokens, and an empty thinking block in the prompt unless thinking is enabled.
TEMPLATE = """{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('nobody is called ' + message.role) }}
{%- endif %}
{{- '<turn>' + message.role + '\n' + message.content + '<end>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<turn>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""


def write_folder(folder, template=TEMPLATE):
    """A byte-level tokenizer with a chat template. Adding special tokens would put <eot> in front of every text."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))  # <turn> and <eot> are special in this file only
    tokenizer.add_tokens(["<think>", "</think>", "\n\n"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<eot> $A", special_tokens=[("<eot>", 256)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
    (folder / "generation_config.json").write_text('{"eos_token_id": [258, 256]}')
    return folder

"""Chat templates in the structure of published ones, and small tokenizers with their special tokens.

Each is written anew and short: the order of its tokens, what ends a turn, what it does with thinking, calls and replies
is as the published template has it; its English sentences are not. Where the structure was read is named beside it.
"""

import json
from typing import NamedTuple

import pytest

CHATML = """{%- macro say(role, text) -%}{{ '<|im_start|>' + role + '\n' + text + '<|im_end|>\n' }}{%- endmacro -%}"""
TOOLS = """{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- endif %}
{%- if tools %}{{ '<|im_start|>system\n' + (system or '') }}<tools>{%- for tool in tools %}{{ '\n' + tool|tojson }}
{%- endfor %}{{ '\n</tools><|im_end|>\n' }}{%- elif system is defined %}{{ say('system', system) }}{%- endif %}"""
HERMES = """{%- for call in m.tool_calls or [] %}{%- set call = call.function or call %}
{{- ('' if loop.first and not text else '\n') + '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments if call.arguments is string else call.arguments|tojson }}{{- '}\n</tool_call>' }}{%- endfor %}"""
XML = """{%- for call in m.tool_calls or [] %}{%- set call = call.function or call %}
{{- ('\n' if not loop.first else '\n\n' if text|trim else '') + '<tool_call>\n<function=' + call.name + '>\n' }}
{%- for name, value in call.arguments|items %}
{{- '<parameter=' + name + '>\n' + (value if value is string else value|tojson) + '\n</parameter>\n' }}{%- endfor %}
{{- '</function>\n</tool_call>' }}{%- endfor %}"""
CHATML_REPLY = """{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{%- endif %}"""
SPLIT = """{%- set text, thought = m.content, '' %}{%- if '</think>' in text %}
{%- set thought = text.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set text = text.split('</think>')[-1].lstrip('\n') %}{%- endif %}"""
LAST_USER = """{%- set ns = namespace(user=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}
{%- set ns.user = loop.index0 %}{%- endif %}{%- endfor %}"""


def chatml(assistant, calls, prompt):
    """Qwen's templates: they differ in what an assistant's message and the prompt begin with."""
    return (
        CHATML + TOOLS + LAST_USER + "{%- for m in messages %}{%- if m.role == 'assistant' %}" + SPLIT
        + "{{- '<|im_start|>assistant\n' }}" + assistant + calls + "{{- '<|im_end|>\n' }}"
        "{%- elif m.role == 'tool' %}" + CHATML_REPLY + "{%- elif m.role == 'user' %}{{ say('user', m.content) }}"
        "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}" + prompt
        + "{%- endif %}"
    )  # fmt: skip


KEPT = """{%- if loop.index0 > ns.user and (loop.last or thought) %}
{{- '<think>\n' + thought + '\n</think>\n\n' + text }}{%- else %}{{ text }}{%- endif %}"""
NO_THINKING = "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}"
QWEN3 = chatml(KEPT, HERMES, NO_THINKING + "{%- endif %}")
QWEN3_2507 = chatml("{{- m.content }}", HERMES, "")
QWEN25 = "{%- set system = 'Be helpful.' %}" + QWEN3_2507
QWEN3_THINKING = chatml(KEPT, HERMES, "{{ '<think>\n' }}")
QWEN35 = chatml(
    """{%- if loop.index0 > ns.user %}{{ '<think>\n' + thought + '\n</think>\n\n' + text }}
{%- else %}{{ text }}{%- endif %}""",
    XML,
    NO_THINKING + "{%- else %}{{ '<think>\n' }}{%- endif %}",
)
GEMMA3 = """{{ bos_token }}{%- set first = '' %}{%- set rest = messages %}{%- if messages[0].role == 'system' %}
{%- set first = messages[0].content + '\n\n' %}{%- set rest = messages[1:] %}{%- endif %}
{%- for m in rest %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate user/assistant') }}{%- endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') }}
{{- m.content|trim + '<end_of_turn>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{%- endif %}"""
GEMMA4 = (
    """{%- set thinks = enable_thinking|default(false) %}{%- set system = messages[0].role == 'system' %}
{{- bos_token }}{%- if thinks or tools or system %}{{ '<|turn>system\n' + ('<|think|>\n' if thinks else '') }}
{%- if system %}{{ messages[0].content|trim }}{%- endif %}{%- for tool in tools or [] %}
{{- '<|tool>declaration:' + tool.function.name + tool.function.parameters|tojson + '<tool|>' }}{%- endfor %}
{{- '<turn|>\n' }}{%- endif %}"""
    + LAST_USER.replace("user=-1", "user=-1, role='', last=''")
    + """{%- for m in messages %}{%- if m.role not in ['system', 'tool'] %}{%- set place = loop.index0 %}
{%- if m.role != 'assistant' or ns.role != 'assistant' %}
{{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}{%- endif %}
{%- set ns.role = m.role %}{%- set ns.last = '' %}{%- if m.reasoning_content and m.tool_calls and place > ns.user %}
{{- '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' }}{%- endif %}
{%- for call in m.tool_calls or [] %}{%- set ns.last = 'call' %}{%- if call.function.arguments is string %}
{{- raise_exception('arguments must be a mapping') }}{%- endif %}
{{- '<|tool_call>call:' + call.function.name + '{' }}{%- for name, value in call.function.arguments|dictsort %}
{{- (',' if not loop.first else '') + name + ':<|"|>' + value + '<|"|>' }}{%- endfor %}{{ '}<tool_call|>' }}
{%- endfor %}{%- set next = namespace(role='') %}
{%- for after in messages[place + 1:] if m.tool_calls or after.role != 'tool' %}
{%- if after.role == 'tool' and not next.role %}{%- set ns.last = 'reply' %}
{{- '<|tool_response>response:' + (after.name or 'unknown') + '{value:<|"|>' + after.content }}
{{- '<|"|>}<tool_response|>' }}
{%- elif after.role != 'tool' and not next.role %}{%- set next.role = after.role %}{%- endif %}
{%- endfor %}{%- for part in m.content.split('<channel|>') %}{{ part.split('<|channel>')[0]|trim }}{%- endfor %}
{%- if ns.last == 'call' %}{{ '<|tool_response>' }}{%- elif m.role == 'assistant' and next.role == 'assistant' %}
{%- elif ns.last != 'reply' or m.content|trim or next.role %}{{ '<turn|>\n' }}{%- endif %}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{%- if not ns.last %}
{{- '<|turn>model\n' + ('' if thinks else '<|channel>thought\n<channel|>') }}
{%- elif ns.last == 'reply' and thinks %}{{ '<|channel>thought\n' }}{%- endif %}{%- endif %}"""
)
PHI3 = """{%- for m in messages %}{%- if m.role in ['system', 'user', 'assistant'] %}
{{- '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{%- else %}{{ eos_token }}{%- endif %}"""
PHI4_MINI = """{%- for m in messages %}{%- if m.role == 'system' and m.tools %}
{{- '<|system|>' + m.content + '<|tool|>' + m.tools + '<|/tool|><|end|>' }}
{%- else %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- else %}{{ eos_token }}{%- endif %}"""
GLM45 = (
    "[gMASK]<sop>{%- if tools %}{{ '<|system|>\n<tools>' }}{%- for tool in tools %}{{ '\n' + tool|tojson }}"
    "{%- endfor %}{{ '\n</tools>' }}{%- endif %}"
    + LAST_USER
    + """{%- for m in messages %}{%- if m.role == 'user' %}
{{- '<|user|>\n' + m.content + ('/nothink' if enable_thinking is defined and not enable_thinking else '') }}
{%- elif m.role == 'system' %}{{ '<|system|>\n' + m.content }}
{%- elif m.role == 'assistant' %}{{ '<|assistant|>' }}"""
    + SPLIT
    + """
{{- '\n<think>' + (thought.strip() if loop.index0 > ns.user else '') + '</think>' }}
{%- if text.strip() %}{{ '\n' + text.strip() }}{%- endif %}
{%- for call in m.tool_calls or [] %}{{ '\n<tool_call>' + call.function.name }}
{%- for name, value in call.function.arguments.items() %}
{{- '\n<arg_key>' + name + '</arg_key>\n<arg_value>' + value + '</arg_value>' }}{%- endfor %}
{{- '\n</tool_call>' }}{%- endfor %}
{%- elif m.role == 'tool' %}{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}
{%- endif %}{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- if enable_thinking is defined and not enable_thinking %}
{{- '\n<think></think>' }}{%- endif %}{%- endif %}"""
)
LLAMA3 = """{%- for m in messages %}{{ (bos_token if loop.first else '') + '<|start_header_id|>' + m.role }}
{{- '<|end_header_id|>\n\n' + m.content|trim + '<|eot_id|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
LLAMA31 = """{{ bos_token }}{%- macro head(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}
{%- endmacro %}{{ head('system') + 'Today Date: ' + strftime_now('%d %b %Y') + '\n\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content|trim }}{%- set messages = messages[1:] %}{%- endif %}
{{- '<|eot_id|>' }}{%- if tools %}{{ head('user') + 'Answer with {"name": ..., "parameters": ...}.\n\n' }}
{%- for tool in tools %}{{ tool|tojson(indent=4) + '\n\n' }}{%- endfor %}
{{- messages[0].content|trim + '<|eot_id|>' }}{%- set messages = messages[1:] %}{%- endif %}
{%- for m in messages %}{%- if m.tool_calls %}{%- if m.tool_calls|length != 1 %}
{{- raise_exception('only one call at once') }}{%- endif %}{%- set call = m.tool_calls[0].function %}
{{- head('assistant') + '{"name": "' + call.name + '", "parameters": ' + call.arguments|tojson + '}<|eot_id|>' }}
{%- elif m.role in ['tool', 'ipython'] %}{{ head('ipython') + {'output': m.content}|tojson + '<|eot_id|>' }}
{%- else %}{{ head(m.role) + m.content|trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{%- endif %}"""
MISTRAL = """{%- set users = messages|selectattr('role', 'equalto', 'user')|list %}
{%- set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}{{ bos_token }}
{%- for m in messages %}{%- if m.role == 'user' %}{%- if tools and m == users[-1] %}
{{- '[AVAILABLE_TOOLS] ' + tools|tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST] ' + (system if loop.last else '') + m.content + '[/INST]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{%- for call in m.tool_calls %}{%- if call.id|length != 9 %}
{{- raise_exception('ids have 9 characters') }}{%- endif %}
{{- (call.function|tojson)[:-1] + ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}{%- endfor %}
{{- ']' + eos_token }}{%- elif m.role == 'assistant' %}{{ ' ' + m.content|trim + eos_token }}
{%- elif m.role == 'tool' %}{%- if not m.tool_call_id or m.tool_call_id|length != 9 %}
{{- raise_exception('ids have 9 characters') }}{%- endif %}
{{- '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}{%- endfor %}"""
DEEPSEEK_V2 = """{{ bos_token }}{%- for m in messages %}{%- if m.role == 'user' %}{{ 'User: ' + m.content + '\n\n' }}
{%- elif m.role == 'assistant' %}{{ 'Assistant: ' + m.content + eos_token }}
{%- elif m.role == 'system' %}{{ m.content + '\n\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{%- endif %}"""
DEEPSEEK = """{%- set ns = namespace(tool=false, out=false, system='') %}{%- for m in messages %}
{%- if m.role == 'system' %}{%- set ns.system = m.content %}{%- endif %}{%- endfor %}{{ bos_token + ns.system }}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.tool = false %}{{ '<|User|>' + m.content }}
{%- elif m.role == 'assistant' and m.tool_calls %}{%- set ns.tool = false %}
{{- '<|Assistant|>' + (m.content or '') + '<|tool_calls_begin|>' }}{%- for call in m.tool_calls %}
{{- '<|tool_call_begin|>' + call.type + '<|tool_sep|>' + call.function.name + '\n```json\n' }}
{{- call.function.arguments + '\n```<|tool_call_end|>' }}{%- endfor %}{{ '<|tool_calls_end|>' + eos_token }}
{%- elif m.role == 'assistant' %}{%- if ns.tool %}{{ '<|tool_outputs_end|>' + m.content + eos_token }}
{%- else %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + eos_token }}{%- endif %}{%- set ns.tool = false %}
{%- elif m.role == 'tool' %}{%- set ns.tool = true %}{%- if not ns.out %}{{ '<|tool_outputs_begin|>' }}
{%- set ns.out = true %}{%- endif %}{{ '<|tool_output_begin|>' + m.content + '<|tool_output_end|>' }}{%- endif %}
{%- endfor %}{%- if ns.tool %}{{ '<|tool_outputs_end|>' }}{%- endif %}
{%- if add_generation_prompt and not ns.tool %}{{ '<|Assistant|>' + OPENED }}{%- endif %}"""
DEEPSEEK_V31 = """{%- set ns = namespace(user=false, tool=false) %}{{ bos_token }}{%- for m in messages %}
{%- if m.role == 'user' %}{%- set ns.user = true %}{%- set ns.tool = false %}{{ '<|User|>' + m.content }}
{%- elif m.role == 'assistant' %}{%- if ns.user %}{{ '<|Assistant|></think>' }}{%- endif %}
{%- set ns.user = false %}{%- if m.tool_calls %}{{ (m.content or '') + '<|tool_calls_begin|>' }}
{%- for call in m.tool_calls %}{{ '<|tool_call_begin|>' + call.function.name + '<|tool_sep|>' }}
{{- call.function.arguments + '<|tool_call_end|>' }}{%- endfor %}{{ '<|tool_calls_end|>' + eos_token }}
{%- else %}{{ (m.content if ns.tool else m.content.split('</think>', 1)[-1]) + eos_token }}{%- endif %}
{%- elif m.role == 'tool' %}{%- set ns.user = false %}{%- set ns.tool = true %}
{{- '<|tool_output_begin|>' + m.content + '<|tool_output_end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt and ns.user %}{{ '<|Assistant|>' + ('<think>' if thinking else '</think>') }}
{%- endif %}"""
GPT_OSS = """{{ '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '\n\nReasoning: ' }}
{{- reasoning_effort|default('medium') + '<|end|>' }}
{%- if tools %}{{ '<|start|>developer<|message|># Tools\n' + tools|tojson + '<|end|>' }}{%- endif %}
{%- set last = namespace(name=none) %}{%- for m in messages %}{%- if m.role == 'assistant' and m.tool_calls %}
{%- set call = m.tool_calls[0].function %}{%- set last.name = call.name %}{%- if m.content %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.content + '<|end|>' }}{%- endif %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments|tojson + '<|call|>' }}{%- elif m.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- elif m.role == 'tool' %}{%- if last.name is none %}
{{- raise_exception('no previous assistant message with a call') }}{%- endif %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- m.content|tojson + '<|end|>' }}{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{%- endif %}"""
MINIMAX = (
    "{{ ']~!b[]~b]system\nBe helpful.' }}{%- if tools %}{{ '\n<tools>' + tools|tojson + '</tools>' }}{%- endif %}"
    "{{ '[e~[\n' }}"
    + LAST_USER
    + """{%- set last = namespace(name=none) %}{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ ']~b]ai\n' }}"""
    + SPLIT
    + """{%- if thought and loop.index0 > ns.user %}
{{- '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}{{ text }}{%- set last.name = none %}
{%- if m.tool_calls %}{{ '\n<minimax:tool_call>\n' }}{%- for call in m.tool_calls %}
{{- '<invoke name="' + call.function.name + '">\n' }}{%- for name, value in call.function.arguments|items %}
{{- '<parameter name="' + name + '">' + value + '</parameter>\n' }}{%- endfor %}{{ '</invoke>\n' }}{%- endfor %}
{{- '</minimax:tool_call>' }}{%- set last.name = 'a' %}{%- endif %}{{ '[e~[\n' }}
{%- elif m.role == 'tool' %}{%- if last.name is none %}
{{- raise_exception('no previous assistant message with a tool call') }}{%- endif %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ ']~b]tool' }}{%- endif %}
{{- '\n<response>' + m.content + '</response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '[e~[\n' }}{%- endif %}
{%- else %}{{ ']~b]' + m.role + '\n' + m.content + '[e~[\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ ']~b]ai\n<think>\n' }}{%- endif %}"""
)
OLMO3 = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}
{%- if m.role == 'assistant' and loop.last %}{{ eos_token }}{%- else %}{{ '<|im_end|>\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{%- endif %}"""
TULU = """{{ bos_token }}{%- for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}
{%- if m.role == 'assistant' %}{{ eos_token }}{%- endif %}{%- if not loop.last or m.role != 'assistant' %}{{ '\n' }}
{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{%- endif %}"""
ERNIE = """{{ cls_token or '<|begin_of_sentence|>' }}{%- for m in messages %}{%- if m.role == 'user' %}
{{- 'User: ' + m.content + '\n' }}{%- elif m.role == 'assistant' %}
{{- 'Assistant: ' + m.content + '<|end_of_sentence|>' }}{%- else %}{{ m.content + '\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant: ' }}{%- endif %}"""
# with tools its turns are written differently, a tool's reply too
HUNYUAN = """{%- if tools %}
{{- '<|startoftext|>Tools: ' + tools|tojson + '\n' + strftime_now('%Y-%m-%d') + '<|extra_4|>' }}{%- endif %}
{%- for m in messages %}{%- if m.role == 'user' %}
{{- ('User: ' if tools else '<|startoftext|>') + m.content + '<|extra_0|>' }}
{%- elif m.role == 'assistant' %}{{ m.content }}{%- if tools and m.tool_calls %}{{ '<tool_calls>[' }}
{%- for call in m.tool_calls %}{%- set text = call.function.arguments %}{{ ', ' if not loop.first else '' }}
{{- '{"name": "' + call.function.name + '", "arguments": ' + (text if text is string else text|tojson) + '}' }}
{%- endfor %}{{ ']</tool_calls>' }}{%- endif %}{{ '<|eos|>' }}
{%- elif m.role == 'tool' %}
{{- ('<tool_response>' + m.content + '</tool_response>' if tools else m.content) + '<|extra_0|>' }}
{%- else %}{{ '<|startoftext|>' + m.content + '<|extra_4|>' }}{%- endif %}{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n' }}{%- endif %}"""
DOTS = """{%- for m in messages %}{%- set name = {'user': 'userprompt', 'assistant': 'response'}.get(m.role, m.role) %}
{{- '<|' + name + '|>' + m.content + '<|endof' + name + '|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|response|>' }}{%- endif %}"""
SMOLLM2 = """{%- for m in messages %}{%- if loop.first and m.role != 'system' %}
{{- '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{%- endif %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"""
# Without tools of its own two kinds, which hf_chat does not pass, the published system turn has no end either.
SMOLLM3 = """{%- set mode = '/think' if enable_thinking is not defined or enable_thinking else '/no_think' %}
{%- set system = messages[0].content if messages[0].role == 'system' else 'Be helpful.' %}
{%- if '/no_think' in system %}{%- set mode = '/no_think' %}{%- elif '/think' in system %}{%- set mode = '/think' %}
{%- endif %}{%- set begin = '<|im_start|>assistant\n' + ('' if mode == '/think' else '<think>\n\n</think>\n') %}
{{- '<|im_start|>system\n' + strftime_now('%d %B %Y') + '\n' + mode + '\n\n' }}
{{- system.replace('/no_think', '').replace('/think', '').rstrip() + '\n\n' }}
{%- for m in messages %}{%- if m.role == 'assistant' %}{{ begin + m.content.lstrip('\n') + '<|im_end|>\n' }}
{%- elif m.role in ('user', 'tool') %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ begin }}{%- endif %}"""
GRANITE4 = (
    """{%- macro say(role, text) -%}
{{ '<|start_of_role|>' + role + '<|end_of_role|>' + text + '<|end_of_text|>\n' }}{%- endmacro -%}
{%- set own = messages[0].content if messages[0].role == 'system' else '' %}{%- set ns = namespace(text=own) %}
{%- for tool in tools or [] %}{%- set ns.text = (ns.text or '<tools>') + '\n' + tool|tojson %}{%- endfor %}
{{- say('system', ns.text or 'Be helpful.') }}
{%- for m in messages %}{%- if m.role == 'user' or m.role == 'system' and not loop.first %}{{ say(m.role, m.content) }}
{%- elif m.role == 'assistant' %}{%- set text = m.content %}
{{- '<|start_of_role|>assistant<|end_of_role|>' + text }}"""
    + HERMES
    + "{{- '<|end_of_text|>\n' }}{%- elif m.role == 'tool' %}"
    + CHATML_REPLY.replace("<|im_start|>user", "<|start_of_role|>user<|end_of_role|>").replace(
        "<|im_end|>", "<|end_of_text|>"
    )
    + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"
)

NEMOTRON3 = (
    CHATML
    + """{%- set own = messages[0].content if messages[0].role == 'system' else '' %}{{ '<|im_start|>system\n' + own }}
{%- if tools %}{{ ('\n\n' if own else '') + '<tools>' }}{%- for tool in tools %}{{ '\n' + tool|tojson }}{%- endfor %}
{{- '\n</tools>' }}{%- endif %}{{ '<|im_end|>\n' }}"""
    + LAST_USER
    + """{%- for m in messages %}{%- if m.role == 'assistant' %}{%- set text = m.content or '' %}
{%- if '<think>' not in text and '</think>' not in text %}{%- set text = '<think></think>' + text %}{%- endif %}
{%- if loop.index0 < ns.user and '</think>' in text and ('<think>' in text or m.tool_calls) %}
{%- set text = '<think></think>' + text.split('</think>')[-1] %}{%- endif %}
{{- '<|im_start|>assistant\n' + text|trim + ('\n' if m.tool_calls else '') }}
{%- for call in m.tool_calls or [] %}{%- set call = call.function or call %}
{{- '<tool_call>\n<function=' + call.name + '>\n' }}{%- for name, value in call.arguments|items %}
{{- '<parameter=' + name + '>\n' + (value if value is string else value|tojson) + '\n</parameter>\n' }}{%- endfor %}
{{- '</function>\n</tool_call>\n' }}{%- endfor %}{{ '<|im_end|>\n' }}
{%- elif m.role == 'user' or m.role == 'system' and not loop.first %}{{ say(m.role, m.content) }}
{%- elif m.role == 'tool' %}{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user\n' }}{%- endif %}
{{- '<tool_response>\n' + m.content + '\n</tool_response>\n' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{%- endif %}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}
{{- '</think>' if enable_thinking is defined and enable_thinking is false else '\n' }}{%- endif %}"""
)


class Published(NamedTuple):
    """A template with what the other files of its model say."""

    families: str  # model types of gspax whose chat models have it
    template: str
    stops: tuple[str, ...]  # of generation_config.json
    special: tuple[str, ...]  # further added tokens
    eos: str = ""  # of tokenizer_config.json, if it is not the first stop
    bos: str | None = None
    thinking: bool = False
    date: str | None = None
    source: str = ""  # where its structure was read


IM = ("<|im_end|>", "<|endoftext|>")
IM_TOKENS = (
    *("<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>"),
)
TRL, VLLM, LLAMA_CPP = "TRL's chat_templates", "vLLM's examples", "llama.cpp's models/templates"
LLAMA_CHAT, GGUF, COPIES = "llama.cpp's llama-chat.cpp", "the metadata of a GGUF file", "copies in public repositories"
DEEPSEEK_TOKENS = (
    *("<|User|>", "<|Assistant|>", "<think>", "</think>", "<|tool_calls_begin|>", "<|tool_calls_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_sep|>", "<|tool_outputs_begin|>", "<|tool_outputs_end|>"),
    *("<|tool_output_begin|>", "<|tool_output_end|>"),
)
DEEPSEEK_ENDS = {"stops": ("<|end_of_sentence|>",), "special": DEEPSEEK_TOKENS, "bos": "<|begin_of_sentence|>"}
GEMMA4_TOKENS = (
    *("<|turn>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<tool_response|>", '<|"|>', "<|think|>"),
    *("<|channel>", "<channel|>"),
)
HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>")

PUBLISHED = {
    "Qwen3": Published("qwen3, qwen3_moe", QWEN3, IM, IM_TOKENS, source=TRL),
    "Qwen3, thinking": Published("qwen3, qwen3_moe", QWEN3, IM, IM_TOKENS, thinking=True, source=TRL),
    "Qwen3-Instruct-2507": Published("qwen3, qwen3_moe, qwen3_next", QWEN3_2507, IM, IM_TOKENS, source=TRL),
    "Qwen3-Thinking-2507": Published(
        "qwen3, qwen3_moe, qwen3_next", QWEN3_THINKING, IM, IM_TOKENS, thinking=True, source=GGUF
    ),
    "Qwen3.5": Published("qwen3_5_text, qwen3_5_moe_text", QWEN35, IM, IM_TOKENS, thinking=True, source=TRL),
    "Qwen3-Base": Published("qwen3, qwen3_moe", QWEN3, ("<|endoftext|>",), ("<|im_end|>", *IM_TOKENS), source=TRL),
    "Qwen2.5": Published("qwen2, qwen2_moe", QWEN25, IM, IM_TOKENS, source=TRL),
    "Llama 3": Published(
        "llama", LLAMA3, ("<|end_of_text|>", "<|eot_id|>"), HEADERS, bos="<|begin_of_text|>", source=TRL
    ),
    "Llama 3.1": Published(
        "llama", LLAMA31, ("<|end_of_text|>", "<|eot_id|>"), HEADERS, bos="<|begin_of_text|>", date="2026-01-31",
        eos="<|eot_id|>", source=VLLM,
    ),
    "SmolLM2": Published("llama", SMOLLM2, ("<|im_end|>",), ("<|im_start|>", "<|endoftext|>"), source=GGUF),
    "SmolLM3": Published("smollm3", SMOLLM3, IM, IM_TOKENS, date="2026-01-31", source=COPIES),
    "SmolLM3, thinking": Published(
        "smollm3", SMOLLM3, IM, IM_TOKENS, thinking=True, date="2026-01-31", source=COPIES
    ),
    "Granite 4": Published(
        "granitemoehybrid", GRANITE4, ("<|end_of_text|>",),
        ("<|start_of_role|>", "<|end_of_role|>", *IM_TOKENS[3:]), source=COPIES,
    ),
    "Nemotron 3 Nano": Published(
        "nemotron_h", NEMOTRON3, ("<|im_end|>", "</s>"), IM_TOKENS, bos="<s>", thinking=True, source=COPIES
    ),
    "Mistral": Published(
        "mistral, mixtral", MISTRAL, ("</s>",), ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]"), bos="<s>",
        source=TRL,
    ),
    "Phi-3.5": Published(
        "phi3", PHI3, ("<|endoftext|>", "<|end|>", "<|assistant|>"), ("<|user|>", "<|system|>"), source=TRL
    ),
    "Phi-4-mini": Published(
        "phi3", PHI4_MINI, ("<|end|>", "<|endoftext|>"), ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"),
        eos="<|endoftext|>", source=COPIES,
    ),
    "GLM-4.5": Published(
        "glm4_moe, glm4_moe_lite", GLM45, ("<|endoftext|>", "<|user|>", "<|observation|>"),
        ("[gMASK]", "<sop>", "<|assistant|>", "<|system|>", "<think>", "</think>"), source=LLAMA_CPP,
    ),
    "GLM-4.5, thinking": Published(
        "glm4_moe, glm4_moe_lite", GLM45, ("<|endoftext|>", "<|user|>", "<|observation|>"),
        ("[gMASK]", "<sop>", "<|assistant|>", "<|system|>", "<think>", "</think>"), thinking=True, source=LLAMA_CPP,
    ),
    "dots.llm1": Published(
        "dots1", DOTS, ("<|endofresponse|>",), ("<|response|>", "<|userprompt|>", "<|endofuserprompt|>"),
        source=LLAMA_CHAT,
    ),
    "DeepSeek-V2": Published("deepseek_v2", DEEPSEEK_V2, **DEEPSEEK_ENDS, source=LLAMA_CHAT),
    "DeepSeek-V3": Published("deepseek_v3", DEEPSEEK.replace("OPENED", "''"), **DEEPSEEK_ENDS, source=TRL),
    "DeepSeek-R1": Published(
        "deepseek_v3, qwen2", DEEPSEEK.replace("OPENED", "'<think>\n'"), **DEEPSEEK_ENDS, thinking=True,
        source=LLAMA_CPP,
    ),
    "DeepSeek-V3.1": Published("deepseek_v3", DEEPSEEK_V31, **DEEPSEEK_ENDS, source=LLAMA_CPP),
    "DeepSeek-V3.1, thinking": Published(
        "deepseek_v3", DEEPSEEK_V31, **DEEPSEEK_ENDS, thinking=True, source=LLAMA_CPP
    ),
    "MiniMax-M2": Published(
        "minimax_m2", MINIMAX, ("[e~[",), ("]~!b[", "]~b]", "<think>", "</think>"), thinking=True, source=LLAMA_CPP
    ),
    "ERNIE-4.5": Published(
        "ernie4_5_moe", ERNIE, ("</s>",), ("<|begin_of_sentence|>", "<|end_of_sentence|>"),
        source="transformers' tokenization_ernie4_5.py",
    ),
    "Hunyuan-A13B": Published(
        "hunyuan_v1_moe", HUNYUAN, ("<|eos|>",), ("<|startoftext|>", "<|extra_0|>", "<|extra_4|>"), date="2026-01-31",
        source=VLLM,
    ),
    "OLMo 2": Published("olmo2, olmoe", TULU, ("<|endoftext|>",), (), bos="<|endoftext|>", source=COPIES),
    "Olmo 3": Published(
        "olmo3", OLMO3, ("<|endoftext|>", "<|im_end|>"), ("<|im_start|>",), thinking=True, source=TRL
    ),
    "Gemma 3": Published(
        "gemma3_text", GEMMA3, ("<eos>", "<end_of_turn>"), ("<start_of_turn>",), bos="<bos>", source=TRL
    ),
    "Gemma 4": Published(
        "gemma4_text", GEMMA4, ("<eos>", "<turn|>", "<|tool_response>"), GEMMA4_TOKENS, eos="<turn|>", bos="<bos>",
        source=LLAMA_CPP,
    ),
    "Gemma 4, thinking": Published(
        "gemma4_text", GEMMA4, ("<eos>", "<turn|>", "<|tool_response>"), GEMMA4_TOKENS, eos="<turn|>", bos="<bos>",
        thinking=True, source=LLAMA_CPP,
    ),
    "gpt-oss": Published(
        "gpt_oss", GPT_OSS, ("<|return|>", "<|endoftext|>", "<|call|>"),
        ("<|start|>", "<|message|>", "<|end|>", "<|channel|>"), date="2026-01-31", source=TRL,
    ),
}  # fmt: skip


def write_folder(folder, published):
    """A byte-level tokenizer with the special tokens of a published one, and its template."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    bos = [published.bos] if published.bos else []
    tokens = list(dict.fromkeys([*published.stops, *bos, *published.special]))
    tokenizer.add_special_tokens(tokens)
    ids = {token: len(alphabet) + i for i, token in enumerate(tokens)}
    if bos:
        single = {"single": f"{bos[0]} $A", "special_tokens": [(bos[0], ids[bos[0]])]}
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(**single)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"eos_token": published.eos or published.stops[0], "bos_token": published.bos}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": published.template} | named
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    stops = {"eos_token_id": [ids[token] for token in published.stops]}
    (folder / "generation_config.json").write_text(json.dumps(stops))
    return folder

"""Plain Jinja chat templates, written for these tests in the manners of published ones, with their control tokens."""

from __future__ import annotations

from dataclasses import dataclass

_CHATML = "<|im_start|> <|im_end|> <|endoftext|> <tool_call> </tool_call> <tool_response> </tool_response>".split()
_TOOLS = """
{%- if tools %}<|im_start|>system
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
Tools, as JSON: {% for tool in tools %}{{ tool | tojson }}{% endfor %}
Call one with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}"""
_JSON_CALLS = """
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {% if call.function.arguments is string %}
{{- call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif %}}
</tool_call>{% endfor %}"""
_CHATML_TOOLS = (
    _TOOLS
    + """
{%- for message in messages %}
{%- if message.role == 'user' or message.role == 'tool' %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{% generation %}{{ message.content }}"""
    + _JSON_CALLS
    + """{% endgeneration %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
)
_CHATML_PLAIN = """
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_REASONING = (
    _TOOLS
    + """
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}<|im_start|>user
{{ message.content }}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role == 'assistant' %}
{%- set content = message.content %}{% set thought = message.reasoning_content or '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}<|im_start|>assistant
{% if KEEPS or loop.index0 > ns.last %}<think>
{{ thought }}
</think>

{% endif %}{{ content }}"""
    + _JSON_CALLS
    + """<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
)
_HEADERS = """{{ bos_token }}
{%- for message in messages if message.role != 'system' or loop.first %}
{%- set role = 'ipython' if message.role == 'tool' else message.role %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call only') }}{% endif %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
{{- message.tool_calls[0].function.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
{%- if loop.first and tools %}{{ tools | tojson(indent=4) + '\\n\\n' }}{% endif %}
{{- message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
_INSTRUCT = """{{ bos_token }}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}
{%- else %}{{ ' ' + message.content + eos_token }}{% endif %}
{%- endfor %}"""


@dataclass(frozen=True)
class Template:
    """`refused`: part of the reason for which the format can't be made from it; "" where it can.

    `refuses`: cases in which this template does more than append.
    """

    source: str
    names: tuple[str, ...]
    refused: str = ""
    bos_token: str = ""
    eos_token: str = ""
    refuses: tuple[str, ...] = ()


TEMPLATES = {
    "chatml, tools": Template(_CHATML_TOOLS, tuple(_CHATML), eos_token="<|im_end|>"),
    "chatml, no tools": Template(_CHATML_PLAIN, tuple(_CHATML), eos_token="<|im_end|>"),
    "reasoning kept": Template(
        _REASONING.replace("KEEPS", "true"), (*_CHATML, "<think>", "</think>"), refuses=("empty answer",)
    ),
    "reasoning dropped": Template(
        _REASONING.replace("KEEPS", "false"),
        (*_CHATML, "<think>", "</think>"),
        refuses=("several users", "empty answer"),
    ),
    "headers, trimmed": Template(
        _HEADERS,
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
    ),
    "[INST] as tokens": Template(
        _INSTRUCT,
        ("<s>", "</s>", "[INST]", "[/INST]"),
        bos_token="<s>",
        eos_token="</s>",
        refuses=("empty answer",),
    ),
    "[INST] as text": Template(
        _INSTRUCT, ("<s>", "</s>"), refused="marks roles with ordinary text", bos_token="<s>", eos_token="</s>"
    ),
    "no end token": Template(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>",
        ("<|user|>", "<|assistant|>", "<|system|>"),
        refused="no end token",
    ),
}

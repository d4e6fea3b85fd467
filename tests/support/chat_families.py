"""Tokenizers and chat templates of model families, as small as the formats allow, and tiny models.

Marks, their order and the white space around them are those of the families; all else is bytes.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizer_families import byte_level
from tokenizers import AddedToken

_SEP, _CALL, _CALL_END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_directory = tempfile.TemporaryDirectory()


@dataclass(frozen=True)
class ChatFamily:
    """How a family of models writes conversations."""

    template: str
    special: tuple[str, ...]
    ends: tuple[str, ...]  # of an answer
    marks: tuple[str, ...] = ()  # tokens of their own that are ordinary text
    call: str = ""  # one call, with NAME and ARGUMENTS
    calls: str = "*"  # several, one after the other
    between: str = ""
    asked: str = ""  # a prompt that offers f, after the user said "hi"
    answered: str = ""  # the same with a call of f, its answer "12" and the user's "thanks"


CALLED = {"city": "Bern", "days": 2}
ARGUMENTS = json.dumps(CALLED)
TOOL = (
    '{"type": "function", "function": {"name": "f", "description": "", '
    '"parameters": {"type": "object"}}}'
)

QWEN = ChatFamily(
    template="""
{%- if tools or messages[0].role == 'system' %}
  {{- '<|im_start|>system\n' }}
  {%- if messages[0].role == 'system' %}{{- messages[0].content }}{% endif %}
  {%- if tools %}
    {{- '# Tools\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{% endfor %}
    {{- '\n</tools>\n<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>' }}
  {%- endif %}
  {{- '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
  {%- if m.role == 'user' %}
    {{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
  {%- elif m.role == 'assistant' %}
    {{- '<|im_start|>assistant\n' + (m.content or '') }}
    {%- for call in m.tool_calls or [] %}
      {%- if m.content or not loop.first %}{{- '\n' }}{% endif %}
      {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
      {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- elif m.role == 'tool' %}
    {%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
    {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
    {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\n' }}
  {%- if enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}""",
    special=("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    ends=("<|im_end|>", "<|endoftext|>"),
    marks=("<tool_call>", "</tool_call>", "<think>", "</think>"),
    call='<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
    between="\n",
    asked="<|im_start|>system\n# Tools\n<tools>\n"
    + TOOL
    + '\n</tools>\n<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call><|im_end|>\n'
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    answered='<tool_call>\n{"name": "f", "arguments": '
    + ARGUMENTS
    + "}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n12\n</tool_response>"
    "<|im_end|>\n<|im_start|>user\nthanks<|im_end|>\n<|im_start|>assistant\n",
)
LLAMA = ChatFamily(
    template="""
{{- '<|begin_of_text|>' }}
{%- if tools %}
  {{- '<|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n' }}
  {%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\n\n' }}{% endfor %}
  {{- '<|eot_id|>' }}
{%- endif %}
{%- for m in messages %}
  {%- if m.tool_calls %}
    {%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at once') }}{% endif %}
    {%- set call = m.tool_calls[0].function %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
    {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
    {{- '<|eot_id|>' }}
  {%- elif m.role == 'tool' %}
    {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (m.content | tojson) + '<|eot_id|>' }}
  {%- else %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + (m.content | trim) }}
    {{- '<|eot_id|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}""",
    special=(
        *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
        *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
    ),
    ends=("<|eot_id|>", "<|eom_id|>"),
    call='{"name": "NAME", "parameters": ARGUMENTS}',
    between="; ",
    asked="<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n"
    + json.dumps(json.loads(TOOL), indent=4)
    + "\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    answered='{"name": "f", "parameters": '
    + ARGUMENTS
    + '}<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"12"<|eot_id|>'
    "<|start_header_id|>user<|end_header_id|>\n\nthanks<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
)
_MISTRAL = """
{{- '<s>' }}
{%- for m in messages %}
  {%- if m.role == 'user' %}
    {%- if tools and loop.last %}
      {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
    {%- endif %}
    {{- '[INST] ' + m.content + '[/INST]' }}
  {%- elif m.tool_calls %}
    CALLS
    {{- '</s>' }}
  {%- elif m.role == 'assistant' %}
    {{- ' ' + m.content + '</s>' }}
  {%- elif m.role == 'tool' %}
    {%- if m.tool_call_id | length != 9 %}{{- raise_exception('nine characters') }}{% endif %}
    RESULT
  {%- endif %}
{%- endfor %}"""
_MISTRAL_MARKS = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
MISTRAL = ChatFamily(
    template=_MISTRAL.replace(
        "CALLS",
        """
    {{- '[TOOL_CALLS] [' }}
    {%- for call in m.tool_calls %}
      {{- '{"name": "' + call.function.name + '", "arguments": ' }}
      {{- (call.function.arguments | tojson) + ', "id": "' + call.id + '"}' }}
      {{- ', ' if not loop.last else ']' }}
    {%- endfor %}""",
    ).replace(
        "RESULT",
        """{{- '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' }}
    {{- m.tool_call_id + '"}[/TOOL_RESULTS]' }}""",
    ),
    special=_MISTRAL_MARKS,
    ends=("</s>",),
    call='{"name": "NAME", "arguments": ARGUMENTS}',
    calls="[TOOL_CALLS] [*]",
    between=", ",
    asked=f"<s>[AVAILABLE_TOOLS] [{TOOL}][/AVAILABLE_TOOLS][INST] hi[/INST]",
    answered='[TOOL_CALLS] [{"name": "f", "arguments": '
    + ARGUMENTS
    + ', "id": "123456789"}]</s>[TOOL_RESULTS] {"content": 12, "call_id": "123456789"}'
    f"[/TOOL_RESULTS][AVAILABLE_TOOLS] [{TOOL}][/AVAILABLE_TOOLS][INST] thanks[/INST]",
)
MISTRAL_V11 = ChatFamily(
    template=_MISTRAL.replace(
        "CALLS",
        """
    {%- for call in m.tool_calls %}
      {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}
    {%- endfor %}""",
    ).replace("RESULT", "{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"),
    special=(*_MISTRAL_MARKS, "[ARGS]", "[CALL_ID]"),
    ends=("</s>",),
    call="[TOOL_CALLS]NAME[ARGS]ARGUMENTS",
    asked=MISTRAL.asked,
    answered=f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}</s>[TOOL_RESULTS]12[/TOOL_RESULTS]"
    f"[AVAILABLE_TOOLS] [{TOOL}][/AVAILABLE_TOOLS][INST] thanks[/INST]",
)
_DEEPSEEK = """
{{- '<｜begin▁of▁sentence｜>' }}
{%- for m in messages %}
  {%- if m.role == 'system' %}{{- m.content }}
  {%- elif m.role == 'user' %}{{- '<｜User｜>' + m.content }}
  {%- elif CALLED %}
    {{- '<｜Assistant｜>BEFORE<｜tool▁calls▁begin｜>' }}
    {%- for call in m.tool_calls %}
      {{- CALL }}
    {%- endfor %}
    {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
  {%- elif m.role == 'assistant' %}{{- '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}
  {%- elif m.role == 'tool' %}
    {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}AFTER{%- endif %}"""
_DEEPSEEK_MARKS = (
    *(_CALLS, _CALL, _SEP, _CALL_END, _CALLS_END),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<think>", "</think>"),
)
_DEEPSEEK_SPECIAL = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
)
# It has no place for tools, knows calls by their lack of a text, and joins arguments to texts.
DEEPSEEK_R1 = ChatFamily(
    template=_DEEPSEEK.replace(
        "CALL }}",
        f"'{_CALL}' + call.type + '{_SEP}' + call.function.name + '\\n```json\\n' + "
        f"call.function.arguments + '\\n```{_CALL_END}' }}}}",
    )
    .replace("CALLED", "m['role'] == 'assistant' and m['content'] is none")
    .replace("BEFORE", "")
    .replace("AFTER", "{{- '<think>\n' }}"),
    special=_DEEPSEEK_SPECIAL,
    ends=("<｜end▁of▁sentence｜>",),
    marks=_DEEPSEEK_MARKS,
    call=f"{_CALL}function{_SEP}NAME\n```json\nARGUMENTS\n```{_CALL_END}",
    calls=f"{_CALLS}*{_CALLS_END}",
    between="\n",
    asked="<｜User｜>hi<｜Assistant｜><think>\n",
    answered=f"{_CALL}function{_SEP}f\n```json\n{ARGUMENTS}\n```{_CALL_END}{_CALLS_END}"
    "<｜end▁of▁sentence｜><｜tool▁output▁begin｜>12<｜tool▁output▁end｜>"
    "<｜User｜>thanks<｜Assistant｜><think>\n",
)
DEEPSEEK_V31 = ChatFamily(
    template=_DEEPSEEK.replace(
        "CALL }}",
        f"'{_CALL}' + call.function.name + '{_SEP}' + call.function.arguments + '{_CALL_END}' }}}}",
    )
    .replace("CALLED", "m.tool_calls")
    .replace("BEFORE", "</think>")
    .replace("AFTER", "{{- '<think>' if thinking else '</think>' }}"),
    special=_DEEPSEEK_SPECIAL,
    ends=("<｜end▁of▁sentence｜>",),
    marks=_DEEPSEEK_MARKS,
    call=f"{_CALL}NAME{_SEP}ARGUMENTS{_CALL_END}",
    calls=f"{_CALLS}*{_CALLS_END}",
    asked="<｜User｜>hi<｜Assistant｜></think>",
    answered=f"{_CALL}f{_SEP}{ARGUMENTS}{_CALL_END}{_CALLS_END}"
    "<｜end▁of▁sentence｜><｜tool▁output▁begin｜>12<｜tool▁output▁end｜>"
    "<｜User｜>thanks<｜Assistant｜></think>",
)
GPT_OSS = ChatFamily(
    template="""
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- if tools %}
  {{- '<|start|>developer<|message|># Tools\n\nnamespace functions {\n' }}
  {%- for tool in tools %}
    {{- 'type ' + tool.function.name + ' = (_: ' + (tool.function.parameters | tojson) }}
    {{- ') => any;\n' }}
  {%- endfor %}
  {{- '}<|end|>' }}
{%- endif %}
{%- set ns = namespace(last='') %}
{%- for m in messages %}
  {%- if m.tool_calls %}
    {%- set ns.last = m.tool_calls[0].function.name %}
    {{- '<|start|>assistant<|channel|>commentary to=functions.' + ns.last }}
    {{- ' <|constrain|>json<|message|>' + (m.tool_calls[0].function.arguments | tojson) }}
    {{- '<|call|>' }}
  {%- elif m.role == 'tool' %}
    {{- '<|start|>functions.' + ns.last + ' to=assistant<|channel|>commentary<|message|>' }}
    {{- (m.content | tojson) + '<|end|>' }}
  {%- elif m.role == 'assistant' %}
    {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
  {%- else %}
    {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}""",
    special=(
        *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"),
        *("<|return|>", "<|call|>", "<|endoftext|>"),
    ),
    ends=("<|return|>", "<|call|>", "<|endoftext|>"),
    call="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS",
    asked="<|start|>system<|message|>Reasoning: medium<|end|><|start|>developer<|message|># Tools"
    '\n\nnamespace functions {\ntype f = (_: {"type": "object"}) => any;\n}<|end|>'
    "<|start|>user<|message|>hi<|end|><|start|>assistant",
    answered="<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    + ARGUMENTS
    + '<|call|><|start|>functions.f to=assistant<|channel|>commentary<|message|>"12"<|end|>'
    "<|start|>user<|message|>thanks<|end|><|start|>assistant",
)
CHAT_FAMILIES = {
    "hermes": QWEN,
    "hermes, spelled": replace(QWEN, marks=()),
    "llama3": LLAMA,
    "mistral": MISTRAL,
    "mistral-v11": MISTRAL_V11,
    "deepseek": DEEPSEEK_R1,
    "deepseek-v3.1": DEEPSEEK_V31,
    "gpt-oss": GPT_OSS,
}


@cache
def chat_tokenizer(family: str) -> Any:
    """As transformers wraps it."""
    chat, tokenizer = CHAT_FAMILIES[family], byte_level()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in chat.special])
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in chat.marks])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=chat.ends[0],
        additional_special_tokens=list(chat.special),
        chat_template=chat.template.strip(),
    )


def token_ids(family: str, *marks: str) -> list[int]:
    return [chat_tokenizer(family).convert_tokens_to_ids(mark) for mark in marks]


@cache
def chat_model(family: str) -> str:
    """A directory with random weights that mostly say ASCII, and the tokenizer."""
    tokenizer = chat_tokenizer(family)
    ends = token_ids(family, *CHAT_FAMILIES[family].ends)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        initializer_range=0.2,
        tie_word_embeddings=False,
        eos_token_id=ends,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.eos_token_id = ends
    for token in range(len(tokenizer)):
        text = tokenizer.convert_ids_to_tokens(token)
        if not (len(text) == 1 and text.isascii() and text.isprintable()):
            model.lm_head.weight.data[token] = 0
    directory = Path(_directory.name) / family
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)

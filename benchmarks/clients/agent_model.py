"""Small models whose template knows tools, for what no model in the package serves."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import selfspec_lab
from selfspec.loading import load_model

_FILL = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")
_TEMPLATE = """{%- if tools -%}
system: You may call these tools: {{ tools | tojson }}
Call one by <tool_call>
{"name": NAME, "arguments": OBJECT}
</tool_call>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == "tool" -%}
<tool_response>
{{ message.content }}
</tool_response>
{% else -%}
{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}assistant: {% endif -%}
"""


def make_agent_model(folder: Path, context: int) -> Path:
    """Writes a random model whose tokenizer has tokens to fill in the middle. What it writes means nothing.

    Args:
        folder: to make.
        context: tokens of its context.

    Returns:
        The folder.
    """
    tokenizer = AutoTokenizer.from_pretrained(Path(selfspec_lab.__file__).parent / "checkpoints" / "tiny")
    tokenizer.add_tokens([AddedToken(each, special=True, normalized=False) for each in _FILL], special_tokens=True)
    tokenizer.chat_template = _TEMPLATE
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=context,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_long_model(folder: Path, context: int) -> Path:
    """Writes SmolLM2 with a longer context, for times: after its own 8,192 tokens its texts mean little.

    Args:
        folder: to make.
        context: tokens of its context.

    Returns:
        The folder.
    """
    model, tokenizer = load_model("smollm2", dtype="bfloat16", unpack=True)
    assert tokenizer is not None
    model.config.max_position_embeddings = context
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_chat_model(folder: Path) -> Path:
    """Writes SmolLM2 with a template that knows tools. It writes texts, and calls tools where it has to.

    Args:
        folder: to make.

    Returns:
        The folder.
    """
    model, tokenizer = load_model("smollm2", dtype="bfloat16", unpack=True)
    assert tokenizer is not None
    model.save_pretrained(folder)
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder

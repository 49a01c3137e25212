"""A small random model whose template knows tools, and whose tokenizer has tokens to fill in the middle.

What it writes means nothing, unless a grammar makes it: for clients of interfaces that no model in the package serves.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import selfspec_lab

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
    """Writes the model.

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

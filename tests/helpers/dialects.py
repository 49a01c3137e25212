"""Tokenizers with small chat templates of ours, which show the forms of calls that the templates of models show."""

from dataclasses import dataclass

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from helpers.checkpoints import make_tokenizer
from helpers.models import VOCABULARY

MESSAGES = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]"
    "{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
THINK = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"


@dataclass(frozen=True)
class Model:
    """What a tokenizer of a format has: the words of its template about calls, and tokens of its own.

    Attributes:
        words: of the template.
        tokens: that are text, as ``<tool_call>`` of Qwen is.
        special: that no text shows.
    """

    words: str
    tokens: tuple[str, ...] = ()
    special: tuple[str, ...] = ()


SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK = (*SECTION, "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
KIMI = tuple(
    f"<|tool_{name}|>"
    for name in ("calls_section_begin", "calls_section_end", "call_begin", "call_argument_begin", "call_end")
)
TAGS = ("<tool_call>", "</tool_call>")
HARMONY = tuple(f"<|{name}|>" for name in ("start", "channel", "message", "end", "return", "call", "constrain"))

MODELS = {
    "hermes": Model("Answer <tool_call>."),
    "qwen": Model("Answer <tool_call> or <think></think>.", (*TAGS, "<think>", "</think>")),
    "qwen-coder": Model("Answer <tool_call> <function= <parameter=.", TAGS),
    "glm": Model("Answer <tool_call> <arg_key>.", (*TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")),
    "llama": Model('Answer {"name": name, "parameters": dictionary of arguments}.', special=("<|python_tag|>",)),
    "mistral": Model("Answer [TOOL_CALLS] in a list.", special=("[TOOL_CALLS]",)),
    "mistral-named": Model("Answer [TOOL_CALLS] [ARGS].", special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    "deepseek": Model(f"Answer {DEEPSEEK[2]} ```json.", special=DEEPSEEK),
    "deepseek-v3.1": Model(f"Answer {DEEPSEEK[2]} or <think></think>.", DEEPSEEK, ("<think>", "</think>")),
    "kimi": Model(f"Answer {KIMI[0]}.", special=KIMI),
    "granite": Model("Answer <|tool_call|>.", special=("<|tool_call|>",)),
    "phi": Model("Answer.", special=("<|tool_call|>", "<|/tool_call|>")),
    "pythonic": Model("Answer [func_name1(params_name1=params_value1)]."),
    "lfm2": Model("Answer.", special=("<|tool_call_start|>", "<|tool_call_end|>")),
    "olmo": Model("Answer <function_calls>."),
    "harmony": Model("Answer <|start|> <|channel|> <|message|>.", special=HARMONY),
    "plain": Model("Answer in JSON."),
}


def tokenizer_of(name: str, entries: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """The tokenizer of a format, with its template; its own tokens come after the entries."""
    model = MODELS[name]
    end = THINK if "<think>" in model.words else ""
    template = "{% if tools %}Tools: {{ tools | tojson }} {% endif %}{# " + model.words + " #}" + MESSAGES + end
    made = make_tokenizer(entries, chat_template=template)
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in model.tokens])
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in model.special], special_tokens=True)
    return made

"""``selfspec serve`` with a model that a grammar makes say what a script has: two calls of tools, then a text.

Agents let the model choose what it does, which no small model does well enough to say something of the server. So each
answer is constrained, beside what the request asks for, to the one text that the script has for that turn of the chat.
All else is as always: the model writes the tokens, and the server reads calls in them, and streams them.

``python scripted_server.py TOOLS serve ...`` takes the script as JSON: for each name of a tool that a client may have,
the arguments of the first and the second call. Chats without any of these tools are answered by a short text.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any


def scripted(prompt: str, calls: dict[str, list[dict[str, Any]]]) -> str:
    """The answer to a chat, as the model writes it."""
    name = next((name for name in calls if f'"name": {json.dumps(name)}' in prompt.partition("\n")[0]), None)
    results = prompt.split("<tool_response>\n")[1:]
    if name is None:
        return "A chat."
    if len(results) < 2:
        call = {"name": name, "arguments": calls[name][len(results)]}
        return f"Call {len(results) + 1}.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
    return f"Done: {' '.join(result.partition('</tool_response>')[0].strip() for result in results)}"


def run(calls: dict[str, list[dict[str, Any]]]) -> None:
    """Runs ``selfspec`` with answers of the script."""
    from selfspec.cli.command_line import main
    from selfspec.serve.served_engine import ServedEngine

    submit = ServedEngine.submit

    async def submit_scripted(self: ServedEngine, asked: Any, **options: Any) -> Any:
        forced = []
        for token_ids, params in asked:
            answer = scripted(str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False)), calls)
            grammar = f"start: {json.dumps(answer)}"
            forced.append((token_ids, dataclasses.replace(params, grammar=grammar, json_schema=None, regex=None)))
        return await submit(self, forced, **options)

    ServedEngine.submit = submit_scripted  # type: ignore[method-assign]
    main()


if __name__ == "__main__":  # processes that read requests import this file
    run(json.loads(sys.argv.pop(1)))

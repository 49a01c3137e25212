"""What ``instructor`` gets from a server. Runs in an environment that has it and not selfspec.

``python with_instructor.py URL MODEL`` prints the checks as JSON.
"""

from __future__ import annotations

import sys
from typing import Literal

import instructor
import openai
from checks import Checks
from pydantic import BaseModel, ConfigDict

URL, MODEL = sys.argv[1:]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


class Animal(BaseModel):
    """An animal, and nothing else: a small model would add fields until its answer is full."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["mammal", "bird", "fish", "insect"]
    legs: Literal[0, 2, 4, 6, 8]


check = Checks()


def ask(mode: instructor.Mode) -> str:
    """An object of the class, at the first try."""
    patched = instructor.from_openai(client, mode=mode)
    messages = [{"role": "user", "content": "Describe a spider as JSON."}]
    found = patched.chat.completions.create(
        model=MODEL, messages=messages, response_model=Animal, max_retries=0, temperature=0, max_tokens=400
    )
    assert isinstance(found, Animal)
    return str(found)


@check("an object of a class, by a tool that has to be called")
def by_tool() -> str:
    return ask(instructor.Mode.TOOLS)


@check("an object of a class, by a schema of the text")
def by_schema() -> str:
    return ask(instructor.Mode.JSON_SCHEMA)


@check("parts of an object, as it is streamed")
def parts() -> str:
    patched = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    messages = [{"role": "user", "content": "Describe a spider as JSON."}]
    found = list(
        patched.chat.completions.create_partial(
            model=MODEL, messages=messages, response_model=Animal, max_retries=0, temperature=0, max_tokens=400
        )
    )
    assert found[-1].kind is not None
    return f"{len(found)} parts; the last is {found[-1]}"


check.print()

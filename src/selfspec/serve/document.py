"""The OpenAPI document: bodies of requests, which no route of FastAPI parses, and the document made once."""

import json
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REFERENCE = "#/components/schemas/"


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """Says what the body of a route is; ``describe`` adds the model's schema."""
    schema = {"$ref": f"{_REFERENCE}{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI, models: Sequence[type[BaseModel]]) -> None:
    """Makes the document of an application whose routes take bodies of these models, and the route of its bytes."""
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=f"{_REFERENCE}{{model}}")
    document = app.openapi()
    document["components"]["schemas"].update(schemas["$defs"])
    content = json.dumps(document).encode()

    async def answer(_: Request) -> Response:
        return Response(content, media_type="application/json")

    app.add_route("/openapi.json", answer, include_in_schema=False)

"""Narrows a description so that made-up requests get somewhere: the one model that is served, short answers.

    narrow_openapi.py MODEL < openapi.json > narrowed.json

What the server answers is still held against the whole of it.
"""

import json
import sys

SHORT = {"max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"}
FEW = {"n", "best_of"}


def narrow(schema):
    if isinstance(schema, list):
        for part in schema:
            narrow(part)
    if not isinstance(schema, dict):
        return
    for name, field in (schema.get("properties") or {}).items():
        if name == "model" and field.get("type") == "string":
            field["enum"] = [sys.argv[1]]
        if name in SHORT | FEW and field.get("type") == "integer":
            field["maximum"] = max(field.get("minimum", 0), 8 if name in SHORT else 2)
            field["minimum"] = max(field.get("minimum", 0), 1)
    for part in schema.values():
        narrow(part)


description = json.load(sys.stdin)
bodies = set()


def request_schemas(part):
    """Names of all schemas that requests use."""
    if isinstance(part, list):
        for item in part:
            request_schemas(item)
    if isinstance(part, dict):
        name = str(part.get("$ref", "")).rpartition("/")[2]
        if name and name not in bodies:
            bodies.add(name)
            request_schemas(description["components"]["schemas"][name])
        for item in part.values():
            request_schemas(item)


for item in description["paths"].values():
    for operation in item.values():
        request_schemas(operation.get("requestBody"))
for name in bodies:
    narrow(description["components"]["schemas"][name])
json.dump(description, sys.stdout)

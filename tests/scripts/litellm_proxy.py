"""LiteLLM as a proxy in front of a running tinyloop, asked by the official openai client.

    litellm_proxy.py http://127.0.0.1:8080

Whole answers, streams, tools, forms, embeddings and errors must survive the way through it, and who leaves must
free the place.
"""

import json
import sys
import time
import urllib.request

import openai

from litellm_start import Proxy

base = sys.argv[1].rstrip("/")


def get(path):
    with urllib.request.urlopen(base + path, timeout=30) as answer:
        return json.load(answer)


model = get("/v1/models")["data"][0]["id"]
asked = {
    "model": "through-proxy",
    "messages": [{"role": "user", "content": "Tell me about a ship."}],
    "temperature": 0,
    "max_tokens": 16,
}
weather = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Vienna"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def whole_and_streamed(client):
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 16
    usage, pieces = None, []
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    for chunk in stream:
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(pieces) == whole.choices[0].message.content, (pieces, whole)
    assert len([piece for piece in pieces if piece]) > 2, "it comes piece by piece"
    assert usage.completion_tokens == 16, usage


def tools(client):
    arguments = asked | {"tools": [weather], "tool_choice": "required", "max_tokens": 100}
    whole = client.chat.completions.create(**arguments, parallel_tool_calls=False)
    [call] = whole.choices[0].message.tool_calls
    assert call.function.name == "get_weather" and whole.choices[0].finish_reason == "tool_calls", whole
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Vienna")
    pieces = []
    for chunk in client.chat.completions.create(**arguments, parallel_tool_calls=False, stream=True):
        pieces += [piece for choice in chunk.choices for piece in choice.delta.tool_calls or []]
    assert {piece.index for piece in pieces} == {0} and pieces[0].function.name == "get_weather"
    assert "".join(piece.function.arguments or "" for piece in pieces) == call.function.arguments
    history = asked["messages"] + [
        whole.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny."},
    ]
    assert client.chat.completions.create(**(asked | {"messages": history})).choices[0].message.content


def forms(client):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    answer = client.chat.completions.create(**(asked | {"response_format": form, "max_tokens": 40}))
    assert isinstance(json.loads(answer.choices[0].message.content)["ok"], bool), answer


def embeddings(client):
    made = client.embeddings.create(model="through-proxy", input=["a ship", "a boat"], encoding_format="float")
    with urllib.request.urlopen(
        urllib.request.Request(base + "/v1/embeddings", json.dumps({"model": model, "input": "a boat"}).encode())
    ) as answer:
        direct = json.load(answer)["data"][0]["embedding"]
    assert len(made.data) == 2 and made.usage.prompt_tokens > 0
    assert all(abs(a - b) < 1e-6 for a, b in zip(made.data[1].embedding, direct, strict=True))


def completions(client):
    answer = client.completions.create(model="through-proxy", prompt="The sea", max_tokens=4, temperature=0)
    assert answer.choices[0].text and answer.usage.completion_tokens == 4


def errors(client):
    try:
        client.chat.completions.create(**(asked | {"max_tokens": 10_000_000}))
    except openai.BadRequestError as error:
        assert "context" in str(error).lower(), error
    else:
        raise AssertionError("an impossible request was taken")


def wait_for_requests(number, what):
    deadline = time.monotonic() + 30
    while len(get("/v1/requests")["data"]) != number:
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def who_leaves_a_stream_frees_the_place(client):
    stream = client.chat.completions.create(
        **(asked | {"max_tokens": 8000}), stream=True, extra_body={"ignore_eos": True}
    )
    for _ in zip(range(3), stream):
        pass
    wait_for_requests(1, "the request is not seen")
    stream.close()
    wait_for_requests(0, "the abandoned stream still runs")


def a_request_behind_the_proxy_is_cancelled_by_its_id(client):
    """A proxy may hide who left: the id in the list ends it."""
    stream = client.chat.completions.create(
        **(asked | {"max_tokens": 8000}), stream=True, extra_body={"ignore_eos": True}
    )
    pieces = iter(stream)
    next(pieces)
    wait_for_requests(1, "the request is not seen")
    [live] = get("/v1/requests")["data"]
    cancel = urllib.request.Request(base + f"/v1/requests/{live['id']}/cancel", b"", method="POST")
    with urllib.request.urlopen(cancel, timeout=30) as answer:
        assert answer.status == 200
    for _ in pieces:
        pass
    wait_for_requests(0, "the cancelled stream still runs")


target = {"model": f"openai/{model}", "api_base": f"{base}/v1", "api_key": "unused", "max_retries": 0}
with Proxy([{"model_name": "through-proxy", "litellm_params": target}], {"num_retries": 0}) as client:
    for check in [
        whole_and_streamed,
        tools,
        forms,
        embeddings,
        completions,
        errors,
        who_leaves_a_stream_frees_the_place,
        a_request_behind_the_proxy_is_cancelled_by_its_id,
    ]:
        check(client)
        print("ok  ", check.__name__)

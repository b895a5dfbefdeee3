"""The official openai Python client against a running tinyloop: what users' programs do.

    openai_client.py http://127.0.0.1:8080

Exits 0 when every check holds; the first that does not is named.
"""

import concurrent.futures
import json
import math
import sys
import urllib.request

import openai
import pydantic
from openai import OpenAI

from checks import check, expect, run

base = sys.argv[1].rstrip("/")
client = OpenAI(base_url=base + "/v1", api_key="unused", max_retries=0, timeout=120)
model = client.models.list().data[0].id
question = [{"role": "user", "content": "Tell me a long story about a ship."}]


@check
def models():
    page = client.models.list()
    assert page.object == "list" and page.data[0].object == "model"
    one = client.models.retrieve(model)
    assert one.id == model and one.max_model_len > 0 and one.created > 0
    expect(openai.NotFoundError, "model_not_found", lambda: client.models.retrieve("no/such"))


@check
def chat():
    answer = client.chat.completions.create(
        model=model, messages=question, temperature=0, max_tokens=8, seed=1
    )
    choice = answer.choices[0]
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason == "length" and choice.message.tool_calls is None
    usage = answer.usage
    assert usage.completion_tokens == 8 and usage.prompt_tokens > 5, usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert answer._request_id


@check
def chat_stream_equals_whole():
    arguments = dict(model=model, messages=question, temperature=0, max_tokens=12)
    whole = client.chat.completions.create(**arguments)
    chunks = list(
        client.chat.completions.create(
            **arguments, stream=True, stream_options={"include_usage": True}
        )
    )
    assert len({(c.id, c.created, c.model) for c in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content, (text, whole.choices[0].message.content)
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    assert all(c.usage is None for c in chunks[:-1])
    plain = list(client.chat.completions.create(**arguments, stream=True))
    assert all(c.choices for c in plain), "a usage chunk that nobody asked for"


@check
def stop_and_choices():
    arguments = dict(model=model, messages=question, temperature=0, max_tokens=40)
    whole = client.chat.completions.create(**arguments).choices[0].message.content
    stop = whole[len(whole) // 2 :][:3]
    stopped = client.chat.completions.create(**arguments, stop=stop).choices[0]
    assert stopped.finish_reason == "stop" and stopped.message.content == whole[: whole.index(stop)]
    many = client.chat.completions.create(
        model=model, messages=question, n=3, seed=7, temperature=1.5, max_tokens=12
    )
    assert [c.index for c in many.choices] == [0, 1, 2]
    texts = [c.message.content for c in many.choices]
    assert len(set(texts)) > 1, "three samples at temperature 1.5 are the same"
    again = client.chat.completions.create(
        model=model, messages=question, n=3, seed=7, temperature=1.5, max_tokens=12
    )
    assert [c.message.content for c in again.choices] == texts, "a seed does not repeat"
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(
        model=model, messages=question, n=3, seed=7, temperature=1.5, max_tokens=12, stream=True
    ):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts, "stream and whole differ for n = 3"


@check
def chat_logprobs():
    arguments = dict(
        model=model, messages=question, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    content = client.chat.completions.create(**arguments).choices[0].logprobs.content
    assert len(content) == 6
    for entry in content:
        assert len(entry.top_logprobs) == 3 and entry.logprob <= 0
        assert entry.token == entry.top_logprobs[0].token, "greedy is not the likeliest"
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
    streamed = []
    for chunk in client.chat.completions.create(**arguments, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert [e.token for e in streamed] == [e.token for e in content]


@check
def completions():
    answer = client.completions.create(
        model=model, prompt=["The sky is", "Two plus two is"], max_tokens=5, n=2, temperature=0
    )
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert answer.object == "text_completion" and answer.usage.completion_tokens == 20
    assert answer.choices[0].text == answer.choices[1].text
    tokens = client.completions.create(model=model, prompt=[504, 1130], max_tokens=3)
    assert tokens.usage.prompt_tokens == 2 and tokens.usage.completion_tokens == 3
    text = "".join(
        c.choices[0].text
        for c in client.completions.create(
            model=model, prompt="The sky is", max_tokens=5, temperature=0, stream=True
        )
    )
    assert text == answer.choices[0].text
    best = client.completions.create(
        model=model, prompt="The sky is", max_tokens=4, n=1, best_of=3, seed=3
    )
    assert len(best.choices) == 1


@check
def scoring():
    answer = client.completions.create(
        model=model, prompt="The capital of France is Paris", max_tokens=0, echo=True, logprobs=2
    )
    choice = answer.choices[0]
    assert choice.text == "The capital of France is Paris"
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert all(math.isfinite(p) and p <= 0 for p in logprobs.token_logprobs[1:])
    assert logprobs.text_offset[0] == 0 and answer.usage.completion_tokens == 0
    for token, offset in zip(logprobs.tokens, logprobs.text_offset):
        assert choice.text[offset:].startswith(token)


@check
def errors():
    bad = openai.BadRequestError

    def ask(**more):
        return lambda: client.chat.completions.create(
            **{"model": model, "messages": question, "max_tokens": 2, **more}
        )

    expect(openai.NotFoundError, "model_not_found", ask(model="nope"), "model")
    expect(bad, "invalid_value", ask(temperature=3), "temperature")
    expect(bad, "invalid_value", ask(messages=[]), "messages")
    broken = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "thing"}}}
    expect(bad, "invalid_json_schema", ask(response_format=broken), "response_format.json_schema.schema")
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    expect(bad, "unsupported_parameter", ask(extra_body={"functions": [tool["function"]]}), "functions")
    expect(bad, "invalid_value", ask(tools=[tool], tool_choice={"type": "function", "function": {"name": "g"}}))
    odd = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "thing"}}}}}
    place = "tools[0].function.parameters"
    expect(bad, "invalid_json_schema", ask(tools=[odd], tool_choice="required"), place)
    error = expect(bad, "context_length_exceeded", ask(max_tokens=10**7))
    assert "maximum context length" in str(error)
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    expect(bad, "missing_capability", ask(messages=[{"role": "user", "content": image}]))
    expect(bad, "invalid_value", ask(stream=True, temperature=-1), "temperature")


@check
def structured_output():
    class Place(pydantic.BaseModel):
        city: str
        is_capital: bool

    answer = client.chat.completions.parse(
        model=model, messages=question, max_tokens=200, temperature=0, response_format=Place
    )
    place = answer.choices[0].message.parsed
    assert isinstance(place, Place) and isinstance(place.is_capital, bool), answer


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Vienna"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 5},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@check
def required_tools():
    ask = [{"role": "user", "content": "What will the weather be in Vienna?"}]
    arguments = dict(model=model, messages=ask, tools=[WEATHER], temperature=0, max_tokens=200)
    answer = client.chat.completions.create(**arguments, tool_choice="required", parallel_tool_calls=False)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None, choice
    [call] = choice.message.tool_calls
    assert call.type == "function" and call.id.startswith("call_"), call
    given = json.loads(call.function.arguments)
    assert given["city"] in ("Paris", "Vienna") and 1 <= given["days"] <= 5, given
    named = {"type": "function", "function": {"name": "get_weather"}}
    stream = client.chat.completions.create(**arguments, tool_choice=named, stream=True)
    pieces, finish = [], None
    for chunk in stream:
        finish = chunk.choices[0].finish_reason or finish
        pieces += chunk.choices[0].delta.tool_calls or []
    assert finish == "stop" and {piece.index for piece in pieces} == {0}, pieces
    assert pieces[0].id and pieces[0].function.name == "get_weather"
    assert all(piece.id is None for piece in pieces[1:])
    json.loads("".join(piece.function.arguments for piece in pieces))
    # The result goes back, and the model answers.
    history = ask + [
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 25 degrees."},
    ]
    last = client.chat.completions.create(**{**arguments, "messages": history, "max_tokens": 24}, tool_choice="none")
    assert last.choices[0].message.content and not last.choices[0].message.tool_calls


@check
def parsed_tools():
    class GetWeather(pydantic.BaseModel):
        """Tells the weather of a city."""

        city: str
        is_now: bool

    answer = client.chat.completions.parse(
        model=model, messages=question, tools=[openai.pydantic_function_tool(GetWeather)],
        tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=200,
    )
    [call] = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather), call


@check
def tools_that_the_model_may_call():
    # The helper that joins the deltas takes an answer that was cut for an error.
    try:
        with client.chat.completions.stream(
            model=model, messages=question, tools=[WEATHER], temperature=0, max_tokens=40
        ) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion().choices[0]
    except openai.LengthFinishReasonError as cut:
        final = cut.completion.choices[0]
    assert final.finish_reason in ("stop", "length", "tool_calls"), final


@check
def embeddings():
    # The client asks for base64 unless told otherwise, and decodes it by itself.
    default = client.embeddings.create(model=model, input="a ship at sea").data[0].embedding
    floats = client.embeddings.create(model=model, input="a ship at sea", encoding_format="float")
    assert len(default) == len(floats.data[0].embedding) > 16
    assert all(abs(a - b) < 1e-6 for a, b in zip(default, floats.data[0].embedding))
    assert abs(math.sqrt(sum(x * x for x in default)) - 1) < 1e-4
    many = client.embeddings.create(model=model, input=[f"text {i}" for i in range(100)] + ["a ship at sea"])
    assert [item.index for item in many.data] == list(range(101))
    assert list(many.data[100].embedding) == list(default)
    assert many.usage.total_tokens == many.usage.prompt_tokens > 200
    create = lambda **more: lambda: client.embeddings.create(model=model, **more)
    bad = openai.BadRequestError
    expect(bad, "invalid_value", create(input=["a", ""]), "input[1]")
    expect(bad, "context_length_exceeded", create(input="word " * 20000), "input")
    expect(bad, "invalid_value", create(input="a", dimensions=100000), "dimensions")


@check
def many_at_once():
    def ask(number):
        return client.completions.create(
            model=model, prompt=f"{number} is a number", max_tokens=6, temperature=0
        ).usage.completion_tokens

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == [6] * 16


@check
def leaving_a_stream_early():
    stream = client.chat.completions.create(
        model=model, messages=question, stream=True, extra_body={"ignore_eos": True}
    )
    for _ in zip(range(3), stream):
        pass
    stream.close()
    client.chat.completions.create(model=model, messages=question, max_tokens=1)


@check
def operations():
    for path in ["/health", "/ready", "/metrics"]:
        with urllib.request.urlopen(base + path, timeout=10) as answer:
            assert answer.status == 200 and answer.headers["x-request-id"]


run("openai client")

"""The official openai Python client on the Responses API of a running tinyloop.

    openai_responses.py http://127.0.0.1:8080

Exits 0 when every check holds; the first that does not is named.
"""

import json
import sys

import openai
import pydantic
from openai import OpenAI

from checks import check, expect, run

base = sys.argv[1].rstrip("/")
client = OpenAI(base_url=base + "/v1", api_key="unused", max_retries=0, timeout=120)
model = client.models.list().data[0].id
question = "Tell me a long story about a ship."
weather = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


@check
def create():
    response = client.responses.create(
        model=model, input=question, instructions="Be brief.", temperature=0, max_output_tokens=8
    )
    assert response.id.startswith("resp_") and response.object == "response"
    assert response.status == "incomplete" and response.output_text
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 8 and response.usage.input_tokens > 5
    assert response.usage.input_tokens_details.cache_write_tokens == 0
    assert response._request_id
    strict = openai.types.responses.Response.model_validate(response.to_dict())
    assert strict.output[0].content[0].type == "output_text"
    short = client.responses.create(model=model, input=question, max_output_tokens=64,
                                    temperature=0, extra_body={"stop": "."})
    assert short.status == "completed" and short.completed_at and not short.incomplete_details


@check
def stream_equals_whole():
    arguments = dict(model=model, input=question, temperature=0, max_output_tokens=12)
    whole = client.responses.create(**arguments)
    events = list(client.responses.create(**arguments, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    ends = {"response.completed", "response.incomplete", "response.failed"}
    assert [e.type for e in events if e.type in ends] == ["response.incomplete"]
    assert events[-1].type == "response.incomplete"
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text, (text, whole.output_text)
    for event in events:  # each is what the client's own type says it is
        type(event).model_validate(event.to_dict())


@check
def typed_stream():
    with client.responses.stream(
        model=model, input=question, temperature=0, max_output_tokens=64, extra_body={"stop": "."}
    ) as stream:
        snapshots = [e.snapshot for e in stream if e.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.status == "completed" and snapshots[-1] == final.output_text


@check
def structured_parse():
    class Place(pydantic.BaseModel):
        city: str
        is_capital: bool

    response = client.responses.parse(
        model=model, input=question, max_output_tokens=300, temperature=0, text_format=Place
    )
    assert isinstance(response.output_parsed, Place), response.output_text
    with client.responses.stream(
        model=model, input=question, max_output_tokens=300, temperature=0, text_format=Place
    ) as stream:
        done = [e.parsed for e in stream if e.type == "response.output_text.done"]
        assert stream.get_final_response().output_parsed == done[0] == response.output_parsed


@check
def tools():
    arguments = dict(
        model=model, input="What is the weather in Paris?", tools=[weather], temperature=0,
        tool_choice="required", max_output_tokens=200,
    )
    response = client.responses.create(**arguments)
    calls = [item for item in response.output if item.type == "function_call"]
    assert calls and calls[0].name == "get_weather", response.output
    assert isinstance(json.loads(calls[0].arguments)["city"], str)
    assert response.tools[0].name == "get_weather" and response.tool_choice == "required"
    events = list(client.responses.create(**arguments, stream=True))
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    text = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta"
                   and e.item_id == done[0].item_id)
    assert done[0].arguments == text == calls[0].arguments, (text, calls[0].arguments)
    result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "sunny"}
    answer = client.responses.create(
        model=model, previous_response_id=response.id, input=[result], tools=[weather],
        tool_choice="none", max_output_tokens=8,
    )
    assert answer.output_text and not [i for i in answer.output if i.type == "function_call"]


@check
def kept_responses():
    first = client.responses.create(model=model, input="My name is Ada.", max_output_tokens=4)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(
        model=model, input="What is it?", previous_response_id=first.id, max_output_tokens=4
    )
    assert second.usage.input_tokens > first.usage.total_tokens
    items = client.responses.input_items.list(second.id, order="asc")
    texts = [item.content[0].text for item in items]
    assert texts == ["My name is Ada.", first.output_text, "What is it?"], texts
    pages = list(client.responses.input_items.list(second.id, order="asc", limit=1))
    assert [item.id for item in pages] == [item.id for item in items.data], "pages lose items"
    client.responses.delete(first.id)
    expect(openai.NotFoundError, "response_not_found", lambda: client.responses.retrieve(first.id))
    unkept = client.responses.create(model=model, input="x", max_output_tokens=1, store=False)
    expect(openai.NotFoundError, "response_not_found", lambda: client.responses.retrieve(unkept.id))
    expect(
        openai.BadRequestError, "previous_response_not_found",
        lambda: client.responses.create(model=model, input="x", previous_response_id=unkept.id),
        "previous_response_id",
    )


@check
def stateless_conversation():
    items = [{"role": "user", "content": "My name is Ada."}]
    first = client.responses.create(model=model, input=items, max_output_tokens=4, store=False)
    items += [item.to_dict() for item in first.output]
    items.append({"role": "user", "content": "What is it?"})
    client.responses.create(model=model, input=items, max_output_tokens=4, store=False)


@check
def logprobs():
    arguments = dict(model=model, input=question, temperature=0, max_output_tokens=5,
                     include=["message.output_text.logprobs"], top_logprobs=2)
    entries = client.responses.create(**arguments).output[0].content[0].logprobs
    assert len(entries) == 5 and all(len(e.top_logprobs) == 2 for e in entries)
    streamed = []
    for event in client.responses.create(**arguments, stream=True):
        if event.type == "response.output_text.delta":
            streamed += event.logprobs
    assert [e.token for e in streamed] == [e.token for e in entries]


@check
def input_tokens():
    counted = client.responses.input_tokens.count(model=model, input=question)
    response = client.responses.create(model=model, input=question, max_output_tokens=1)
    assert counted.input_tokens == response.usage.input_tokens


@check
def errors():
    bad = openai.BadRequestError

    def ask(**more):
        return lambda: client.responses.create(**{"model": model, "input": "x", **more})

    expect(openai.NotFoundError, "model_not_found", ask(model="nope"), "model")
    expect(bad, "invalid_value", ask(temperature=3), "temperature")
    expect(bad, "unsupported_parameter", ask(background=True), "background")
    expect(bad, "unsupported_parameter", ask(tools=[{"type": "web_search"}]), "tools[0].type")
    expect(bad, "context_length_exceeded", ask(max_output_tokens=10**7), "input")
    broken = {"type": "json_schema", "name": "s", "schema": {"type": "thing"}}
    expect(bad, "invalid_json_schema", ask(text={"format": broken}), "text.format.schema")
    expect(bad, "invalid_value", ask(input=[{"role": "user", "content": [{"type": "x"}]}]),
           "input[0].content[0].type")


run("openai responses")

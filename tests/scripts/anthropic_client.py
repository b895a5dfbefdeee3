"""The official anthropic Python client against a running tinyloop.

    anthropic_client.py http://127.0.0.1:8080 [http://127.0.0.1:8081 ..]

The further servers have one place and a queue of one: how the client meets overload is tried there.
Exits 0 when every check holds; the first that does not is named.
"""

import json
import socket
import sys
import threading

import anthropic
import httpx2 as httpx
from anthropic import Anthropic

from checks import check, run

base, *small_servers = [url.rstrip("/") for url in sys.argv[1:]]


def connect(url, **more):
    return Anthropic(**{"base_url": url, "api_key": "unused", "max_retries": 0, "timeout": 120, **more})


client = connect(base)
with anthropic.DefaultHttpxClient() as http:
    model = http.get(base + "/v1/models").json()["data"][0]["id"]
question = [{"role": "user", "content": "Tell me a long story about a ship."}]
weather = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
greedy = {"temperature": 0}  # this version of the client has no argument for it


def expect(error_type, kind, call):
    try:
        call()
    except error_type as error:
        assert error.body["type"] == "error" and error.body["error"]["type"] == kind, error.body
        assert error.request_id and error.body["request_id"] == error.request_id
        return error
    raise AssertionError(f"no {error_type.__name__}")


@check
def messages():
    message = client.messages.create(
        model=model, max_tokens=8, messages=question, system="Be brief.", extra_body=greedy
    )
    assert message.id.startswith("msg_") and message.role == "assistant" and message._request_id
    assert message.content[0].type == "text" and message.content[0].text
    assert message.stop_reason == "max_tokens" and message.stop_sequence is None
    assert message.usage.output_tokens == 8 and message.usage.input_tokens >= 0
    anthropic.types.Message.model_validate(message.to_dict())
    whole = client.messages.create(model=model, max_tokens=40, messages=question, extra_body=greedy)
    stop = whole.content[0].text[20:23]
    stopped = client.messages.create(
        model=model, max_tokens=40, messages=question, extra_body=greedy, stop_sequences=["\x00", stop]
    )
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == stop
    assert stopped.content[0].text == whole.content[0].text.split(stop)[0]


@check
def stream_equals_whole():
    arguments = dict(model=model, max_tokens=12, messages=question, extra_body=greedy)
    whole = client.messages.create(**arguments)
    with client.messages.stream(**arguments) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text, (text, whole.content[0].text)
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 12
    events = list(client.messages.create(**arguments, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    for event in events:
        type(event).model_validate(event.to_dict())


@check
def tools():
    arguments = dict(
        model=model, max_tokens=200, tools=[weather], tool_choice={"type": "any", "disable_parallel_tool_use": True},
        extra_body=greedy,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
    )
    message = client.messages.create(**arguments)
    call = next(block for block in message.content if block.type == "tool_use")
    assert message.stop_reason == "tool_use", message
    assert call.name == "get_weather" and isinstance(call.input["city"], str)
    with client.messages.stream(**arguments) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert json.loads("".join(pieces)) == call.input
    assert [block.type for block in final.content] == [block.type for block in message.content]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    answer = client.messages.create(
        model=model, max_tokens=8, tools=[weather], tool_choice={"type": "none"},
        messages=[*arguments["messages"], {"role": "assistant", "content": message.content},
                  {"role": "user", "content": [result]}],
    )
    assert answer.content[0].type == "text"


@check
def begun_answer():
    messages = [*question, {"role": "assistant", "content": "Once upon a"}]
    whole = client.messages.create(model=model, max_tokens=4, messages=messages, extra_body=greedy)
    assert whole.content[0].text


@check
def structured_output():
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}
    message = client.messages.create(
        model=model, max_tokens=60, messages=question, extra_body=greedy,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert isinstance(json.loads(message.content[0].text)["ok"], bool), message


@check
def count_tokens():
    counted = client.messages.count_tokens(model=model, messages=question, system="Be brief.")
    message = client.messages.create(
        model=model, max_tokens=1, messages=question, system="Be brief."
    )
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@check
def errors():
    def ask(**more):
        return lambda: client.messages.create(
            **{"model": model, "max_tokens": 2, "messages": question, **more}
        )

    bad = anthropic.BadRequestError
    expect(anthropic.NotFoundError, "not_found_error", ask(model="nope"))
    expect(bad, "invalid_request_error", ask(extra_body={"temperature": 3}))
    expect(bad, "invalid_request_error", ask(max_tokens=10**7))
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    error = expect(bad, "invalid_request_error", ask(messages=[{"role": "user", "content": [image]}]))
    assert "vision" in str(error), error
    expect(bad, "invalid_request_error", ask(tools=[{"type": "bash_20250124", "name": "bash"}]))
    expect(bad, "invalid_request_error", ask(stream=True, messages=[]))


def overloaded(url, error_type, kind):
    """Refusals are tried again, twice by default, and a place that becomes free is found."""
    count = []
    tried = connect(url, max_retries=1)
    tried._client.event_hooks = {"response": [lambda response: count.append(response.status_code)]}
    model = tried._client.get(url + "/v1/models").json()["data"][0]["id"]
    count.clear()
    long = dict(model=model, max_tokens=1500, messages=question, stream=True,
                extra_body={"ignore_eos": True})
    running = connect(url).messages.create(**long)
    next(iter(running))
    waiter = connect(url, max_retries=20)
    waiting = threading.Thread(
        target=lambda: waiter.messages.create(model=model, max_tokens=1, messages=question)
    )
    waiting.start()
    small = dict(model=model, max_tokens=1, messages=question)
    while True:  # until the queue is full
        try:
            connect(url).messages.create(**small, extra_body={"queue_timeout_ms": 200})
        except error_type as error:
            if "queue_full" in str(error.body):
                break
    expect(error_type, kind, lambda: tried.messages.create(**small))
    assert len(count) == 2 and len(set(count)) == 1, count
    running.close()  # hangs up, so that the place is free
    waiting.join()
    assert connect(url, max_retries=3).messages.create(**small).content


@check
def overload():
    kinds = [(anthropic.OverloadedError, "overloaded_error"),
             (anthropic.RateLimitError, "rate_limit_error")]
    for url, (error_type, kind) in zip(small_servers, kinds):
        overloaded(url, error_type, kind)


def stalled():
    """All that the server says to a request that does not arrive in time."""
    host, port = base.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/messages HTTP/1.1\r\nhost: x\r\n")
        connection.settimeout(60)
        raw = b""
        while chunk := connection.recv(65536):
            raw += chunk
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), [tuple(line.split(": ", 1)) for line in lines], body


@check
def faults_are_sent_once_and_a_timeout_again():
    attempts = []

    def tried(expected, n_attempts, transport=None, **more):
        attempts.clear()
        hooks = {"request": [lambda request: attempts.append(request)]}
        http = anthropic.DefaultHttpxClient(transport=transport, event_hooks=hooks)
        asked = {"model": model, "max_tokens": 2, "messages": question, **more}
        try:
            connect(base, max_retries=2, http_client=http).messages.create(**asked)
        except anthropic.APIStatusError as error:
            assert (error.status_code, len(attempts)) == (expected, n_attempts), (error, len(attempts))
        else:
            raise AssertionError(f"no {expected}")

    tried(400, 1, extra_body={"temperature": 3})
    tried(400, 1, max_tokens=10**7)
    tried(404, 1, model="none")
    # The client itself never stalls, so it is handed what the server said.
    status, headers, body = stalled()
    assert status == 408, status
    tried(408, 3, transport=httpx.MockTransport(lambda request: httpx.Response(status, headers=headers, content=body)))


run("anthropic client")

"""LangChain's OpenAI classes against a running tinyloop.

    langchain_client.py http://127.0.0.1:8080

Exits 0 when every check holds; the first that does not is named.
"""

import math
import sys
import urllib.request
import json

import pydantic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

base = sys.argv[1].rstrip("/") + "/v1"
with urllib.request.urlopen(base + "/models") as listed:
    model = json.load(listed)["data"][0]["id"]


def chat_model(**extra):
    settings = {"temperature": 0, "max_tokens": 24, "max_retries": 0, "timeout": 120}
    return ChatOpenAI(base_url=base, api_key="unused", model=model, **(settings | extra))


question = [SystemMessage("You tell stories."), HumanMessage("Tell me about a ship.")]


class Town(pydantic.BaseModel):
    """A town."""

    name: str = pydantic.Field(max_length=20)
    people: int = pydantic.Field(ge=0, le=99)


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


def invoke():
    answer = chat_model().invoke(question)
    assert answer.content and answer.usage_metadata["output_tokens"] == 24, answer
    assert answer.response_metadata["finish_reason"] == "length"


def stream_says_the_same():
    whole = chat_model().invoke(question).content
    pieces = [chunk.content for chunk in chat_model().stream(question)]
    assert "".join(pieces) == whole and len(pieces) > 2, pieces


def stream_usage():
    chunks = list(chat_model(stream_usage=True).stream(question))
    usage = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert len(usage) == 1 and usage[0]["output_tokens"] == 24, usage


def batch():
    answers = chat_model().batch([question] * 3)
    assert len({answer.content for answer in answers}) == 1


def structured_output():
    town = chat_model(max_tokens=80).with_structured_output(Town).invoke(question)
    assert isinstance(town, Town), town


def tools_are_called_and_their_results_taken():
    asker = chat_model(max_tokens=100).bind_tools([weather], tool_choice="weather")
    answer = asker.invoke(question)
    (call,) = answer.tool_calls
    assert call["name"] == "weather" and isinstance(call["args"]["city"], str), call
    whole = None
    for chunk in asker.stream(question):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["args"] == call["args"], whole.tool_calls
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    final = chat_model().bind_tools([weather]).invoke([*question, answer, result])
    assert isinstance(final, AIMessage)


def completions():
    text = OpenAI(base_url=base, api_key="unused", model=model, max_tokens=8, temperature=0)
    assert text.invoke("The sea is")


def embeddings():
    maker = OpenAIEmbeddings(
        base_url=base, api_key="unused", model=model, check_embedding_ctx_length=False
    )
    ship, boat = maker.embed_documents(["a ship", "a boat"])
    assert len(ship) == len(boat) and abs(math.hypot(*ship) - 1) < 1e-3


for check in [
    invoke,
    stream_says_the_same,
    stream_usage,
    batch,
    structured_output,
    tools_are_called_and_their_results_taken,
    completions,
    embeddings,
]:
    check()
    print("ok  ", check.__name__)

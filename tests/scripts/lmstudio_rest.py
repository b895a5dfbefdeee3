"""LM Studio's REST routes of a running tinyloop, asked with the requests that its documentation shows.

    lmstudio_rest.py http://127.0.0.1:8080 MANAGEMENT_KEY

LM Studio's own SDKs speak websockets, so that plain requests stand for its REST clients. Only the standard library
is needed. Exits 0 when every check holds.
"""

import json
import sys
import urllib.error
import urllib.request

base, admin_key = sys.argv[1].rstrip("/"), sys.argv[2]


def ask(path, body=None, key=None):
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(base + path, data, headers), timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def good(path, body=None, key=None):
    status, text = ask(path, body, key)
    assert status == 200, f"{path}: {status} {text}"
    return json.loads(text)


model = good("/api/v0/models")["data"][0]["id"]
chat = {
    "model": model,
    "messages": [
        {"role": "system", "content": "Always answer in rhymes."},
        {"role": "user", "content": "Introduce yourself."},
    ],
    "temperature": 0.7,
    "max_tokens": 12,
    "stream": False,
}


def check_stats(answer):
    stats = answer["stats"]
    assert stats["stop_reason"] in ("eosFound", "maxPredictedTokensReached", "stopStringFound"), stats
    assert stats["tokens_per_second"] > 0 and stats["time_to_first_token"] > 0 and stats["generation_time"] > 0
    assert answer["model_info"]["arch"] == "llama" and answer["model_info"]["context_length"] > 0
    assert answer["runtime"]["supported_formats"] == ["gguf"] or "gguf" in answer["runtime"]["supported_formats"]


def v0_models():
    entry = good("/api/v0/models")["data"][0]
    assert entry["type"] == "llm" and entry["state"] == "loaded" and entry["compatibility_type"] == "gguf", entry
    assert entry["max_context_length"] >= entry["loaded_context_length"] > 0
    assert good(f"/api/v0/models/{model}")["id"] == model


def v0_chat_and_completions():
    answer = good("/api/v0/chat/completions", chat)
    assert answer["choices"][0]["message"]["content"] and answer["usage"]["completion_tokens"] <= 12
    check_stats(answer)
    prompt = {"model": model, "prompt": "the meaning of life is", "temperature": 0.7, "max_tokens": 10, "stop": "\n"}
    answer = good("/api/v0/completions", prompt)
    assert isinstance(answer["choices"][0]["text"], str)
    check_stats(answer)


def v0_chat_streamed():
    status, text = ask("/api/v0/chat/completions", chat | {"stream": True})
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert status == 200 and events[-1] == "[DONE]"
    check_stats(json.loads(events[-2]))


def v0_embeddings():
    answer = good("/api/v0/embeddings", {"model": model, "input": "Some text to embed"})
    assert len(answer["data"][0]["embedding"]) > 16 and answer["usage"]["prompt_tokens"] > 0


def v1_models():
    entry = good("/api/v1/models")["models"][0]
    assert entry["key"] == model and entry["type"] == "llm" and entry["format"] == "gguf"
    assert entry["size_bytes"] > 0 and entry["quantization"]["name"] == "Q4_1"
    assert entry["loaded_instances"][0]["config"]["context_length"] > 0


def v1_chats_go_on():
    body = {"model": model, "input": "My favorite color is blue.", "temperature": 0, "max_output_tokens": 8}
    first = good("/api/v1/chat", body)
    assert first["output"][0]["type"] == "message" and first["stats"]["total_output_tokens"] == 8, first
    more = {"model": model, "input": "What color did I just mention?", "max_output_tokens": 4}
    second = good("/api/v1/chat", more | {"previous_response_id": first["response_id"]})
    assert second["stats"]["input_tokens"] > first["stats"]["input_tokens"]


def v1_chat_streamed():
    body = {"model": model, "input": "Hello", "stream": True, "temperature": 0, "max_output_tokens": 8}
    status, text = ask("/api/v1/chat", body)
    assert status == 200
    events = [block.split("\n", 1) for block in text.split("\n\n") if block]
    events = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in events]
    names = [name for name, _ in events]
    assert names[0] == "chat.start" and names[-1] == "chat.end", names
    joined = "".join(data["content"] for name, data in events if name == "message.delta")
    assert joined == events[-1][1]["result"]["output"][0]["content"], joined


def v1_loads_are_for_operators():
    for key in (None, "somebody"):
        status, text = ask("/api/v1/models/load", {"model": model}, key)
        assert status == 403, f"{status} {text}"
    loaded = good("/api/v1/models/load", {"model": model}, admin_key)
    assert loaded["status"] == "loaded" and loaded["type"] == "llm", loaded
    gone = good("/api/v1/models/unload", {"instance_id": loaded["instance_id"]}, admin_key)
    assert gone == {"instance_id": loaded["instance_id"]}, gone
    assert good("/api/v0/models")["data"][0]["state"] == "not-loaded"
    good("/api/v1/models/load", {"model": model, "echo_load_config": True}, admin_key)
    assert good("/api/v1/chat", {"model": model, "input": "Hello", "max_output_tokens": 2})["output"]


for check in [
    v0_models,
    v0_chat_and_completions,
    v0_chat_streamed,
    v0_embeddings,
    v1_models,
    v1_chats_go_on,
    v1_chat_streamed,
    v1_loads_are_for_operators,
]:
    check()
    print("ok  ", check.__name__)

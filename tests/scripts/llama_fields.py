"""Asks a llama-server and a tinyloop the same things and compares their answers field by field.

    llama_fields.py http://127.0.0.1:8081 http://127.0.0.1:8080    (theirs, ours; the same model file)

Every field that theirs has must be in ours with a value of the same kind, except what is listed here as
a deliberate difference; texts, tokens and stop reasons of greedy answers must be equal. Only the standard
library is needed.
"""

import json
import sys
import urllib.error
import urllib.request

# Paths that differ on purpose.
WITHOUT = {
    "props.media_marker": "there are no media",
    "models.models": "Ollama's list inside OpenAI's",
    "models.data[].tags": "models have no tags",
    "chat stream[].choices[].delta.content": "the first chunk has an empty text, as OpenAI's has",
}


def ask(base, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(base + path, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            text, status = answer.read().decode(), answer.status
    except urllib.error.HTTPError as error:
        text, status = error.read().decode(), error.code
    if text.startswith("data: "):
        events = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
        return status, [json.loads(event) for event in events if event != "[DONE]"]
    return status, json.loads(text)


def kind(value):
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    return type(value).__name__


def compare(path, theirs, ours, faults):
    if path in WITHOUT:
        return
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key, value in theirs.items():
            at = f"{path}.{key}"
            if key not in ours:
                if at not in WITHOUT:
                    faults.append(f"{at}: missing")
            else:
                compare(at, value, ours[key], faults)
    elif isinstance(theirs, list) and isinstance(ours, list):
        if theirs and ours:
            compare(path + "[]", theirs[0], ours[0], faults)
    elif kind(theirs) != kind(ours):
        faults.append(f"{path}: {kind(theirs)} there, {kind(ours)} here")


PROMPT = "The capital of France is"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0, "timings_per_token": True}
CASES = [
    ("props", "/props", None, ()),
    ("slots", "/slots", None, ()),
    ("models", "/v1/models", None, ()),
    ("tokenize", "/tokenize", {"content": "Hello wörld <|im_end|>", "with_pieces": True}, ("tokens",)),
    ("tokenize mixed", "/tokenize", {"content": [1, "Hello", 2]}, ("tokens",)),
    ("tokenize nothing", "/tokenize", {}, ("tokens",)),
    ("detokenize", "/detokenize", {"tokens": [1, 2, 3, 500]}, ("content",)),
    ("template", "/apply-template", {"messages": [{"role": "user", "content": "hi"}]}, ("prompt",)),
    (
        "completion",
        "/completion",
        {"prompt": PROMPT, "n_predict": 4, "temperature": 0, "n_probs": 2, "return_tokens": True, "seed": 1},
        ("content", "tokens", "stop", "stop_type", "tokens_predicted", "tokens_evaluated", "prompt", "truncated",
         "tokens_cached", "has_new_line", "index", "stopping_word"),
    ),
    (
        "stop word",
        "/completion",
        {"prompt": "1 2 3", "n_predict": 20, "temperature": 0, "stop": [" 5"]},
        ("content", "stop_type", "stopping_word", "tokens_predicted"),
    ),
    ("chosen", "/completion", {"prompt": "a", "n_predict": 1, "response_fields": ["stop_type", "generation_settings/n_predict"]}, ("generation_settings/n_predict",)),
    ("stream", "/completion", {"prompt": PROMPT, "n_predict": 3, "temperature": 0, "stream": True, "n_probs": 1}, ()),
    ("mixed prompt", "/completion", {"prompt": [19556, " the"], "n_predict": 2, "temperature": 0}, ("content", "tokens_evaluated", "prompt")),
    ("chat", "/v1/chat/completions", CHAT, ("object",)),
    ("chat stream", "/v1/chat/completions", {**CHAT, "stream": True}, ()),
    ("no prompt", "/completion", {"n_predict": 1}, ()),
    ("bad prompt", "/completion", {"prompt": 5}, ()),
    ("infill", "/infill", {"input_prefix": "x"}, ()),
    ("adapters", "/lora-adapters", None, ()),
    ("slot file", "/slots/0?action=save", {"filename": "x"}, ()),
]


def main():
    theirs, ours = sys.argv[1:3]
    n_faults = 0
    for name, path, body, equal in CASES:
        (status, there), (own_status, here) = ask(theirs, path, body), ask(ours, path, body)
        faults = []
        if status != own_status:
            faults.append(f"status {status} there, {own_status} here")
        compare(name.split()[0] if body is None else name, there, here, faults)
        for field in equal:
            if there.get(field) != here.get(field):
                faults.append(f"{field}: {there.get(field)!r} there, {here.get(field)!r} here")
        if name == "stream":
            text = ["".join(event["content"] for event in events) for events in (there, here)]
            if text[0] != text[1]:
                faults.append(f"texts differ: {text}")
            compare("stream end", there[-1], here[-1], faults)
        for fault in faults:
            print(f"{name}: {fault}")
        n_faults += len(faults)
    print(f"{len(CASES)} cases, {n_faults} differences")
    sys.exit(n_faults > 0)


if __name__ == "__main__":
    main()

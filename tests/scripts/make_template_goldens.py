"""Writes tests/data/chat_templates.json: what Jinja2 makes of the templates in tests/data/chat_templates.

The templates are written by us after the documented forms of known models. Jinja2 is set up the way
`transformers` does it. `make test-templates` renders them anew, which shows that what is committed is what Jinja2
says, and not what we say. After a template or a case changed:

    tests/scripts/template_goldens.sh           compares (--check)
    tests/scripts/template_goldens.sh --write   writes
"""

import json
import pathlib
import sys

import jinja2

from jinja_environment import rendered

DATA = pathlib.Path(__file__).resolve().parent.parent / "data"


def say(role, content, **more):
    return {"role": role, "content": content, **more}


def call(id, name, arguments):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather: °C & <wind>, it's \"now\"",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Graz", "São Paulo", "東京"]},
                "days": {"type": "integer", "minimum": 1, "default": 1},
                "exact": {"type": ["number", "null"], "default": 0.5},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "description": "", "parameters": {"type": "object", "properties": {}}},
}

ODD = "  <b>\"quoted\" & 'single'</b> \\ {{ not }} {% code %} # ünïcödé 東京 🙂👩‍👩‍👧\ttab\r\nend  \n"
PLAIN = [say("user", "Hi there!")]
TURNS = [
    say("system", " Be brief: say 'ok' & <done>.\n"),
    say("user", ODD),
    say("assistant", "\n Ok, \"done\". \n"),
    say("user", "Größe?\n\n"),
]
THOUGHTS = [
    say("user", "1+1?"),
    say("assistant", "<think>\nsmall numbers\n</think>\n\n2"),
    say("user", "And 2+2?"),
    say("assistant", "4", reasoning_content="\ndoubled\n"),
]
ARGUMENTS = {"city": "São Paulo", "days": 2, "exact": None, "more": [1.5, True, {"é<&>": "\"\n"}]}


def used(arguments, content):
    return [
        say("system", "Use tools."),
        say("user", "Weather?"),
        say("assistant", content, tool_calls=[call("abcdefghi", "get_weather", arguments)]),
        say("tool", "{\"sky\": \"blue & <clear>\"}", tool_call_id="abcdefghi", name="get_weather"),
    ]


def two_calls(first, second, content):
    return [
        say("user", "Weather and time?"),
        say("assistant", content, tool_calls=[call("abcdefghi", "get_weather", first), call("jklmnopqr", "clock", second)]),
        say("tool", "blue", tool_call_id="abcdefghi", name="get_weather"),
        say("tool", "12:00", tool_call_id="jklmnopqr", name="clock"),
        say("assistant", "Blue at noon."),
        say("user", "Thanks"),
    ]


CASES = {
    "plain": dict(messages=PLAIN, add_generation_prompt=True),
    "turns": dict(messages=TURNS),
    "turns, then an answer": dict(messages=TURNS, add_generation_prompt=True),
    "thoughts": dict(messages=THOUGHTS),
    "no thoughts": dict(messages=PLAIN, add_generation_prompt=True, extra={"enable_thinking": False}),
    "two users": dict(messages=PLAIN + PLAIN),
    "tools offered": dict(messages=TURNS, tools=[WEATHER, CLOCK], add_generation_prompt=True),
    "tools used": dict(messages=used(ARGUMENTS, ""), tools=[WEATHER], add_generation_prompt=True),
    "two calls": dict(messages=two_calls(ARGUMENTS, {}, ""), tools=[WEATHER, CLOCK], add_generation_prompt=True),
    "arguments as text": dict(
        messages=used(json.dumps(ARGUMENTS), None), tools=[WEATHER], add_generation_prompt=True
    ),
    "two calls as text": dict(messages=two_calls("{\"city\": \"Graz\"}", "{}", None)),
    "date": dict(messages=PLAIN, add_generation_prompt=True, extra={"date_string": "01 Jan 2031"}),
    "tools in the system text": dict(
        messages=TURNS, tools=[WEATHER], extra={"tools_in_user_message": False}
    ),
}


def check_in_styles():
    """The templates in the styles of known families that make_tokenizer_fixture.py wrote, which has further needs."""
    cases = json.loads((DATA / "tokenizer_templates.json").read_text())
    for case in cases:
        made = rendered(case["source"], case, lambda form: "26 Jul 2024")
        committed = {key: case[key] for key in ("text", "refused") if key in case}
        if made != committed:
            sys.exit(f"tokenizer_templates.json, {case['name']}:\n  jinja2    {made}\n  committed {committed}")
    print("tokenizer_templates.json", len(cases), "cases")


def main():
    goldens = []
    for path in sorted((DATA / "chat_templates").glob("*.jinja")):
        source = path.read_text()
        for name, case in CASES.items():
            given = {"messages": [], "tools": [], "add_generation_prompt": False, "extra": {}, **case}
            made = rendered(source, given, lambda form: form.replace("%%", "%"))
            goldens.append({"template": path.name, "case": name} | made)
    cases = {
        name: {"messages": [], "tools": [], "add_generation_prompt": False, "extra": {}, **case}
        for name, case in CASES.items()
    }
    path = DATA / "chat_templates.json"
    made = json.dumps({"cases": cases, "goldens": goldens}, ensure_ascii=True, indent=1) + "\n"
    kinds = [next(key for key in ("text", "refused", "fails") if key in golden) for golden in goldens]
    if "--write" in sys.argv:
        path.write_text(made)
    elif made != path.read_text():
        committed = json.loads(path.read_text())["goldens"]
        for golden, old in zip(goldens, committed):
            if golden != old:
                print(f"{golden['template']}, {golden['case']}:\n  jinja2    {golden}\n  committed {old}")
        sys.exit(f"{path} is not what jinja2 {jinja2.__version__} makes of the templates")
    print(path.name, "jinja2", jinja2.__version__, {kind: kinds.count(kind) for kind in sorted(set(kinds))})
    check_in_styles()


if __name__ == "__main__":
    main()

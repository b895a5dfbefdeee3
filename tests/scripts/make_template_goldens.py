"""Writes tests/data/chat_templates.json: what Jinja2 makes of the templates in tests/data/chat_templates.

The templates are written by us after the documented forms of known models. Jinja2 is set up the way
`transformers` does it. Run once, by hand, after a template or a case changed:

    python3 -m venv target/venv && target/venv/bin/pip install jinja2
    target/venv/bin/python tests/scripts/make_template_goldens.py
"""

import json
import pathlib

import jinja2
import jinja2.ext
import jinja2.sandbox

DATA = pathlib.Path(__file__).resolve().parent.parent / "data"


class GenerationMarks(jinja2.ext.Extension):
    """`{% generation %}`, which marks the assistant's part for training and prints its body."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("body"), [], [], body).set_lineno(line)

    def body(self, caller):
        return caller()


class Refused(Exception):
    pass


def environment():
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationMarks, "jinja2.ext.loopcontrols"]
    )

    def refuse(message):
        raise Refused(message)

    def to_json(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    env.filters["tojson"] = to_json
    env.globals["raise_exception"] = refuse
    env.globals["strftime_now"] = lambda form: form.replace("%%", "%")
    return env


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


def main():
    goldens = []
    for path in sorted((DATA / "chat_templates").glob("*.jinja")):
        source = path.read_text()
        for name, case in CASES.items():
            given = {"messages": [], "tools": [], "add_generation_prompt": False, "extra": {}, **case}
            variables = {**given, **given["extra"], "tools": given["tools"] or None, "documents": None}
            golden = {"template": path.name, "case": name}
            try:
                golden["text"] = environment().from_string(source).render(
                    bos_token="<s>", eos_token="</s>", **variables
                )
            except Refused as refused:
                golden["refused"] = str(refused)
            except (TypeError, jinja2.UndefinedError):
                # Python cannot do it either, in words of its own.
                golden["fails"] = True
            goldens.append(golden)
    cases = {
        name: {"messages": [], "tools": [], "add_generation_prompt": False, "extra": {}, **case}
        for name, case in CASES.items()
    }
    path = DATA / "chat_templates.json"
    path.write_text(json.dumps({"cases": cases, "goldens": goldens}, ensure_ascii=True, indent=1) + "\n")
    kinds = [next(key for key in ("text", "refused", "fails") if key in golden) for golden in goldens]
    print(path.name, path.stat().st_size, "bytes;", {kind: kinds.count(kind) for kind in set(kinds)})
    for golden, kind in zip(goldens, kinds):
        if kind == "fails":
            print("  fails:", golden["template"], golden["case"])


if __name__ == "__main__":
    main()

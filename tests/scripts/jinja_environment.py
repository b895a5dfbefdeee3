"""Jinja2 as `transformers` sets it up for chat templates. Imported by the scripts beside it."""

import json

import jinja2
import jinja2.ext
import jinja2.sandbox


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


def environment(strftime_now):
    """`strftime_now` is what the clock says to a form."""
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
    env.globals["strftime_now"] = strftime_now
    return env


def rendered(source, given, strftime_now):
    """What comes of a template: its `text`, or why it was `refused`, or that Python `fails` in words of its own."""
    variables = {**given, **given["extra"], "tools": given["tools"] or None, "documents": None}
    try:
        template = environment(strftime_now).from_string(source)
        return {"text": template.render(bos_token="<s>", eos_token="</s>", **variables)}
    except Refused as refused:
        return {"refused": str(refused)}
    except (TypeError, jinja2.UndefinedError):
        return {"fails": True}

"""Writes tests/data/tokenizer_spm.json, tokenizer_words.json and tokenizer_templates.json.

The expectations come from the public tools: a small SentencePiece BPE vocabulary is trained on the
perplexity text and encoded by `sentencepiece` itself, words are cut by Hugging Face `tokenizers`,
templates are rendered by Python's Jinja2 the way `transformers` sets it up. Run once, by hand:

    python3 -m venv target/venv && target/venv/bin/pip install sentencepiece protobuf tokenizers jinja2
    target/venv/bin/python tests/scripts/make_tokenizer_fixture.py
"""

import io
import json
import pathlib

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Regex, pre_tokenizers

from jinja_environment import rendered

DATA = pathlib.Path(__file__).resolve().parent.parent / "data"

TEXTS = [
    "",
    " ",
    "  ",
    "   \t ",
    "\n",
    "\n\n",
    "\r\n",
    "a",
    " a",
    "  a",
    "a ",
    "a  ",
    "Hello world",
    "Hello  world",
    " Hello world ",
    "Hello\nworld\n",
    "\tindented\n\t\tmore",
    "It's we'll THEY'VE I'd don't",
    "1 12 123 1234 12345.678, 0x1F",
    "naïve café — “quotes” … ½ ²",
    "日本語のテキストです。漢字、かな。",
    "中文：你好，世界！",
    "Привет, мир! Ёлка",
    "مرحبا بالعالم",
    "हिन्दी में लिखें",
    "한국어 텍스트",
    "🙂",
    "👩‍👩‍👧 family 🇩🇪 flag 👍🏽",
    "e\u0301 combining, \u00a0nbsp\u00a0, zero\u200bwidth, \ufeffbom",
    "▁ the mark ▁▁ itself",
    "\u0000\u0001\u007f controls",
    "\ue000 private \U000f0000 use \U0010fffd",
    "<unk> <pad> <|im_end|> [INST]",
    "<0x0A> <0xFF> are names",
    "fn main() { println!(\"{:?}\", x[0]); } // done",
    "https://example.org/a?b=c&d=%20#e",
    "CamelCaseWORDS snake_case kebab-case HelloWORLDFoo",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "thethethe   the the",
    "$1,234.50 + 7% = ?!?!",
    "line one\n\n\nline two   \n   line three\r\n\r\n",
    "The quick brown fox jumps over the lazy dog.",
    "ﬁ ligature Ａ wide ① circled Ⅷ roman ǅ title",
]


def write(name, value):
    path = DATA / name
    path.write_text(json.dumps(value, ensure_ascii=True, separators=(",", ":")) + "\n")
    print(path.name, path.stat().st_size, "bytes")


def sentence_piece():
    """A vocabulary with Llama's settings, and what `sentencepiece` makes of every text."""
    corpus = (DATA / "perplexity_text.txt").read_text()
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for line in corpus.split("\n") if line),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        character_coverage=0.995,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["<sep>", "\n\n"],
        control_symbols=["<turn>"],
        num_threads=1,
        minloglevel=2,
    )

    def kind(index):
        if processor.is_unknown(index):
            return 2
        if processor.is_control(index):
            return 3
        if processor.is_byte(index):
            return 6
        if processor.id_to_piece(index) in ("<sep>", "\n\n"):
            return 4
        return 1

    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(processor.get_piece_size())
    texts = TEXTS + [
        "<sep>",
        "a<sep>b",
        "a <sep> b",
        "<sep><sep>the",
        "the\n\nthe",
        "code:\n\n        return",
        "     five spaces",
        "the<s>the</s>the<turn>",
    ]
    # The same pieces without the space before the text.
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model.getvalue())
    proto.normalizer_spec.add_dummy_prefix = False
    bare = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    write(
        "tokenizer_spm.json",
        {
            "pieces": [processor.id_to_piece(i) for i in ids],
            "scores": [processor.get_score(i) for i in ids],
            "types": [kind(i) for i in ids],
            "cases": [
                {
                    "text": text,
                    "ids": processor.encode(text),
                    "decoded": processor.decode(processor.encode(text)),
                    "ids_without_prefix": bare.encode(text),
                }
                for text in texts
            ],
        },
    )



CL100K_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
O200K_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def by_regexes(*patterns):
    """Regular expressions one after the other, as in the tokenizer.json of most families."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence(splits)


def cased(end, digits):
    """The word rule shared by o200k and Mistral's tekken."""
    head = r"[^\r\n\p{L}\p{N}]?"
    words = f"{head}{UPPER}*{LOWER}+{end}|{head}{UPPER}+{LOWER}*{end}"
    return by_regexes(f"{words}|{digits}{O200K_TAIL}")


def words():
    """Where each family cuts a text, by the pre-tokenizers that its tokenizer.json names."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    one_digit = pre_tokenizers.Digits(individual_digits=True)
    letters = CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
    marked_letters = CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|"
    families = {
        "gpt-2": gpt2,
        "llama-bpe": by_regexes(letters + r"\p{N}{1,3}" + CL100K_TAIL),
        "qwen2": by_regexes(letters + r"\p{N}" + CL100K_TAIL),
        "qwen35": by_regexes(
            marked_letters + r"\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        "smollm": pre_tokenizers.Sequence([one_digit, gpt2]),
        "gpt-4o": cased(CONTRACTION + "?", r"\p{N}{1,3}"),
        "tekken": cased("", r"\p{N}"),
        "deepseek-v3": by_regexes(
            r"\p{N}{1,3}",
            "[一-龥\u3040-ゟ゠-ヿ]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
            r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
        ),
        "deepseek-coder": pre_tokenizers.Sequence(
            [
                by_regexes("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+"),
                one_digit,
            ]
        ),
    }
    texts = [text for text in TEXTS if text]
    cut = lambda rule, text: [text[start:end] for _, (start, end) in rule.pre_tokenize_str(text)]
    found = {name: [cut(rule, text) for text in texts] for name, rule in families.items()}
    for name, lists in found.items():
        assert ["".join(parts) for parts in lists] == texts, name
    # Lengths in characters say the same and take a tenth of the room.
    lengths = {name: [[len(part) for part in parts] for parts in lists] for name, lists in found.items()}
    write("tokenizer_words.json", {"texts": texts, "lengths": lengths})


LLAMA_STYLE = r"""{{- bos_token }}
{#- The date may be given, taken from the clock, or neither. #}
{%- if not date_string is defined %}
    {%- if strftime_now is defined and use_clock is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_text = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_text = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\n" }}
{%- endif %}
{{- "Today: " + date_string + "\n\n" }}
{%- if tools is not none %}
    {{- "Answer with a JSON call of one of these functions.\n\n" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system_text }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role in ['ipython', 'tool'] %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("One call at a time, please.") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

QWEN_STYLE = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nCall as <tool_call>\n{\"name\": <name>, \"arguments\": <object>}\n</tool_call><|im_end|>\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- else %}
    {{- '<|im_start|>system\nYou help.<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {%- set content = message.content %}
        {%- if message.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""

MISTRAL_STYLE = r"""{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant/user/..., message ' ~ loop.index ~ ' is ' ~ message['role']) }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}
"""

GEMMA_STYLE = r"""{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"""

TRAINING_STYLE = r"""{% for message in messages %}
    {% if message.role == 'skip' %}
        {% continue %}
    {% endif %}
    {% if message.role == 'end' %}
        {% break %}
    {% endif %}
    {% if message.role == 'assistant' %}
    {%- generation -%}
    A: {{ message.content }}
    {%- endgeneration -%}
    {% else %}
Q: {{ message.content }}
    {% endif %}
{% endfor %}
{% raw %}{% generation %} {{ left }} {% endgeneration %}{% endraw %}

{# {% generation %} #}{{ "{% generation %}" }}
"""

METHODS = r"""{% set text = messages[0].content %}
{{ text.strip() }}|{{ text.lstrip() }}|{{ text.rstrip() }}|{{ text.strip().strip('T.') }}
{{ text.upper() }}|{{ text.lower() }}|{{ text.strip().title() }}|{{ text.strip().capitalize() }}
{{ text.strip().startswith('The') }}|{{ text.endswith('x') }}|{{ text.find('cat') }}|{{ text.count('a') }}
{{ text.split() | join(',') }}|{{ text.split('a') | length }}|{{ text.split(' ', 3)[-1] }}|{{ text.replace('cat', 'dog') }}
{{ text.strip().removeprefix('The ') }}|{{ text.strip().removesuffix('mat.') }}|{{ 'x\ny\n'.splitlines() | join('+') }}
{% for key, value in messages[0].items() %}{{ key }}={{ value | trim }};{% endfor %}

{{ messages[0].get('role') }} {{ messages[0].get('name', 'nobody') }} {{ messages[0].get('name') }} {{ messages[0].keys() | list | length }}
{{ none }} {{ true }} {{ false }} {{ [1, 'a', none, true] }} {{ {'a': 1.0, 'b': false} }}
{{ {'b': [1, {'z': 1, 'y': 2}], 'a': 'é<&>\\"'} | tojson }} {{ {'b': 1, 'a': [2, 3]} | tojson(sort_keys=true, separators=(',', ':')) }}
{{ {'b': 1, 'a': {'d': 4, 'c': [3]}} | tojson(indent=2, sort_keys=true) }}
{{ 'é' | tojson(ensure_ascii=true) }} {{ 7 // 2 }} {{ 7 / 2 }} {{ 2 ** 5 }} {{ '%s-%d' | format('a', 3) }} {{ 'ab' * 2 }}
{{ text | trim | length }} {{ messages | length }} {{ messages | map(attribute='role') | join(' ') }}
{{ (messages | selectattr('role', 'equalto', 'user') | list | first).content[1:4] }}{{ 'abc'[::-1] }}
{%- macro twice(x, y='!') %}{{ x }}{{ x }}{{ y }}{% endmacro %}
{{ twice('ho') }}
"""

WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather at a place: °C & <wind>",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer", "default": 1}},
            "required": ["place"],
        },
    },
}


def templates():
    """Templates in the styles of known families with what Jinja2 makes of them."""
    say = lambda role, content, **more: {"role": role, "content": content, **more}
    call = lambda arguments: {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    plain = [say("user", "Hi there "), say("assistant", " Hello!"), say("user", "Bye")]
    system = [say("system", " Be brief. ")] + plain
    tools_used = [
        say("system", "Be brief."),
        say("user", "Weather in Graz?"),
        say("assistant", "", tool_calls=[call({"place": "Graz", "days": 2})]),
        say("tool", '{"sky": "blue"}'),
        say("assistant", "<think>\neasy\n</think>\n\nBlue."),
        say("user", "Thanks"),
    ]
    text = {"tools": [WEATHER_TOOL], "add_generation_prompt": True}
    cases = [
        ("llama: plain", LLAMA_STYLE, plain, {"add_generation_prompt": True}),
        ("llama: system", LLAMA_STYLE, system, {}),
        ("llama: tools", LLAMA_STYLE, tools_used, text),
        ("llama: date", LLAMA_STYLE, plain, {"extra": {"date_string": "01 Jan 2031"}}),
        ("llama: two calls", LLAMA_STYLE, [say("user", "x"), say("assistant", "", tool_calls=[call({}), call({})])], {}),
        ("qwen: plain", QWEN_STYLE, plain, {"add_generation_prompt": True}),
        ("qwen: system", QWEN_STYLE, system, {"add_generation_prompt": True}),
        ("qwen: tools", QWEN_STYLE, tools_used, text),
        ("qwen: arguments as text", QWEN_STYLE, [say("user", "x"), say("assistant", None, tool_calls=[call('{"place":1}')])], text),
        ("qwen: no thinking", QWEN_STYLE, plain, {"add_generation_prompt": True, "extra": {"enable_thinking": False}}),
        ("mistral: plain", MISTRAL_STYLE, plain, {}),
        ("mistral: system", MISTRAL_STYLE, system, {}),
        ("mistral: two users", MISTRAL_STYLE, [say("user", "a"), say("user", "b")], {}),
        ("gemma: plain", GEMMA_STYLE, plain, {"add_generation_prompt": True}),
        ("gemma: system", GEMMA_STYLE, system, {}),
        ("training", TRAINING_STYLE, [say("user", "a"), say("skip", "b"), say("assistant", "c"), say("end", ""), say("user", "d")], {}),
        ("methods", METHODS, [say("user", "  The cat sat on the mat. "), say("assistant", "")], {}),
    ]
    results = []
    for name, source, messages, options in cases:
        given = {"messages": messages, "tools": [], "add_generation_prompt": False, "extra": {}, **options}
        result = {"name": name, "source": source, **given} | rendered(source, given, lambda form: "26 Jul 2024")
        results.append(result)
    write("tokenizer_templates.json", results)


if __name__ == "__main__":
    sentence_piece()
    words()
    templates()

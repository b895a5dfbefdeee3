"""Makes the fixtures of embedding models under tests/data: tiny random BERT and Nomic-BERT files, the
vectors that a plain float64 implementation (numpy, below) computes for them, and golden tokens of a
WordPiece tokenizer written out below.

Run it again only to add a case; the files are committed, so tests need neither numpy nor a network:

    python3 -m venv target/venv
    target/venv/bin/pip install numpy gguf
    target/venv/bin/python tests/scripts/make_embedding_fixtures.py

Per model NAME.gguf and NAME.json = {"sequences": [{"tokens", "mean", "cls", "last"}]}: pooled states, not
normalized. tokenizer_wordpiece.json = {"cases": [{"text", "tokens"}]} of the vocabulary in tiny_bert.gguf.
"""

import json
import math
import re
import unicodedata
from collections import Counter
from pathlib import Path

import gguf
import numpy
from gguf import GGMLQuantizationType as Type

DATA = Path(__file__).resolve().parents[1] / "data"
D_MODEL, D_FF, N_HEADS, N_LAYERS, N_POSITIONS = 64, 160, 4, 2, 96
EPSILON = 1e-12
ROPE_BASE = 1000.0
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
UNKNOWN, CLS, SEP = 1, 2, 3
WORD_CHARS_MAX = 100

# --- WordPiece -----------------------------------------------------------------------------------


def is_punctuation(c):
    code = ord(c)
    in_ascii = 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126
    return in_ascii or unicodedata.category(c).startswith("P")


def is_cjk(c):
    code = ord(c)
    ranges = [(0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F),
              (0x2B740, 0x2B81F), (0x2B920, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)]
    return any(first <= code <= last for first, last in ranges)


def words(text):
    """Cleaned, lowered, without accents, cut at white space, punctuation and CJK characters."""
    out = []
    for c in text:
        if c in "\t\n\r" or unicodedata.category(c) == "Zs":
            out.append(" ")
        elif c in "\0�" or unicodedata.category(c).startswith("C"):
            continue
        elif is_cjk(c):
            out.append(f" {c} ")
        else:
            out.append(c)
    text = unicodedata.normalize("NFD", "".join(out))
    text = "".join(c for c in text if unicodedata.category(c) != "Mn")
    text = "".join(c.lower() for c in text)
    for chunk in text.split():
        word = ""
        for c in chunk:
            if is_punctuation(c):
                if word:
                    yield word
                yield c
                word = ""
            else:
                word += c
        if word:
            yield word


def encode(vocabulary, text):
    ids = {piece: i for i, piece in reversed(list(enumerate(vocabulary)))}
    tokens = [CLS]
    for word in words(text):
        pieces, start = [], 0
        while start < len(word) and len(word) <= WORD_CHARS_MAX:
            for end in range(len(word), start, -1):
                piece = word[start:end] if start == 0 else "##" + word[start:end]
                if piece in ids and ids[piece] >= len(SPECIAL):
                    pieces.append(ids[piece])
                    start = end
                    break
            else:
                pieces = []
                break
        whole = start == len(word) and len(word) <= WORD_CHARS_MAX
        tokens += pieces if whole else [UNKNOWN]
    return tokens + [SEP]


def make_vocabulary():
    """Letters, digits, signs, and the commonest words and endings of a text that is in the repository."""
    text = (DATA / "perplexity_text.txt").read_text()
    counts = Counter(w for w in words(text) if re.fullmatch("[a-z]{2,}", w))
    common = [word for word, _ in counts.most_common(260)]
    letters = [chr(c) for c in range(97, 123)] + [str(d) for d in range(10)]
    others = list("αβγδεοσςжизмирßøłđþæœıµ日本語中文字한글ᄒ") + ["straße", "мир", "naive", "uber"]
    signs = [chr(c) for c in range(33, 127) if is_punctuation(chr(c))] + list("«»„“”’—…¿¡、。€£°²")
    endings = ["ing", "ed", "ly", "er", "est", "tion", "ness", "able", "ment", "s"]
    pieces = letters + others + signs + common + ["##" + p for p in letters + others + endings]
    seen = dict.fromkeys(pieces)
    return SPECIAL + [p for p in seen if p not in SPECIAL]


TEXTS = [
    "hello world", "Hello, World!", "  leading and\ttrailing\n\nspace  ", "", " ", "a", "!!!",
    "don't stop-me now...", "The quick brown fox jumps over the lazy dog.", "UPPER lower MiXeD",
    "Café naïve résumé Ångström façade", "Cafe\u0301 nai\u0308ve", "über Straße STRASSE ẞ",
    "İstanbul ıI", "ΟΔΟΣ οδος Σίσυφος", "мир МИР Мир й ё", "日本語の文字", "中文abc中文", "中 文",
    "한글 test 한", "mixed日本text", "豈 \U0002f800 \U00020000", "emoji 😀 ok 👍🏽 end", "zero\u200bwidth\u200djoin\ufeff",
    "soft\u00adhyphen", "no\u00a0break\u2003space\u3000wide", "null\0byte \ufffd replacement", "bell\x07 escape\x1b[0m",
    "1234567890 3.14159 1e-5", "https://example.com/path?query=1&other=two#part", "user@example.com",
    "a_b_c snake_case camelCase kebab-case", "«quoted» „text“ ‘and’ — dashes … dots", "¿Qué? ¡Sí!",
    "€100 £5 20°C x² ½", "x" * 100, "x" * 101, "the" + "ing" * 32, "the" + "ing" * 33, "q" * 99 + "!" + "q" * 101,
    "unknownword ☃ snow☃man", "plain [CLS] words [SEP]x", "[MASK]ed", "[cls] [unused1] [ x ]",
    "a\u0300\u0301\u0302b", "\u0301alone", "ﬁ ligature ﬀ", "ǅ ǆ Ǆ", "Ⅷ ⅷ Ⓐ", "٣ ४ ५", "x\u0660y", "tab\there\r\nnext",
    "line\u2028separator\u2029paragraph", "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", "שלום", "العربية",
]

# --- models --------------------------------------------------------------------------------------


def softmax(x):
    x = numpy.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


def layer_norm(x, weight, bias):
    centered = x - x.mean(axis=-1, keepdims=True)
    normed = centered / numpy.sqrt((centered**2).mean(axis=-1, keepdims=True) + EPSILON)
    return normed * weight + (0 if bias is None else bias)


def gelu(x):
    return 0.5 * x * (1 + numpy.vectorize(math.erf)(x / math.sqrt(2)))


def silu(x):
    return x / (1 + numpy.exp(-x))


def rotate(x):
    """(heads, n, width): coordinate i turns with i + width / 2."""
    half = x.shape[-1] // 2
    frequencies = ROPE_BASE ** (-numpy.arange(half) / half)
    angles = numpy.arange(x.shape[1])[:, None] * frequencies
    cos, sin = numpy.cos(angles), numpy.sin(angles)
    a, b = x[..., :half], x[..., half:]
    return numpy.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def states(w, tokens):
    """(n, D_MODEL) of an encoder with tensors `w`; which parts it has is seen from their names."""

    def linear(x, stem):
        y = x @ w[stem + ".weight"].T
        return y + w.get(stem + ".bias", 0)

    def norm(x, stem):
        return layer_norm(x, w[stem + ".weight"], w.get(stem + ".bias"))

    def heads(x):
        return x.reshape(len(tokens), N_HEADS, -1).transpose(1, 0, 2)

    is_rotated = "position_embd.weight" not in w
    x = w["token_embd.weight"][tokens] + w["token_types.weight"][0]
    if not is_rotated:
        x = x + w["position_embd.weight"][: len(tokens)]
    x = norm(x, "token_embd_norm")
    for i in range(N_LAYERS):
        b = f"blk.{i}."
        if b + "attn_qkv.weight" in w:
            q, k, v = numpy.split(linear(x, b + "attn_qkv"), 3, axis=-1)
        else:
            q, k, v = (linear(x, b + "attn_" + kind) for kind in "qkv")
        q, k, v = heads(q), heads(k), heads(v)
        if is_rotated:
            q, k = rotate(q), rotate(k)
        weights = softmax(q @ k.transpose(0, 2, 1) / math.sqrt(D_MODEL // N_HEADS))
        attention = (weights @ v).transpose(1, 0, 2).reshape(len(tokens), D_MODEL)
        x = norm(x + linear(attention, b + "attn_output"), b + "attn_output_norm")
        up = linear(x, b + "ffn_up")
        inner = silu(linear(x, b + "ffn_gate")) * up if b + "ffn_gate.weight" in w else gelu(up)
        x = norm(x + linear(inner, b + "ffn_down"), b + "layer_output_norm")
    return x


def tensors(random, n_vocabulary, kind):
    """Name -> (float64 values, stored type)."""
    made = {}

    def add(name, shape, scale, dtype, middle=0.0):
        made[name] = (middle + scale * random.standard_normal(shape), dtype)

    def norm(stem):
        add(stem + ".weight", D_MODEL, 0.2, Type.F32, 1.0)
        add(stem + ".bias", D_MODEL, 0.2, Type.F32)

    def linear(stem, n_out, n_in, dtype=Type.F16):
        add(stem + ".weight", (n_out, n_in), 1.6 / math.sqrt(n_in), dtype)
        if kind == "bert":
            add(stem + ".bias", n_out, 0.3, Type.F32)

    add("token_embd.weight", (n_vocabulary, D_MODEL), 1.0, Type.F16)
    add("token_types.weight", (2, D_MODEL), 0.5, Type.F32)
    if kind == "bert":
        add("position_embd.weight", (N_POSITIONS, D_MODEL), 0.7, Type.F32)
    norm("token_embd_norm")
    for i in range(N_LAYERS):
        b = f"blk.{i}."
        if kind == "bert":
            for part in "qkv":
                linear(b + "attn_" + part, D_MODEL, D_MODEL)
        else:
            linear(b + "attn_qkv", 3 * D_MODEL, D_MODEL)
            linear(b + "ffn_gate", D_FF, D_MODEL)
        linear(b + "attn_output", D_MODEL, D_MODEL)
        norm(b + "attn_output_norm")
        linear(b + "ffn_up", D_FF, D_MODEL)
        linear(b + "ffn_down", D_MODEL, D_FF, Type.Q8_0 if i == 0 else Type.F16)
        norm(b + "layer_output_norm")
    return made


def write(name, kind, vocabulary):
    architecture = {"bert": "bert", "nomic": "nomic-bert"}[kind]
    made = tensors(numpy.random.default_rng(7), len(vocabulary), kind)
    writer = gguf.GGUFWriter(DATA / "models" / f"{name}.gguf", architecture)
    writer.add_name(f"tiny random {architecture}")
    writer.add_context_length(N_POSITIONS)
    writer.add_embedding_length(D_MODEL)
    writer.add_feed_forward_length(D_FF)
    writer.add_block_count(N_LAYERS)
    writer.add_head_count(N_HEADS)
    writer.add_layer_norm_eps(EPSILON)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    if kind == "nomic":
        writer.add_rope_freq_base(ROPE_BASE)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_type_count(2)

    def stored(index, piece):
        if index < len(SPECIAL):
            return piece
        return piece[2:] if piece.startswith("##") else "▁" + piece

    writer.add_token_list([stored(i, piece) for i, piece in enumerate(vocabulary)])
    kinds = [gguf.TokenType.CONTROL] * len(SPECIAL)
    kinds[UNKNOWN] = gguf.TokenType.UNKNOWN
    kinds += [gguf.TokenType.NORMAL] * (len(vocabulary) - len(SPECIAL))
    writer.add_token_types(kinds)
    writer.add_bos_token_id(CLS)
    writer.add_sep_token_id(SEP)
    writer.add_eos_token_id(SEP)
    writer.add_unk_token_id(UNKNOWN)
    writer.add_pad_token_id(0)
    writer.add_mask_token_id(4)
    weights = {}
    for tensor, (values, dtype) in made.items():
        values = values.astype(numpy.float32)
        data = values if dtype == Type.F32 else gguf.quants.quantize(values, dtype)
        writer.add_tensor(tensor, data, raw_dtype=dtype)
        weights[tensor] = gguf.quants.dequantize(data, dtype).astype(numpy.float64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    random = numpy.random.default_rng(11)
    sequences = []
    for n in [1, 2, 17, 33, N_POSITIONS]:
        tokens = random.integers(0, len(vocabulary), n).tolist()
        found = states(weights, tokens)
        rounded = lambda vector: [round(float(v), 6) for v in vector]
        sequences.append(dict(tokens=tokens, mean=rounded(found.mean(axis=0)), cls=rounded(found[0]),
                              last=rounded(found[-1])))
    path = DATA / "models" / f"{name}.json"
    path.write_text(json.dumps(dict(sequences=sequences)) + "\n")


def main():
    vocabulary = make_vocabulary()
    write("tiny_bert", "bert", vocabulary)
    write("tiny_nomic_bert", "nomic", vocabulary)
    # Names of special tokens are found before the text is cut, so those texts are cut by hand.
    cases = []
    for text in TEXTS:
        tokens = [CLS]
        for part in re.split(r"(\[(?:PAD|UNK|CLS|SEP|MASK)\])", text):
            tokens += [SPECIAL.index(part)] if part in SPECIAL else encode(vocabulary, part)[1:-1]
        cases.append(dict(text=text, tokens=tokens + [SEP]))
    out = "{\"cases\": [\n" + ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases) + "\n]}\n"
    (DATA / "tokenizer_wordpiece.json").write_text(out)


main()

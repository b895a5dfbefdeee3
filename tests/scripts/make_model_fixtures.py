"""Makes the model fixtures under tests/data/models: tiny random checkpoints as GGUF files, and what
the reference implementation (Hugging Face transformers on torch, float32) computes for them.

Run it again only to add a case; the files are committed, so tests need neither torch nor a network:

    python3 -m venv target/venv
    target/venv/bin/pip install torch transformers gguf numpy
    target/venv/bin/python tests/scripts/make_model_fixtures.py [CASE ..]

Per case two files: NAME.gguf, and NAME.json = {"sequences": [{"tokens", "positions", "logits"}]},
logits (n positions, vocab_size) rounded to 5 decimals. The reference runs on the weights as the
file stores them (quantized, then dequantized), so only float32 rounding separates it from ours.
tiny_llama.gguf also has a byte-level BPE vocabulary and a chat template, for tests of the server.
"""

import json
import math
import sys
from pathlib import Path

import gguf
import numpy
import tokenizers
import torch
import transformers
from gguf import GGMLQuantizationType as Type

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "tests" / "data" / "models"

# Names of a block's tensors: ours in the file, theirs in the checkpoint.
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

SIZES = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)


def rope(kind="default", **more):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


def case(architecture, model, config, types, **more):
    """`types`: tensor suffix -> stored type; F16 otherwise. `permutes`: q and k rows as for llama."""
    return dict(architecture=architecture, model=model, config=config, types=types, **more)


def cases():
    t = transformers
    mix = {"attn_q": Type.Q8_0, "ffn_up": Type.Q4_1, "ffn_down": Type.Q8_0, "attn_v": Type.Q4_1}
    llama3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                  original_max_position_embeddings=64)
    yarn = rope("yarn", factor=4.0, original_max_position_embeddings=32)
    return {
        "tiny_llama": case(
            "llama", t.LlamaForCausalLM,
            t.LlamaConfig(**{**SIZES, "vocab_size": 323, "max_position_embeddings": 1024}, **llama3),
            mix, permutes=True, has_vocabulary=True),
        "llama_linear_biases": case(
            "llama", t.LlamaForCausalLM,
            t.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, **rope("linear", factor=4.0)),
            {"attn_k": Type.F32, "ffn_gate": Type.Q8_0}, permutes=True),
        "mistral_window": case(
            "llama", t.MistralForCausalLM,
            t.MistralConfig(**SIZES, head_dim=32, sliding_window=9, **rope()),
            {"attn_output": Type.Q4_0, "ffn_down": Type.Q5_1}, permutes=True),
        "qwen2_yarn": case(
            "qwen2", t.Qwen2ForCausalLM,
            t.Qwen2Config(**{**SIZES, "tie_word_embeddings": True}, **yarn),
            {"token_embd": Type.Q8_0, "ffn_gate": Type.Q5_0}),
        "qwen3": case(
            "qwen3", t.Qwen3ForCausalLM,
            t.Qwen3Config(**SIZES, head_dim=32, **rope()), {"output": Type.Q8_0}),
        "smollm3": case(
            "smollm3", t.SmolLM3ForCausalLM,
            t.SmolLM3Config(**{**SIZES, "num_hidden_layers": 5, "tie_word_embeddings": True,
                               "intermediate_size": 64}, pad_token_id=0, bos_token_id=1,
                            eos_token_id=2, **rope()),
            {"attn_q": Type.Q8_0}, permutes=True),
        "seed_oss": case(
            "seed_oss", t.SeedOssForCausalLM,
            t.SeedOssConfig(**SIZES, head_dim=32, attention_bias=True, attention_out_bias=False,
                            pad_token_id=0, bos_token_id=1, eos_token_id=2, **rope()),
            {}, feed_forward_norm="post_attention_norm"),
        "ernie4_5": case(
            "ernie4_5", t.Ernie4_5ForCausalLM,
            t.Ernie4_5Config(**{**SIZES, "tie_word_embeddings": True}, head_dim=16, use_bias=False,
                             pad_token_id=0, bos_token_id=1, eos_token_id=2, **rope()),
            {"token_embd": Type.F32}),
    }


def randomize(model):
    """Weights that let every term matter: matrices keep the variance, norms and biases vary."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            scale = 0.7 if "embed_tokens" in name else 1.4 / math.sqrt(parameter.shape[1])
            parameter.data.normal_(0.0, scale)
        elif name.endswith("bias"):
            parameter.data.uniform_(-0.5, 0.5)
        else:
            parameter.data.uniform_(0.5, 1.5)


def permuted(rows, n_heads):
    """Rows of q or k from `(i, i + n/2)` pairs to `(2i, 2i + 1)` pairs, head by head."""
    shape = rows.shape
    return rows.reshape(n_heads, 2, shape[0] // n_heads // 2, -1).swapaxes(1, 2).reshape(shape)


def llama3_factors(config):
    """One divisor per pair, as the `llama3` rope type defines them."""
    p = config.rope_parameters
    head_dim = config.hidden_size // config.num_attention_heads
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * p["rope_theta"] ** (2 * pair / head_dim)
        turns = p["original_max_position_embeddings"] / wavelength
        smooth = (turns - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])
        smooth = min(max(smooth, 0.0), 1.0)
        factors.append(1.0 / ((1.0 - smooth) / p["factor"] + smooth))
    return numpy.array(factors, dtype=numpy.float32)


def write_sizes(writer, config, head_dim):
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    parameters = config.rope_parameters
    writer.add_rope_freq_base(parameters["rope_theta"])
    if parameters["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(parameters["factor"])
    if parameters["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(parameters["original_max_position_embeddings"])
    if parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))
    if config.model_type == "mistral":
        writer.add_sliding_window(config.sliding_window)


def write_vocabulary(writer, vocab_size):
    """A real byte-level BPE vocabulary: three special tokens, 256 bytes, 64 merges."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False, use_regex=True)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, show_progress=False,
        initial_alphabet=sorted(byte_level.alphabet()))
    tokenizer.train([str(ROOT / "tests" / "data" / "perplexity_text.txt")], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    assert len(tokens) == vocab_size, len(tokens)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in special else normal for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
        "+ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def write_tensors(writer, model, case, head_dim):
    """Writes every tensor and puts what was stored back into the model."""
    config, state = model.config, model.state_dict()
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    if not config.tie_word_embeddings:
        names["output"] = "lm_head"
    for layer in range(config.num_hidden_layers):
        for ours, theirs in BLOCK_NAMES.items():
            names[f"blk.{layer}.{ours}"] = f"model.layers.{layer}.{theirs}"
    written = 0
    for ours, theirs in names.items():
        for part in ("weight", "bias"):
            parameter = state.get(f"{theirs}.{part}")
            if parameter is None:
                continue
            written += 1
            suffix = ours.rsplit(".", 1)[-1]
            kind = case["types"].get(suffix, Type.F16) if parameter.dim() == 2 else Type.F32
            # Rows are quantized one by one, so it does not matter that this comes before permuting.
            stored = gguf.quants.quantize(parameter.numpy(), kind)
            parameter.copy_(torch.from_numpy(gguf.quants.dequantize(stored, kind).copy()))
            if case.get("permutes") and suffix in ("attn_q", "attn_k"):
                stored = permuted(stored, parameter.shape[0] // head_dim)
            if suffix == "ffn_norm":
                ours = ours.replace("ffn_norm", case.get("feed_forward_norm", "ffn_norm"))
            writer.add_tensor(f"{ours}.{part}", numpy.ascontiguousarray(stored), raw_dtype=kind)
    tied = int(config.tie_word_embeddings)
    assert written == len(state) - tied, (written, sorted(state))


def sequences(model):
    """Short ones at all positions, a long one where pages, windows and scalings would show."""
    n = model.config.vocab_size
    short = [3, n - 1, 3, 20, 0, 41, 41]
    long = [(7 * i * i + 13 * i + 5) % n for i in range(75)]
    for tokens, positions in (short, range(len(short))), (long, [0, 8, 9, 15, 16, 33, 63, 64, 74]):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, list(positions)]
        yield {
            "tokens": tokens,
            "positions": list(positions),
            "logits": [[round(x, 5) for x in row] for row in logits.tolist()],
        }


def make(name, case):
    torch.manual_seed(sum(name.encode()))
    case["config"]._attn_implementation = "eager"
    model = case["model"](case["config"]).float().eval()
    randomize(model)
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(OUT / f"{name}.gguf", case["architecture"])
    writer.add_name(name)
    write_sizes(writer, config, head_dim)
    if case.get("has_vocabulary"):
        write_vocabulary(writer, config.vocab_size)
    with torch.no_grad():
        write_tensors(writer, model, case, head_dim)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    text = json.dumps({"sequences": list(sequences(model))}, separators=(",", ":"))
    (OUT / f"{name}.json").write_text(text + "\n")
    spread = max(max(map(abs, row)) for row in json.loads(text)["sequences"][1]["logits"])
    print(f"{name}: {(OUT / f'{name}.gguf').stat().st_size} bytes, largest logit {spread:.2f}")


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    for name, one in cases().items():
        if len(sys.argv) == 1 or name in sys.argv[1:]:
            make(name, one)

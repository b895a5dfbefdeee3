"""Makes the looped-model fixtures under tests/data/models/looped: tiny random checkpoints in Hugging
Face layout, and the logits of a plain PyTorch implementation (float64, no cache, all positions at
once), written from the papers and the published configurations.

Run it again only to add a case; the files are committed, so tests need neither torch nor a network:

    python3 -m venv target/venv
    target/venv/bin/pip install torch safetensors
    target/venv/bin/python tests/scripts/make_looped_fixtures.py [CASE ..]

Per case: NAME/config.json, NAME/model.safetensors (BF16), and NAME.json =
{"loops": [..], "sequences": [{"tokens", "positions", "logits": {L: (n positions, vocab_size)}}]}.
NAME_exit.json, where the case has early exits: [{"rule", "threshold", "loops", "tokens", "left": loops
that each position ran, "logprobs": of tokens 1..}].
"""

import json
import math
import sys
from pathlib import Path

import safetensors.torch
import torch

OUT = Path(__file__).resolve().parents[2] / "tests" / "data" / "models" / "looped"
LOOPS = [1, 2, 4, 7]
D, FF, HEADS, VOCAB, EPS = 32, 64, 4, 61, 1e-5
HEAD = D // HEADS


def norm(x, weight, eps=EPS):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotated(x, frequencies, interleaved):
    """x: (heads, positions, HEAD). Pair i of a head turns by position * frequencies[i]."""
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
    else:
        a, b = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    turned_a, turned_b = a * cos - b * sin, a * sin + b * cos
    if interleaved:
        return torch.stack([turned_a, turned_b], -1).flatten(-2)
    return torch.cat([turned_a, turned_b], -1)


class Exits:
    """Rows leave the loop one by one. Of those that left, state, keys and values stay as they were."""

    def __init__(self, rule, threshold, n_rows):
        self.rule, self.threshold = rule, threshold
        self.left = torch.zeros(n_rows, dtype=torch.int64)
        self.remaining = torch.ones(n_rows, dtype=torch.float64)
        self.kept, self.signals = [], []

    def keys_and_values(self, k, v):
        """Called in every attention of a loop, in order."""
        inside, layer = (self.left == 0)[:, None], self.layer
        self.layer += 1
        if layer == len(self.kept):
            self.kept.append((k, v))
        else:
            old_k, old_v = self.kept[layer]
            self.kept[layer] = torch.where(inside, k, old_k), torch.where(inside, v, old_v)
        return self.kept[layer]

    def loop(self, number, before, step, gate=None, logits=None):
        """The states after one more loop, which `step` computes."""
        global kv_hook
        self.layer, kv_hook = 0, self.keys_and_values
        after = step(before)
        kv_hook = no_hook
        inside = self.left == 0
        if self.rule == "gate":
            self.remaining *= 1 - gate(after)
            signal = self.remaining
            done = 1 - signal >= self.threshold
        elif self.rule == "kl":
            now, then = logits(after).log_softmax(-1), logits(before).log_softmax(-1)
            signal = (now.exp() * (now - then)).sum(-1)
            done = (signal < self.threshold) & (number > 0)
        else:
            signal = (after - before).norm(dim=-1) / after.norm(dim=-1)
            done = (signal < self.threshold) & (number > 0)
        if number > 0 or self.rule == "gate":
            self.signals += (1 - signal if self.rule == "gate" else signal)[inside].tolist()
        self.left[done & inside] = number + 1
        return torch.where(inside[:, None], after, before)


class NoExits:
    def loop(self, number, before, step, gate=None, logits=None):
        return step(before)


no_hook = lambda k, v: (k, v)
kv_hook = no_hook


def attention(q, k, v, frequencies, interleaved):
    """q, k, v: (positions, heads * HEAD); fewer key heads than query heads are shared by turns."""
    k, v = kv_hook(k, v)
    split = lambda x: x.view(x.shape[0], -1, HEAD).transpose(0, 1)
    q, k, v = split(q), split(k), split(v)
    q, k = rotated(q, frequencies, interleaved), rotated(k, frequencies, interleaved)
    share = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)
    scores = q @ k.transpose(1, 2) / math.sqrt(HEAD)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -math.inf).softmax(-1)
    return (weights @ v).transpose(0, 1).flatten(1)


def swiglu(x, gate, up, down):
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def plain_frequencies(base):
    return base ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)


def llama3_frequencies(base, factor, low, high, original):
    plain = plain_frequencies(base)
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / factor + smooth * plain
    slow = torch.where(wavelength > original / low, plain / factor, between)
    return torch.where(wavelength < original / high, plain, slow)


class Weights:
    """Random weights by name: what a case asks for exists. Rounded to BF16, as stored."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.stored = {}

    def __call__(self, name, *shape):
        if name not in self.stored:
            uniform = torch.rand(shape, generator=self.generator, dtype=torch.float64) * 2 - 1
            is_matrix = len(shape) == 2 and shape[0] > 1
            # Norms within 0.5..1.5, matrices of variance 1.5 / n_in, biases small.
            value = uniform * math.sqrt(4.5 / shape[-1]) if is_matrix else 1 + uniform / 2
            if "bias" in name:
                value = uniform / 2
            self.stored[name] = value.to(torch.bfloat16)
        return self.stored[name].to(torch.float64)


def usual_block(w, name, x, frequencies, kv_heads, sandwich):
    """Names of Hugging Face's Llama; `sandwich`: Ouro's second norms inside the residual."""
    p = lambda part, *shape: w(f"{name}.{part}.weight", *shape)
    n = norm(x, p("input_layernorm", D))
    branch = attention(
        n @ p("self_attn.q_proj", D, D).T,
        n @ p("self_attn.k_proj", kv_heads * HEAD, D).T,
        n @ p("self_attn.v_proj", kv_heads * HEAD, D).T,
        frequencies, interleaved=False) @ p("self_attn.o_proj", D, D).T
    x = x + (norm(branch, p("input_layernorm_2", D)) if sandwich else branch)
    n = norm(x, p("post_attention_layernorm", D))
    branch = swiglu(n, p("mlp.gate_proj", FF, D), p("mlp.up_proj", FF, D), p("mlp.down_proj", D, FF))
    return x + (norm(branch, p("post_attention_layernorm_2", D)) if sandwich else branch)


def usual(w, config, tokens, loops, exits=NoExits()):
    """Ouro and Nanbeige: all blocks loop, with the final norm after every loop (or the last only)."""
    sandwich = config["model_type"] == "ouro"
    frequencies = plain_frequencies(config["rope_theta"])

    def step(x, loop):
        for layer in range(config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            x = usual_block(w, name, x, frequencies, config["num_key_value_heads"], sandwich)
        if loop == loops - 1 or not config.get("skip_loop_final_norm", False):
            x = norm(x, w("model.norm.weight", D))
        return x

    def gate(x):
        score = x @ w("model.early_exit_gate.weight", 1, D).T
        return (score + w("model.early_exit_gate.bias", 1)).sigmoid().flatten()

    logits = lambda x: x @ w("lm_head.weight", VOCAB, D).T
    x = w("model.embed_tokens.weight", VOCAB, D)[tokens]
    for loop in range(loops):
        x = exits.loop(loop, x, lambda x: step(x, loop), gate, logits)
    if sandwich:  # The gate is stored; only early exit asks it.
        gate(x)
    return logits(x)


def raven_block(w, name, x, frequencies, kv_heads, sandwich):
    """Huginn's sandwich (norms 2 and 4 after the residual sums), or the retrofitted pre-norm block."""
    p = lambda part, *shape: w(f"{name}.{part}", *shape)
    qkv = norm(x, p("norm_1.weight", D)) @ p("attn.Wqkv.weight", D + 2 * kv_heads * HEAD, D).T
    q, k, v = qkv.split([D, kv_heads * HEAD, kv_heads * HEAD], -1)
    if sandwich:
        q_bias, k_bias = p("attn.qk_bias", 2, 1, HEADS, HEAD).flatten(1)
        q, k = q + q_bias, k + k_bias
    x = x + attention(q, k, v, frequencies, interleaved=sandwich) @ p("attn.proj.weight", D, D).T
    second = norm(x, p("norm_2.weight", D))
    if sandwich:
        x, second = second, norm(second, p("norm_3.weight", D))
    gate, up = p("mlp.fc.weight", 2 * FF, D).chunk(2)
    x = x + swiglu(second, gate, up, p("mlp.proj.weight", D, FF))
    return norm(x, p("norm_4.weight", D)) if sandwich else x


def mixed(z):
    z = (z + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def initial_state(n_positions, seed=0):
    """Our counter-based stand-in for the models' fresh random state."""
    def value(position, coordinate):
        key = mixed(seed ^ mixed(position << 32 | coordinate))
        draws = [mixed((key + draw) % 2**64) for draw in range(3)]
        total = sum(bits >> (16 * part) & 0xFFFF for bits in draws for part in range(4))
        return max(-3.0, min(3.0, (total - 6 * 65535) / 65536))

    rows = [[value(p, c) for c in range(D)] for p in range(n_positions)]
    return torch.tensor(rows, dtype=torch.float64)


def raven(w, config, tokens, loops, exits=NoExits()):
    sandwich = config["qk_bias"]
    kv_heads = config.get("num_key_value_heads", HEADS)
    if config.get("rope_scaling"):
        s = config["rope_scaling"]
        frequencies = llama3_frequencies(
            config["rope_theta"], s["factor"], s["low_freq_factor"], s["high_freq_factor"],
            s["original_max_position_embeddings"])
    else:
        frequencies = plain_frequencies(config["rope_base"])
    scale = config["init_values"]["embed_scale"]
    e = w("transformer.wte.weight", VOCAB, D)[tokens] * scale

    def segment(name, n_blocks, x):
        for i in range(n_blocks):
            x = raven_block(w, f"transformer.{name}.{i}", x, frequencies, kv_heads, sandwich)
        return x

    e = segment("prelude", config["n_layers_in_prelude"], e)
    state = initial_state(len(tokens)) * config["init_values"]["std"] * scale

    def step(state):
        joined = torch.cat([state, e], -1)
        state = joined @ w("transformer.adapter.weight", D, 2 * D).T
        return segment("core_block", config["n_layers_in_recurrent_block"], state)

    for loop in range(loops):
        state = exits.loop(loop, state, step)
    final = w("transformer.ln_f.weight", D)
    if sandwich:
        state = norm(state, final)
    state = norm(segment("coda", config["n_layers_in_coda"], state), final)
    if config["tie_embeddings"]:
        return state @ w("transformer.wte.weight", VOCAB, D).T
    return state @ w("lm_head.weight", VOCAB, D).T


def looped_llama(w, config, tokens, loops):
    """Our own small models: e = norm(prelude(E)); s = e; s = core(W [s; e]); norm; coda; norm."""
    frequencies, kv_heads = plain_frequencies(config["rope_theta"]), config["n_kv_heads"]

    def segment(name, n_blocks, x):
        for i in range(n_blocks):
            p = lambda part, *shape: w(f"{name}.{i}.{part}.weight", *shape)
            n = norm(x, p("attn_norm", D))
            x = x + attention(
                n @ p("q_proj", D, D).T, n @ p("k_proj", kv_heads * HEAD, D).T,
                n @ p("v_proj", kv_heads * HEAD, D).T, frequencies, interleaved=False,
            ) @ p("o_proj", D, D).T
            x = x + swiglu(norm(x, p("ffn_norm", D)), p("gate_proj", FF, D), p("up_proj", FF, D),
                           p("down_proj", D, FF))
        return x

    embedding = w("embed.weight", VOCAB, D)
    e = norm(segment("prelude", config["n_layers_in_prelude"], embedding[tokens]),
             w("prelude_norm.weight", D))
    state, each_loop = e, config["state_norm_each_loop"]
    for _ in range(loops):
        state = torch.cat([state, e], -1) @ w("adapter.weight", D, 2 * D).T
        state = segment("recurrent", config["n_layers_in_recurrent_block"], state)
        if each_loop:
            state = norm(state, w("state_norm.weight", D))
    if not each_loop:
        state = norm(state, w("state_norm.weight", D))
    state = segment("coda", config["n_layers_in_coda"], state)
    return norm(state, w("final_norm.weight", D)) @ embedding.T


USUAL = dict(hidden_size=D, intermediate_size=FF, num_hidden_layers=2, num_attention_heads=HEADS,
             num_key_value_heads=HEADS, vocab_size=VOCAB, max_position_embeddings=128,
             rms_norm_eps=EPS, rope_theta=10000.0, hidden_act="silu", tie_word_embeddings=False)
RAVEN = dict(model_type="huginn_raven", architectures=["RavenForCausalLM"], n_embd=D, n_heads=HEADS,
             intermediate_size=FF, vocab_size=VOCAB, padded_vocab_size=VOCAB, block_size=128,
             norm_eps=EPS, bias=False, injection_type="linear", state_init="like-init",
             test_time_noise=0, nonlin_name="SiLU", mlp_class_name="GatedMLP", mean_recurrence=4,
             n_layers_in_prelude=1, n_layers_in_recurrent_block=2, n_layers_in_coda=1)
OWN = dict(architecture="looped-llama", hidden_size=D, ffn_size=FF, n_heads=HEADS, n_kv_heads=2,
           head_dim=HEAD, vocab_size=VOCAB, context=128, norm_eps=EPS, rope_theta=10000.0,
           prelude_out_norm=True, default_loops=4, trained_loops=[1, 8], n_layers_in_prelude=1)

CASES = {
    "ouro": (usual, dict(USUAL, model_type="ouro", total_ut_steps=7, early_exit_threshold=1.0)),
    "nanbeige": (usual, dict(USUAL, model_type="nanbeige", num_key_value_heads=2, num_loops=7,
                             skip_loop_final_norm=False)),
    "nanbeige_no_norm": (usual, dict(USUAL, model_type="nanbeige", num_loops=7,
                                     skip_loop_final_norm=True)),
    "huginn": (raven, dict(RAVEN, qk_bias=True, rope_base=50000, tie_embeddings=True,
                           init_values=dict(std=math.sqrt(2 / (5 * D)), embed_scale=math.sqrt(D)))),
    "retrofit": (raven, dict(RAVEN, qk_bias=False, rope_base=50000.0, rope_theta=500.0,
                             num_key_value_heads=2, max_position_embeddings=96,
                             tie_embeddings=False,
                             init_values=dict(std=0.0087039, embed_scale=1.0),
                             rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0,
                                               high_freq_factor=4.0,
                                               original_max_position_embeddings=64))),
    "looped_llama": (looped_llama, dict(OWN, n_layers_in_recurrent_block=2, n_layers_in_coda=1,
                                        state_norm_each_loop=False)),
    "looped_llama_norm": (looped_llama, dict(OWN, n_layers_in_recurrent_block=1,
                                             n_layers_in_coda=0, state_norm_each_loop=True)),
}


EXITS = {"ouro": ["gate", "kl", "latent"], "huginn": ["latent"]}


def exit_cases(weights, name, function, config):
    """For each rule a threshold at which rows leave after different loops and none leaves by a hair."""
    tokens = [(5 * i * i + 11 * i + 2) % VOCAB for i in range(40)]
    for rule in EXITS.get(name, []):
        best = None
        trial = Exits(rule, 2.0 if rule == "gate" else -1.0, len(tokens))
        function(weights, config, torch.tensor(tokens), LOOPS[-1], trial)
        candidates = sorted(trial.signals)[len(tokens) // 2 :: 7]
        for threshold in [round(0.99 * x, 4) for x in candidates]:
            exits = Exits(rule, threshold, len(tokens))
            rows = function(weights, config, torch.tensor(tokens), LOOPS[-1], exits)
            left = [n or LOOPS[-1] for n in exits.left.tolist()]
            margin = min(abs(x - threshold) for x in exits.signals) / threshold
            depths = len(set(left))
            if margin > 2e-3 and (best is None or depths > best[0]):
                scores = rows.log_softmax(-1)
                logprobs = [round(scores[i, t].item(), 5) for i, t in enumerate(tokens[1:])]
                best = depths, dict(rule=rule, threshold=threshold, loops=LOOPS[-1], tokens=tokens,
                                    left=left, logprobs=logprobs)
        print(name, rule, best[0], "depths", best[1]["threshold"], best[1]["left"])
        yield best[1]


def make(name, function, config):
    weights = Weights(sum(name.encode()))
    sequences = []
    short = [3, VOCAB - 1, 3, 20, 0, 41, 41]
    long = [(7 * i * i + 13 * i + 5) % VOCAB for i in range(41)]
    for tokens, positions in (short, range(len(short))), (long, [0, 15, 16, 31, 40]):
        logits = {}
        for loops in LOOPS:
            rows = function(weights, config, torch.tensor(tokens), loops)[list(positions)]
            logits[loops] = [[round(x, 5) for x in row] for row in rows.tolist()]
        sequences.append({"tokens": tokens, "positions": list(positions), "logits": logits})
    folder = OUT / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    stored = {key: value.contiguous() for key, value in weights.stored.items()}
    safetensors.torch.save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    if name in EXITS:
        cases = list(exit_cases(weights, name, function, config))
        (OUT / f"{name}_exit.json").write_text(json.dumps(cases, separators=(",", ":")) + "\n")
    text = json.dumps({"loops": LOOPS, "sequences": sequences}, separators=(",", ":"))
    (OUT / f"{name}.json").write_text(text + "\n")
    spread = [max(abs(x) for row in sequences[1]["logits"][l] for x in row) for l in LOOPS]
    change = [sequences[1]["logits"][l][-1][0] for l in LOOPS]
    print(name, (folder / "model.safetensors").stat().st_size, "bytes; largest logits", spread, change)


if __name__ == "__main__":
    for name, (function, config) in CASES.items():
        if len(sys.argv) == 1 or name in sys.argv[1:]:
            make(name, function, config)

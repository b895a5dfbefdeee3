"""A small looped (recurrent-depth) Llama-style language model.

    input  = norm_p(prelude(E[tokens]))
    state  = input
    state  = norm_s(core(W [state ; input]))        L times
    logits = E . norm_f(coda(state))

A block is the Llama block: h += O attention(norm h); h += D (silu(G n) * (U n)), n = norm h. The norm
on the state in every loop is what keeps a deep loop in the range that training saw. The prelude, core
and coda are lists of blocks; every loop has its own keys and values at inference.
"""
import torch
import torch.nn.functional as F
from torch import nn

CONFIG = {
    "architecture": "looped-llama",
    "n_layers_in_prelude": 1, "n_layers_in_recurrent_block": 1, "n_layers_in_coda": 0,
    "hidden_size": 256, "n_heads": 4, "n_kv_heads": 2, "head_dim": 64, "ffn_size": 768,
    "vocab_size": 4096, "context": 512, "rope_theta": 10000.0, "norm_eps": 1e-5,
    "prelude_out_norm": True, "state_norm_each_loop": True, "tied_embedding": True,
    "bos_token_id": 0, "eos_token_id": 0, "trained_loops": [1, 12], "default_loops": 4, "max_loops": 12,
}


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        d, ffn, self.eps = config["hidden_size"], config["ffn_size"], config["norm_eps"]
        self.heads, self.kv_heads, self.head_dim = config["n_heads"], config["n_kv_heads"], config["head_dim"]
        matrix = lambda n_out, n_in: nn.Parameter(torch.randn(n_out, n_in) * 0.6 * n_in ** -0.5)
        self.attn_norm, self.ffn_norm = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))
        self.q_proj = matrix(self.heads * self.head_dim, d)
        self.k_proj, self.v_proj = (matrix(self.kv_heads * self.head_dim, d) for _ in range(2))
        self.gate_proj, self.up_proj = matrix(ffn, d), matrix(ffn, d)
        # A fresh block changes nothing: both ways back into the stream start at zero.
        self.o_proj = nn.Parameter(torch.zeros(d, self.heads * self.head_dim))
        self.down_proj = nn.Parameter(torch.zeros(d, ffn))

    def attention(self, n, cos, sin):
        batch, length, _ = n.shape
        rotated, kv = self.heads + self.kv_heads, self.kv_heads
        all_heads = F.linear(n, torch.cat([self.q_proj, self.k_proj, self.v_proj]))
        all_heads = all_heads.view(batch, length, rotated + kv, self.head_dim).transpose(1, 2)
        first, second = all_heads[:, :rotated].chunk(2, -1)
        qk = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        repeat = lambda heads: heads.repeat_interleave(self.heads // kv, 1)
        mixed = F.scaled_dot_product_attention(
            qk[:, :self.heads], repeat(qk[:, self.heads:]), repeat(all_heads[:, rotated:]), is_causal=True)
        return F.linear(mixed.transpose(1, 2).reshape(batch, length, -1), self.o_proj)

    def forward(self, h, cos, sin):
        norm = lambda x, weight: F.rms_norm(x, (x.shape[-1],), weight, self.eps)
        h = h + self.attention(norm(h, self.attn_norm), cos, sin)
        gate, up = F.linear(norm(h, self.ffn_norm), torch.cat([self.gate_proj, self.up_proj])).chunk(2, -1)
        return h + F.linear(F.silu(gate) * up, self.down_proj)


class Looped(nn.Module):
    def __init__(self, config=CONFIG):
        super().__init__()
        d, self.config = config["hidden_size"], config
        blocks = lambda part: nn.ModuleList(Block(config) for _ in range(config[f"n_layers_in_{part}"]))
        self.embed = nn.Parameter(torch.randn(config["vocab_size"], d) * 0.02)
        self.prelude, self.core, self.coda = map(blocks, ("prelude", "recurrent_block", "coda"))
        self.adapter = nn.Parameter(torch.cat([torch.eye(d), 0.25 * torch.eye(d)], 1))
        self.prelude_norm, self.state_norm, self.final_norm = (nn.Parameter(torch.ones(d)) for _ in range(3))
        half = torch.arange(0, config["head_dim"], 2).float() / config["head_dim"]
        angles = torch.outer(torch.arange(config["context"]).float(), config["rope_theta"] ** -half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def norm(self, x, weight):
        return F.rms_norm(x, (x.shape[-1],), weight, self.config["norm_eps"])

    def through(self, blocks, h):
        length = h.shape[1]
        for block in blocks:
            h = block(h, self.cos[:length], self.sin[:length])
        return h

    def encode(self, tokens):
        """Tokens (batch, length) to the input (batch, length, d_model) of every loop."""
        return self.norm(self.through(self.prelude, F.embedding(tokens, self.embed)), self.prelude_norm)

    def step(self, state, encoded):
        """One loop."""
        h = F.linear(torch.cat([state, encoded], -1), self.adapter)
        return self.norm(self.through(self.core, h), self.state_norm)

    def decode(self, state):
        """State to logits (batch, length, vocabulary)."""
        return F.linear(self.norm(self.through(self.coda, state), self.final_norm), self.embed)

    def loss(self, state, targets):
        """Mean cross entropy in nats."""
        return F.cross_entropy(self.decode(state).flatten(0, 1), targets.flatten())

    def forward(self, tokens, loops, backprop=99):
        """State after `loops`; gradients flow through the last `backprop` of them only."""
        encoded = self.encode(tokens)
        state = encoded
        n_without = max(0, loops - backprop)
        with torch.no_grad():
            for _ in range(n_without):
                state = self.step(state, encoded)
        for _ in range(loops - n_without):
            state = self.step(state, encoded)
        return state

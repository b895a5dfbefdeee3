"""Writes a checkpoint as a directory in Hugging Face layout, which `tinyloop quantize` reads.

    python export.py DIR OUT        (after train.py DIR; OUT's name becomes the model's title)
"""
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from model import CONFIG

# A base model knows no roles: a conversation is its texts, one a paragraph, and the answer goes on.
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}\n{% endfor %}"


def tensors(state):
    """Names of the looped-llama layout: `core.0.q_proj` becomes `recurrent.0.q_proj.weight`."""
    return {name.replace("core.", "recurrent.") + ".weight": value.contiguous() for name, value in state.items()}


def main():
    root, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    state = torch.load(root / "looped.pt")["model"]
    save_file(tensors(state), out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    shutil.copy(root / "tokenizer.json", out / "tokenizer.json")
    token = "<|endoftext|>"
    (out / "tokenizer_config.json").write_text(json.dumps(
        {"bos_token": token, "eos_token": token, "add_bos_token": True}, indent=1) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    print(f"{sum(value.numel() for value in state.values()):,} parameters")


main()

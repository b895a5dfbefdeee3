"""Models for evaluation: from a checkpoint of train.py, or from the GGUF file that `tinyloop quantize`
wrote of it (weights as the file rounds them, so that the engine can be compared exactly)."""
from pathlib import Path

import numpy as np
import torch

from model import Looped

# GGUF name of a block's tensor -> ours.
BLOCK = {"attn_norm": "attn_norm", "attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj",
         "attn_output": "o_proj", "ffn_norm": "ffn_norm", "ffn_gate": "gate_proj", "ffn_up": "up_proj",
         "ffn_down": "down_proj"}
OTHER = {"token_embd": "embed", "loop_input_norm": "prelude_norm", "loop_norm": "state_norm",
         "output_norm": "final_norm"}


def from_checkpoint(path):
    model = Looped().eval()
    model.load_state_dict(torch.load(path)["model"])
    return model


def from_gguf(path):
    from gguf import GGUFReader, dequantize
    model = Looped().eval()
    config = model.config
    blocks = [f"{part}.{i}" for part, n in (("prelude", config["n_layers_in_prelude"]),
                                            ("core", config["n_layers_in_recurrent_block"]),
                                            ("coda", config["n_layers_in_coda"])) for i in range(n)]
    found = {}
    for tensor in GGUFReader(path).tensors:
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        found[tensor.name.removesuffix(".weight")] = values
    state = {ours: found.pop(theirs) for theirs, ours in OTHER.items()}
    state["adapter"] = torch.cat([found.pop("loop_state"), found.pop("loop_input")], 1)
    for name, values in found.items():
        _, index, part = name.split(".")
        state[f"{blocks[int(index)]}.{BLOCK[part]}"] = values
    model.load_state_dict(state)
    return model


def load(path):
    return from_gguf(path) if Path(path).suffix == ".gguf" else from_checkpoint(path)

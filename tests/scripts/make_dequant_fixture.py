"""Writes tests/data/dequant.json: random blocks of every quantized type and the values that the
`gguf` Python package (PyPI: gguf, numpy) reads out of them. Run once; the result is committed.

    python3 tests/scripts/make_dequant_fixture.py > tests/data/dequant.json
"""

import json

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T
from gguf.quants import dequantize

NAMES = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"]
# Offsets of the f16 scales in a block: random bits there could be infinite or NaN.
SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82],
          "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0]}


def main():
    rng = np.random.default_rng(7)
    entries = []
    for name in NAMES:
        kind = T[name]
        _, block_bytes = GGML_QUANT_SIZES[kind]
        n_blocks = 32 if name in ("F16", "BF16") else 2
        blocks = rng.integers(0, 256, (n_blocks, block_bytes), dtype=np.uint8)
        if name in ("F16", "BF16"):
            blocks[:, 1] &= 0xBF  # finite
        for at in SCALES.get(name, []):
            scale = rng.normal(0, 0.05, n_blocks).astype(np.float16)
            blocks[:, at:at + 2] = scale.view(np.uint8).reshape(n_blocks, 2)
        values = dequantize(blocks.reshape(1, -1), kind).reshape(-1)
        entries.append({"type": name, "bytes": blocks.reshape(-1).tolist(),
                        "values": [float(np.float32(v)) for v in values]})
    print(json.dumps(entries, separators=(",", ":")))


if __name__ == "__main__":
    main()

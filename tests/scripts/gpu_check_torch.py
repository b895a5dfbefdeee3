"""PyTorch's own bf16 matrix products on the shapes of kernels_bench.cpp, as rows of its table."""

import sys

try:
    import torch
except ImportError:
    sys.exit("torch is not installed here")
if not torch.cuda.is_available():
    sys.exit("torch finds no GPU here")

for n_rows in (16, 128, 512, 2048):
    for n_out in (4096, 14336):
        x = torch.randn(n_rows, 4096, device="cuda", dtype=torch.bfloat16)
        weights = [torch.randn(n_out, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(6)]
        for weight in weights:
            x @ weight.T
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for i in range(60):
            x @ weights[i % 6].T
        end.record()
        torch.cuda.synchronize()
        seconds = begin.elapsed_time(end) / 60e3
        shape = f"{n_rows} x {n_out} x 4096"
        rate, flops = weights[0].numel() * 2 / seconds / 1e9, 2 * n_rows * n_out * 4096 / seconds / 1e12
        print(f"| {'torch bf16':20} | {shape:22} | {seconds * 1e6:10.1f} | {rate:8.1f} |         | {flops:8.1f} |")

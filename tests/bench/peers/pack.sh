#!/bin/bash
# Packs peers as archives of at most 58 MB, for a GPU machine that has torch and Python 3.12 but no network.
#
# Usage: pack.sh sonic|te|cublas DIR
#   sonic   SonicMoE: there, tar -C /opt/site -xf sonic.tar.xz;
#           PYTHONPATH=/opt/site:/opt/site/nvidia_cutlass_dsl/python_packages
#   te      TransformerEngine, its library cut down to sm_90, and the sources of its torch extension: there, unpack,
#           run te_build.sh, PYTHONPATH=FOLDER/site
#   cublas  cuBLAS 13.8 (grouped GEMM on Hopper), cut down to sm_90: there, cat cublas.tar.xz.* | tar -xJ, and LD_PRELOAD
#           both libraries; headers in DIR/cublas-include
# Needs python3 with pip and venv, unzip, xz, readelf.
set -euo pipefail
usage() { sed -n '2,12s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ $# -eq 2 ] || usage
what=$1
mkdir -p "$2"
out=$(cd "$2" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

platforms=()
for v in _2_17 _2_24 _2_27 _2_28 _2_31 _2_34 2014; do platforms+=(--platform "manylinux${v}_x86_64"); done
wheels() {
    python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        "${platforms[@]}" -d "$tmp/wheels" "$@"
}

sonic() {
    wheels sonic-moe==0.1.2.post1 quack-kernels==0.3.11 nvidia-cutlass-dsl==4.4.2 nvidia-cutlass-dsl-libs-base==4.4.2 \
        nvidia-cutlass-dsl-libs-cu13==4.4.2 'apache-tvm-ffi<0.2' torch-c-dlpack-ext einops
    for w in "$tmp"/wheels/*.whl; do # the libraries for CUDA 13 go over those of the base, so last
        case $w in *libs_cu13*) ;; *) unzip -qo "$w" -d "$tmp/site" ;; esac
    done
    unzip -qo "$tmp"/wheels/*libs_cu13*.whl -d "$tmp/site"
    tar -C "$tmp/site" -cf - . | xz -T0 -6 >"$out/sonic.tar.xz"
}

# The source package asks for torch merely to print its name and version: a stand-in does.
torch_stand_in() {
    mkdir -p "$tmp/stub/torch/utils"
    echo 'from types import SimpleNamespace as N; __version__ = "2.11.0"; version = N(cuda="13.0")
_C = N(_GLIBCXX_USE_CXX11_ABI=True)' >"$tmp/stub/torch/__init__.py"
    touch "$tmp/stub/torch/utils/__init__.py"
    echo 'from setuptools import Extension as CppExtension
from setuptools.command.build_ext import build_ext as BuildExtension' >"$tmp/stub/torch/utils/cpp_extension.py"
}

te() {
    wheels transformer-engine==2.20.2 transformer-engine-cu13==2.20.2 pydantic==2.14.3 pydantic-core==2.50.4 \
        nvdlfw-inspect nvidia-cudnn-frontend==1.32.0 importlib-metadata annotated-types typing-inspection
    python3 -m venv "$tmp/venv"
    "$tmp/venv/bin/pip" install -q wheel setuptools pybind11 packaging
    torch_stand_in
    PYTHONPATH=$tmp/stub NVTE_FRAMEWORK=pytorch NVTE_WITH_NCCL_EP=0 "$tmp/venv/bin/pip" download -q --no-deps \
        --no-build-isolation --no-binary :all: -d "$tmp/source" transformer-engine-torch==2.20.2
    mkdir -p "$tmp/te/site" "$tmp/te/extension"
    for w in "$tmp"/wheels/*.whl; do unzip -qo "$w" -d "$tmp/te/site"; done
    local library=$tmp/te/site/transformer_engine/wheel_lib/libtransformer_engine.so
    python3 "$here/prune_fatbin.py" "$library" "$library.pruned"
    mv "$library.pruned" "$library"
    tar -C "$tmp/te/extension" --strip-components=1 -xzf "$tmp"/source/transformer_engine_torch*.tar.gz
    cp "$here/te_build.sh" "$tmp/te/"
    tar -C "$tmp/te" -cf - . | xz -T0 -3 >"$out/te.tar.xz"
}

cublas() {
    wheels nvidia-cublas==13.8.2.12
    unzip -qo "$tmp"/wheels/nvidia_cublas*.whl -d "$tmp/cublas"
    mkdir "$tmp/lib"
    for l in libcublas.so.13 libcublasLt.so.13; do
        python3 "$here/prune_fatbin.py" "$tmp/cublas/nvidia/cu13/lib/$l" "$tmp/lib/$l"
    done
    rm -rf "$out/cublas-include"
    cp -r "$tmp/cublas/nvidia/cu13/include" "$out/cublas-include"
    tar -C "$tmp/lib" -cf - . | xz -T0 -3 | split -b 58M -d - "$out/cublas.tar.xz."
}

case $what in sonic | te | cublas) "$what" ;; *) usage ;; esac
ls -la "$out"

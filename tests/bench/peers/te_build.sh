#!/bin/sh
# Builds TransformerEngine's torch extension in the folder that pack.sh's te.tar.xz was unpacked to, from the sources in
# it: te_build.sh (about a minute on 16 cores; needs torch, nvcc, a C++ compiler). Then PYTHONPATH=FOLDER/site.
set -eu
top=$(cd "$(dirname "$0")" && pwd)
cd "$top/extension"
cat >build_extension.py <<'PY'
import sys
from pathlib import Path

import setuptools

sys.path.insert(0, ".")
from build_tools.pytorch import setup_pytorch_extension
from torch.utils.cpp_extension import BuildExtension

here = Path(".").resolve()
setuptools.setup(
    name="transformer_engine_torch",
    version="2.20.2",
    cmdclass={"build_ext": BuildExtension},
    ext_modules=[setup_pytorch_extension("csrc", here / "csrc", here / "common_headers")],
)
PY
nvidia=$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])')
CPATH=$(find "$nvidia" -maxdepth 3 -type d -name include | tr '\n' ':')$top/site/include
export CPATH PYTHONPATH="$top/site" NVTE_FRAMEWORK=pytorch NVTE_WITH_NCCL_EP=0 NVTE_CUDA_ARCHS=90
export MAX_JOBS="${MAX_JOBS:-$(nproc)}" CUDA_HOME="${CUDA_HOME:-/usr/local/cuda}"
python3 build_extension.py build_ext --inplace >../build.log 2>&1 || { tail -n 20 ../build.log >&2; exit 1; }
cp transformer_engine_torch*.so ../site/
echo "built: PYTHONPATH=$top/site"

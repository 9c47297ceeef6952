"""The mixtape program and the files that it reads and writes, as the checks see them."""

import json
import os
import pathlib
import struct
import subprocess

import h5py
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = os.environ.get("MIXTAPE", str(ROOT / "mixtape"))


def run(*arguments):
    """Runs a verb; a failure shows what the program said."""
    command = [PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr}")
    return done.stdout


def write_batch(path, tokens, targets=None):
    with h5py.File(path, "w") as f:
        f["tokens"] = np.asarray(tokens, dtype=np.int64)
        if targets is not None:
            f["targets"] = np.asarray(targets, dtype=np.int64)


def read_tree(path):
    """Every dataset of an HDF5 file, by its path."""
    found = {}
    with h5py.File(path, "r") as f:
        f.visititems(lambda name, x: found.update({name: x[()]}) if isinstance(x, h5py.Dataset) else None)
    return found


def read_safetensors(directory):
    """{name: (dtype, shape, bytes)} over all shards of a directory."""
    found = {}
    for path in sorted(pathlib.Path(directory).glob("*.safetensors")):
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, last = (8 + length + x for x in entry["data_offsets"])
            assert name not in found, f"{name} is in two shards"
            found[name] = (entry["dtype"], tuple(entry["shape"]), raw[first:last])
    return found

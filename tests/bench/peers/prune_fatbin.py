#!/usr/bin/env python3
"""Blanks the GPU code of a shared library for every architecture but sm_90, so that it compresses to nothing.

Usage: prune_fatbin.py LIBRARY RESULT. Reads section .nv_fatbin: containers (magic, header size, size) of entries
(kind 2: machine code; architecture at byte 28).
"""

import struct
import subprocess
import sys

CONTAINER, MACHINE_CODE, SM = 0xBA55ED50, 2, 90


def section(path):
    for line in subprocess.check_output(["readelf", "-SW", path], text=True).splitlines():
        if " .nv_fatbin " in line:
            words = line.split("]", 1)[1].split()
            return int(words[3], 16), int(words[4], 16)
    raise SystemExit(f"{path}: no section .nv_fatbin")


def prune(data, at, size):
    end = at + size
    while at < end - 16:
        magic, _, head, length = struct.unpack_from("<IHHQ", data, at)
        if magic != CONTAINER:
            at += 8
            continue
        entry, stop = at + head, at + head + length
        while entry < stop:
            kind, _, header, bytes_ = struct.unpack_from("<HHIQ", data, entry)
            if kind != MACHINE_CODE or struct.unpack_from("<I", data, entry + 28)[0] != SM:
                data[entry + header : entry + header + bytes_] = bytes(bytes_)
            entry += header + bytes_
        at = stop


if len(sys.argv) != 3:
    raise SystemExit(__doc__)
content = bytearray(open(sys.argv[1], "rb").read())
prune(content, *section(sys.argv[1]))
open(sys.argv[2], "wb").write(content)

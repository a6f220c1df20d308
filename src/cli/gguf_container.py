"""Reads GGUF files, versions 2 and 3, little-endian:

  "GGUF"  version u32  number of tensors u64  number of metadata entries u64
  metadata: key (u64 length, bytes)  type u32  value
  tensors:  name  number of dimensions u32  dimensions u64, the innermost first  type u32  offset u64
  padding to general.alignment (32); offsets count from there

The package `gguf` knows the tensor types and dequantises. The header is read here: files are untrusted, and
the package's GGUFReader checks no count, length, overlap or repeated key."""

import json
import math
import mmap
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize


class Refused(Exception):
    """The file cannot be imported. The message says what, got, expected, remedy."""


def damaged(what):
    return Refused(f"{what}; the file is damaged or cut off: copy or download it again")


def quoted(text, limit=80):
    """At most `limit` characters of untrusted text, on one line."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "backslashreplace")
    names = {"\n": "\\n", "\t": "\\t"}
    shown = (names.get(c, f"\\x{ord(c):02x}") if c < " " or c == "\x7f" else c for c in text[:limit])
    return f"'{''.join(shown)}{'…' if len(text) > limit else ''}'"


def compact(value):
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


READABLE = {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"}
MAX_DIMENSIONS = 4  # ggml's own limit
MAX_DEPTH = 4  # no known file has arrays of arrays
MAX_ELEMENTS = 2**48  # more elements than any file contains
CHUNK = 2**18  # elements dequantised at once: 1 MiB, fits the cache; a multiple of every block size
# The numeric types of metadata values, with struct's format letter for each.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
BOOL, STRING, ARRAY, FLOAT64 = 7, 8, 9, 12
VALUE_TYPES = "a type from 0 (uint8) to 12 (float64)"

KINDS = {
    "a text": lambda value: isinstance(value, str),
    "one whole number, not negative": lambda value: type(value) is int and 0 <= value < 2**63,
    "a number": lambda value: type(value) in (int, float),
    "true or false": lambda value: isinstance(value, bool),
    "an array": lambda value: isinstance(value, list),
}
TEXT, WHOLE, NUMBER, FLAG, LIST = KINDS


class Tensor(NamedTuple):
    type: GGMLQuantizationType
    shape: tuple[int, ...]  # the outermost dimension first
    begin: int  # bytes [begin, end) of the file
    end: int


class Header:
    """Reads through the header. Lengths are checked against the file's size before memory is taken."""

    def __init__(self, data):
        self.data, self.size, self.position = data, len(data), 0

    def left(self):
        return self.size - self.position

    def take(self, count, what):
        if count > self.left():
            raise damaged(
                f"{what} at byte {self.position}: got a length of {count} bytes; expected at most "
                f"{self.left()}, the rest of this file of {self.size} bytes"
            )
        self.position += count
        return self.data[self.position - count : self.position]

    def number(self, letter, what):
        return struct.unpack("<" + letter, self.take(struct.calcsize("<" + letter), what))[0]

    def text(self, what):
        content = self.take(self.number("Q", what), what)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            bad = quoted(content[error.start : error.start + 16])
            raise damaged(f"{what}: got bytes that are not UTF-8 ({bad}); expected text") from None

    def count(self, what, bytes_each):
        """Reads a number of items, each of which takes at least `bytes_each` bytes."""
        value, most = self.number("Q", what), self.size // bytes_each
        if value > most:
            raise damaged(
                f"{what}: got {value}; expected at most {most}, which fit this file of {self.size} bytes"
            )
        return value

    def value(self, kind, what, depth=0):
        if kind in NUMBERS:
            return self.number(NUMBERS[kind], what)
        if kind == STRING:
            return self.text(what)
        if kind == BOOL:
            value = self.number("B", what)
            if value > 1:
                raise damaged(f"{what}: got the boolean {value}; expected 0 or 1")
            return value == 1
        if kind == ARRAY:
            return self.array(what, depth)
        raise damaged(f"{what}: got a value of type {kind}; expected {VALUE_TYPES}")

    def array(self, what, depth):
        if depth == MAX_DEPTH:
            raise damaged(f"{what}: got arrays nested deeper than {MAX_DEPTH}; expected a flat array")
        kind = self.number("I", what)
        if kind > FLOAT64:
            raise damaged(f"{what}: got an array of type {kind}; expected {VALUE_TYPES}")
        least = {STRING: 8, ARRAY: 12, BOOL: 1}.get(kind) or struct.calcsize("<" + NUMBERS[kind])
        count = self.count(f"{what}, its length", least)
        if count > self.left() // least:
            raise damaged(
                f"{what}: got an array of {count} elements; expected at most {self.left() // least}, "
                "which fit the rest of the file"
            )
        if kind in NUMBERS:
            return np.frombuffer(self.take(count * least, what), "<" + NUMBERS[kind]).tolist()
        return [self.value(kind, what, depth + 1) for _ in range(count)]


class GgufFile:
    """A little-endian GGUF file of version 2 or 3. The whole header is checked. Members: `metadata`, and
    `tensors` by name."""

    def __init__(self, path):
        self.path, self.metadata, self.tensors = Path(path), {}, {}
        with self.path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            self.read_header(Header(data))
        self.check_layout()

    def read_header(self, header):
        magic = header.data[:4]
        if magic != b"GGUF":
            raise Refused(
                f"got a file that begins with {quoted(magic)}; expected a GGUF file, which begins with 'GGUF'"
            )
        header.position = len(magic)
        version = header.number("I", "the version")
        if version != 0 and version & 0xFFFF == 0:
            raise Refused(
                "got a big-endian GGUF file; expected a little-endian one: convert or download it again"
            )
        if version not in (2, 3):
            raise Refused(
                f"got GGUF version {version}; expected 2 or 3: convert the model again with llama.cpp of "
                "September 2023 or later"
            )
        # A tensor's entry takes at least 24 bytes (no name, no dimension), a metadata entry 13.
        num_tensors = header.count("the number of tensors", 24)
        num_entries = header.count("the number of metadata entries", 13)
        for i in range(num_entries):
            key = header.text(f"key of metadata entry {i}")
            what = f"metadata {quoted(key)}"
            kind = header.number("I", what)
            if key in self.metadata:
                raise damaged(f"{what}: got this key twice; expected it once")
            self.metadata[key] = header.value(kind, what)
        self.read_tensors(header, [self.read_entry(header, i) for i in range(num_tensors)])

    def read_entry(self, header, i):
        """Returns a tensor's name, type, shape, number of bytes, and offset."""
        name = header.text(f"name of tensor {i}")
        what = f"tensor {quoted(name)}"
        dimensions = header.number("I", what)
        if dimensions > MAX_DIMENSIONS:
            raise damaged(f"{what}: got {dimensions} dimensions; expected at most {MAX_DIMENSIONS}")
        sizes = []
        for d in range(dimensions):
            sizes.append(header.number("Q", what))
            if sizes[d] > MAX_ELEMENTS or math.prod(sizes) > MAX_ELEMENTS:
                raise damaged(
                    f"{what}: got {sizes[d]} for dimension {d}; expected sizes that fit a file of "
                    f"{header.size} bytes"
                )
        number = header.number("I", what)
        kind = GGMLQuantizationType(number) if number in list(GGMLQuantizationType) else None
        type_name = kind.name if kind is not None else f"type {number}"
        if type_name not in READABLE:
            raise Refused(
                f"{what}: got a tensor of type {type_name}; expected F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K "
                "or Q6_K: use a file of the same model in one of these types (llama.cpp names such files "
                "Q8_0, Q4_0, Q4_1, BF16, F16 or F32; or Q4_K_M or Q6_K if the widths are multiples of 256)"
            )
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        row = sizes[0] if sizes else 1
        if row % block_elements != 0:
            raise damaged(
                f"{what}: got rows of {row} elements; expected a multiple of {block_elements}, the block of "
                f"{type_name}"
            )
        offset = header.number("Q", what)
        return name, kind, tuple(reversed(sizes)), math.prod(sizes) // block_elements * block_bytes, offset

    def read_tensors(self, header, entries):
        alignment = self.get("general.alignment", WHOLE, 32)
        if not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
            raise damaged(
                f"metadata 'general.alignment': got {alignment}; expected a power of two up to 2^20"
            )
        data_begin = (header.position + alignment - 1) // alignment * alignment
        available = max(header.size - data_begin, 0)
        for name, kind, shape, num_bytes, offset in entries:
            what = f"tensor {quoted(name)}"
            if offset % alignment != 0:
                raise damaged(f"{what}: got the offset {offset}; expected a multiple of {alignment}")
            if offset + num_bytes > available:
                raise damaged(
                    f"{what}: got {num_bytes} bytes at offset {offset}; expected them within the {available} "
                    "bytes of data in this file"
                )
            if name in self.tensors:
                raise damaged(f"{what}: got two tensors of this name; expected one")
            begin = data_begin + offset
            self.tensors[name] = Tensor(kind, shape, begin, begin + num_bytes)

    def check_layout(self):
        used = [(tensor, name) for name, tensor in self.tensors.items() if tensor.begin != tensor.end]
        used.sort(key=lambda entry: entry[0].begin)
        for (before, before_name), (tensor, name) in zip(used, used[1:]):  # noqa: B905
            if tensor.begin < before.end:
                raise damaged(
                    f"tensor {quoted(name)}: got bytes that begin at {tensor.begin}; expected at least "
                    f"{before.end}, where {quoted(before_name)} ends"
                )

    def get(self, key, kind, *default):
        """The value of a key. It must have the given kind (TEXT, ...) and, without a default, must exist."""
        if key not in self.metadata:
            if default:
                return default[0]
            raise Refused(
                f"got no metadata {quoted(key)}; expected it: convert the model again with a current "
                "llama.cpp (convert_hf_to_gguf.py)"
            )
        value = self.metadata[key]
        if not KINDS[kind](value):
            raise Refused(f"metadata {quoted(key)}: got {quoted(compact(value))}; expected {kind}")
        return value

    def chunks(self, name):
        """Yields a tensor's values in fp32, flat, at most CHUNK at a time."""
        tensor = self.tensors[name]
        block_elements, block_bytes = GGML_QUANT_SIZES[tensor.type]
        step = CHUNK // block_elements * block_bytes
        for begin in range(tensor.begin, tensor.end, step):
            count = min(step, tensor.end - begin)
            raw = np.fromfile(self.path, np.uint8, count, offset=begin)
            if raw.size != count:
                raise OSError(f"the file became shorter while {quoted(name)} was read")
            yield dequantize(raw.reshape(1, -1), tensor.type).reshape(-1)

#!/usr/bin/env python3
"""Writes a GGUF file of a published shape with random weights, for speed alone.

    bench/peers/gguf_random.py qwen2.5-1.5b Q4_K_M --tokenizer MODEL.gguf models/1.5b-q4_k_m.gguf

The types of the tensors are those that llama.cpp's quantizer takes for that name: Q6_K for the
output and in Q4_K_M for some of attn_v and ffn_down; a type of 32 columns a block where the columns
are no multiple of 256. Blocks are random bits under scales that keep activations finite. The
tokenizer is that of another GGUF file, padded with unused tokens to the shape's vocabulary. Equal
arguments give equal bytes. Needs only Python's standard library.
"""
import argparse
import os
import random
import struct
import sys

# hidden, intermediate, layers, heads, KV heads, head size, vocabulary, context
SHAPES = {
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 64, 151936, 32768),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, 128, 151936, 32768),
    "tiny": (256, 512, 4, 4, 2, 64, 0, 2048),  # to try things out; the tokenizer's own vocabulary
}

# GGML's number, weights a block, bytes a block, {offset in the block: fp16 scale}
F32, BF16 = (0, 1, 4, {}), (30, 1, 2, {})
BLOCKS = {
    "Q4_0": (2, 32, 18, {0: 4e-3}),
    "Q4_1": (3, 32, 20, {0: 4e-3, 2: -3e-2}),
    "Q5_0": (6, 32, 22, {0: 2e-3}),
    "Q5_1": (7, 32, 24, {0: 2e-3, 2: -3e-2}),
    "Q8_0": (8, 32, 34, {0: 3e-4}),
    "Q4_K": (12, 256, 144, {0: 1e-4, 2: 8e-4}),
    "Q6_K": (14, 256, 210, {208: 1e-5}),
    "BF16": BF16,
}
SMALLER = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}  # where the columns are no multiple of 256
FILE_TYPES = {"BF16": 32, "Q8_0": 7, "Q4_0": 2, "Q4_1": 3, "Q4_K_M": 15}

UINT32, FLOAT32, STRING, ARRAY = 4, 6, 8, 9
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
UNUSED = 5  # kind of token


# ---- metadata ----------------------------------------------------------------------------------

class Reader:
    """Metadata of a GGUF file: values as they stand there, arrays as lists of such."""

    def __init__(self, path):
        with open(path, "rb") as f:
            self.data, self.at = f.read(64 << 20), 4
        if self.data[:4] != b"GGUF":
            sys.exit(f"{path}: no GGUF file")
        _, _, n = self.number("I"), self.number("Q"), self.number("Q")
        self.values = {}
        for _ in range(n):
            key, kind = self.string().decode(), self.number("I")
            self.values[key] = (kind, self.value(kind))

    def take(self, n):
        self.at += n
        return self.data[self.at - n:self.at]

    def number(self, form):
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def string(self):
        return self.take(self.number("Q"))

    def value(self, kind):
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            of, n = self.number("I"), self.number("Q")
            return of, [self.value(of) for _ in range(n)]
        return self.take(SIZES[kind])


def string(text):
    return struct.pack("<Q", len(text)) + text


def encode(kind, value):
    if kind == STRING:
        return string(value)
    if kind == ARRAY:
        of, items = value
        return struct.pack("<IQ", of, len(items)) + b"".join(encode(of, i) for i in items)
    return value


def tokenizer(path, vocabulary):
    """The tokenizer's metadata with so many tokens (0: as many as it has), and how many."""
    values = {k: v for k, v in Reader(path).values.items() if k.startswith("tokenizer.")}
    of, tokens = values["tokenizer.ggml.tokens"][1]
    n = vocabulary or len(tokens)
    if len(tokens) > n:
        sys.exit(f"{path} has {len(tokens)} tokens and the shape {n}: take a smaller tokenizer")
    padding = {"tokens": [b"[PAD%d]" % i for i in range(len(tokens), n)],
               "token_type": [struct.pack("<i", UNUSED)] * (n - len(tokens)),
               "scores": [struct.pack("<f", -1e4)] * (n - len(tokens))}
    for name, more in padding.items():
        key = "tokenizer.ggml." + name
        if key in values:
            of, items = values[key][1]
            values[key] = (ARRAY, (of, items + more))
    return values, n


def metadata(shape, kind, name, values):
    hidden, intermediate, layers, heads, kv_heads, _, _, context = SHAPES[shape]
    numbers = {"block_count": layers, "context_length": context, "embedding_length": hidden,
               "feed_forward_length": intermediate, "attention.head_count": heads,
               "attention.head_count_kv": kv_heads}
    out = {"general.architecture": (STRING, b"qwen2"), "general.name": (STRING, name.encode()),
           "general.file_type": (UINT32, struct.pack("<I", FILE_TYPES[kind]))}
    out |= {"qwen2." + k: (UINT32, struct.pack("<I", v)) for k, v in numbers.items()}
    out["qwen2.rope.freq_base"] = (FLOAT32, struct.pack("<f", 1e6))
    out["qwen2.attention.layer_norm_rms_epsilon"] = (FLOAT32, struct.pack("<f", 1e-6))
    return out | values


# ---- tensors -----------------------------------------------------------------------------------

def type_of(kind, name, layer, layers, columns):
    """What the quantizer makes of a matrix."""
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    chosen = "Q4_K" if kind == "Q4_K_M" else kind
    if name == "token_embd" and kind not in ("BF16", "Q8_0"):  # the output too: they are tied
        chosen = "Q6_K"
    if kind == "Q4_K_M" and name in ("attn_v", "ffn_down") and more:
        chosen = "Q6_K"
    return BLOCKS[SMALLER[chosen] if chosen in SMALLER and columns % 256 else chosen]


def tensors(shape, kind, vocabulary):
    """(name, [columns, rows] or [n], type), in the order of the file."""
    hidden, intermediate, layers, heads, kv_heads, head, _, _ = SHAPES[shape]
    q, kv = heads * head, kv_heads * head
    out = [("output_norm.weight", [hidden], F32),
           ("token_embd.weight", [hidden, vocabulary],
            type_of(kind, "token_embd", 0, layers, hidden))]
    for i in range(layers):
        for name, columns, rows in (
                ("attn_q", hidden, q), ("attn_k", hidden, kv), ("attn_v", hidden, kv),
                ("attn_output", q, hidden), ("ffn_gate", hidden, intermediate),
                ("ffn_up", hidden, intermediate), ("ffn_down", intermediate, hidden)):
            out.append((f"blk.{i}.{name}.weight", [columns, rows],
                        type_of(kind, name, i, layers, columns)))
            if name in ("attn_q", "attn_k", "attn_v"):
                out.append((f"blk.{i}.{name}.bias", [rows], F32))
        out += [(f"blk.{i}.{name}.weight", [hidden], F32) for name in ("attn_norm", "ffn_norm")]
    return out


def n_bytes(dims, kind):
    n = dims[0] * (dims[1] if len(dims) > 1 else 1)
    return n // kind[1] * kind[2]


# The upper byte of a bf16 of either sign between 2^-9 and 2^-5.
SMALL = bytes((b & 0x80) | 59 + (b & 1) for b in range(256))


def vector(name, n, source):
    """fp32: norms about 1, biases small."""
    base = 1.0 if "norm" in name else 0.0
    return struct.pack(f"<{n}f", *(base + source.uniform(-0.05, 0.05) for _ in range(n)))


def matrix(n, kind, source):
    """n bytes, a piece at a time."""
    _, _, block, scales = kind
    piece = block * (1 << 17)
    for at in range(0, n, piece):
        data = bytearray(source.randbytes(min(piece, n - at)))
        if kind is BF16:
            data[1::2] = data[1::2].translate(SMALL)
        for offset, scale in scales.items():
            low, high = struct.pack("<e", scale)
            count = len(data) // block
            data[offset::block] = bytes([low]) * count
            data[offset + 1::block] = bytes([high]) * count
        yield data


def aligned(n):
    return (n + 31) // 32 * 32


def write(path, shape, kind, tokenizer_path, seed):
    values, vocabulary = tokenizer(tokenizer_path, SHAPES[shape][6])
    values = metadata(shape, kind, f"{shape} {kind}, random", values)
    listed, at = tensors(shape, kind, vocabulary), 0
    head = b"GGUF" + struct.pack("<IQQ", 3, len(listed), len(values))
    for key, (form, value) in values.items():
        head += string(key.encode()) + struct.pack("<I", form) + encode(form, value)
    for name, dims, of in listed:
        head += string(name.encode()) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, of[0], at)
        at += aligned(n_bytes(dims, of))
    source, part = random.Random(seed), path + ".part"
    with open(part, "wb") as f:
        f.write(head.ljust(aligned(len(head)), b"\0"))
        for name, dims, of in listed:
            n = n_bytes(dims, of)
            if of is F32:
                f.write(vector(name, dims[0], source))
            else:
                for piece in matrix(n, of, source):
                    f.write(piece)
            f.write(bytes(aligned(n) - n))
    os.replace(part, path)


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("shape", choices=SHAPES)
    p.add_argument("type", choices=FILE_TYPES)
    p.add_argument("out")
    p.add_argument("--tokenizer", required=True, help="a GGUF file")
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    write(a.out, a.shape, a.type, a.tokenizer, a.seed)
    print(f"{a.out}: {os.path.getsize(a.out) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()

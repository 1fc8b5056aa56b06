"""Writes tests/data/tokenizers/cases.json and spm.json: texts and the ids that Hugging Face's
tokenizers gives for them. Needs `pip install tokenizers==0.23.3`; never needed by the tests."""
import copy
import json
import os
import random
import unicodedata

from tokenizers import Tokenizer

ROOT = os.path.join(os.path.dirname(__file__), "..", "tests", "data", "tokenizers")
random.seed(20)
EVERY = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
MARKS = [c for c in EVERY if unicodedata.combining(c)]
BLANKS = [" ", "  ", "\n", "\r\n", "\t", "\u3000", "\u00a0", "\u2003", "\x85", "\u180e", "\u200b"]


def random_text(words):
    pick = lambda items: random.choice(items)
    kinds = [
        lambda: pick(words),
        lambda: pick(words),
        lambda: pick(BLANKS) * random.choice([1, 1, 2, 4]),
        lambda: pick("abXY019.,!?-'"),
        lambda: pick(["'s", "'LL", "'\u017f", "don't"]),
        lambda: pick(EVERY),
        lambda: pick(MARKS),
        lambda: chr(random.randrange(0x1100, 0x1200)),
        lambda: chr(random.randrange(0xAC00, 0xD7A4)),
        lambda: chr(random.randrange(0x300, 0x500)),
    ]
    return "".join(pick(kinds)() for _ in range(random.randint(1, 10)))


def spm():
    """A small SentencePiece-style tokenizer: characters, byte tokens and merges."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab["<0x%02X>" % byte] = len(vocab)
    merges = []
    for char in "\u2581abcdehilnorstw.,'é日":
        vocab[char] = len(vocab)
    for pair in ("\u2581 t", "h e", "\u2581t he", "\u2581 a", "i n", "\u2581 \u2581", "e r", "o r",
                 "\u2581 w", "\u2581w or", "l d", "\u2581wor ld", "l o", "lo w", "\u2581\u2581 \u2581\u2581"):
        left, right = pair.split(" ")
        merges.append([left, right])
        vocab[left + right] = len(vocab)
    added = [{"id": i, "content": c, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True} for i, c in enumerate(["<unk>", "<s>", "</s>"])]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u2581"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True,
                  "ignore_merges": False, "vocab": vocab, "merges": merges}}


def pairs(**parts):
    """A tokenizer of single characters and pairs, in which every cut shows."""
    alphabet = "ab01 -\u2581éE"
    vocab = {c: i for i, c in enumerate(["?"] + list(alphabet))}
    merges = []
    for x in alphabet:
        for y in alphabet:
            vocab[x + y] = len(vocab)
            merges.append([x, y])
    base = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": None, "post_processor": None, "decoder": {"type": "Fuse"},
            "model": {"type": "BPE", "dropout": None, "unk_token": "?", "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                      "ignore_merges": False, "vocab": vocab, "merges": merges}}
    model = parts.pop("model", {})
    base.update(parts)
    base["model"].update(model)
    return base


def added(content, number, **flags):
    entry = {"id": 91 + number, "content": content, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False, "special": False}
    entry.update(flags)
    return entry


def feature_tokenizers():
    split = lambda pattern, behavior, invert=False: {
        "type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}
    for behavior in ("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"):
        yield pairs(pre_tokenizer=split({"String": "-"}, behavior))
        yield pairs(pre_tokenizer=split({"Regex": "[0-9]| (?=a)"}, behavior, True))
        yield pairs(pre_tokenizer=split({"Regex": "\\p{N}{1,2}+|\\w|\\s{2}$|x*"}, behavior))
    for individual in (True, False):
        yield pairs(pre_tokenizer={"type": "Digits", "individual_digits": individual})
    for scheme in ("always", "first", "never"):
        for cut in (True, False):
            yield pairs(pre_tokenizer={"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme,
                                       "split": cut}, added_tokens=[added("<x>", 0)])
    for kind in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase"):
        yield pairs(normalizer={"type": kind})
    for left in (True, False):
        yield pairs(normalizer={"type": "Sequence", "normalizers": [
            {"type": "Strip", "strip_left": left, "strip_right": not left},
            {"type": "Replace", "pattern": {"Regex": "[ab]+"}, "content": "E"},
            {"type": "Prepend", "prepend": "-"}]})
    yield pairs(model={"fuse_unk": True})
    yield pairs(model={"ignore_merges": True})
    yield pairs(added_tokens=[
        added("<x>", 0, lstrip=True), added("<y>", 1, rstrip=True), added("<z>", 2, lstrip=True, rstrip=True),
        added("ab1", 3, single_word=True), added("<long", 4), added("<longer>", 5),
        added("<s>", 6, special=True), added("é-b", 7, normalized=True), added("E01", 8, normalized=True, special=True),
    ], normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]})


def main():
    with open(os.path.join(ROOT, "spm.json"), "w", encoding="utf-8") as f:
        json.dump(spm(), f, ensure_ascii=False)
    groups = []
    for name in ("qwen", "llama", "smol", "spm"):
        hf = Tokenizer.from_file(os.path.join(ROOT, name + ".json"))
        words = ["the ferry", "queue", " world", "low er", "<|im_end|>", "<|im_start|>", "</s>", "\u2581the"]
        texts = [random_text(words) for _ in range(150)]
        groups.append((name, None, hf, texts))
    features = ["ab", "éE", "0", "1 ", "--", " a", "\u2581", "<x>", "<y>", "<z>", "<long", "<longer>", "<s>",
                "E\u0301", "e\u0301-b", "É-b", "E01", "ab1", "²", "x", "  ", "\u0130", "ab"]
    for tokenizer in feature_tokenizers():
        hf = Tokenizer.from_str(json.dumps(tokenizer))
        texts = ["".join(random.choice(features) for _ in range(random.randint(0, 9))) for _ in range(20)]
        small = copy.deepcopy(tokenizer)
        if not small["model"]["ignore_merges"] and not small["model"]["fuse_unk"]:
            del small["model"]  # the first one's: shared by all
        groups.append((None, small, hf, texts))
    out = []
    for name, tokenizer, hf, texts in groups:
        cases = []
        for text in texts:
            hf.encode_special_tokens = False
            ids = hf.encode(text, add_special_tokens=False).ids
            hf.encode_special_tokens = True
            plain = hf.encode(text, add_special_tokens=False).ids
            case = {"text": text, "ids": ids}
            if plain != ids:
                case["ids_plain"] = plain
            if name:
                case["decoded"] = hf.decode(ids, skip_special_tokens=False)
            cases.append(case)
        out.append({"file": name, "tokenizer": tokenizer, "cases": cases})
    singles = {name: [hf.decode([id], skip_special_tokens=False) for id in range(hf.get_vocab_size())]
               for name, _, hf, _ in groups[:4]}
    shared = json.loads(json.dumps(pairs()["model"]))
    with open(os.path.join(ROOT, "cases.json"), "w", encoding="utf-8") as f:
        json.dump({"model": shared, "groups": out, "singles": singles}, f, separators=(",", ":"))


main()

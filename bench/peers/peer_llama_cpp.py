#!/usr/bin/env python3
"""Speed of llama.cpp: its own llama-batched-bench, on a GGUF file of the shape in BF16."""
import json
import shutil
import subprocess
import sys

from shape import arguments, plan


def main():
    p = arguments(__doc__)
    p.add_argument("--gguf", required=True)
    p.add_argument("--program", default="llama-batched-bench")
    a = p.parse_args()
    if not shutil.which(a.program):
        print(json.dumps(dict(engine="llama.cpp", error=f"not installed: {a.program}")))
        sys.exit(3)
    wanted = plan(a)
    for prompt in sorted({n for _, _, n in wanted}):
        batches = sorted({b for _, b, n in wanted if n == prompt})
        context = max(batches) * (prompt + a.generated)
        command = [a.program, "-m", a.gguf, "-ngl", "99", "-fa", "on", "-c", str(context),
                   "-b", "2048", "-ub", "2048", "-npp", str(prompt), "-ntg", str(a.generated),
                   "-npl", ",".join(map(str, batches)), "--output-format", "jsonl"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=a.limit)
        if run.returncode != 0:
            print(json.dumps(dict(engine="llama.cpp", prompt=prompt, error=run.stderr[-300:])))
            continue
        for line in run.stdout.splitlines():
            if not line.startswith("{"):
                continue
            r = json.loads(line)
            if ("prefill", r["pl"], prompt) in wanted:
                print(json.dumps(dict(engine="llama.cpp", what="prefill", batch=r["pl"],
                                      prompt=prompt, tok_s=r["speed_pp"],
                                      ms_step=1e3 * r["t_pp"])), flush=True)
            if ("decode", r["pl"], prompt) in wanted:
                print(json.dumps(dict(engine="llama.cpp", what="decode", batch=r["pl"],
                                      prompt=prompt, tok_s=r["speed_tg"],
                                      ms_step=1e3 * r["t_tg"] / r["tg"])), flush=True)


if __name__ == "__main__":
    main()

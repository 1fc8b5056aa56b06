#!/usr/bin/env python3
"""What contrib/ says of the program, against the program.

usage: contrib.py URL PROGRAM    (a server that is ready, and what it runs)

The dashboard asks only for metrics and labels that GET /metrics has. The Dockerfile's second stage
installs the packages whose libraries the program needs, and no other; its first one builds as the
README does; its health check is content with a server that is ready and with nothing else.
"""
import json
import pathlib
import re
import subprocess
import sys
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]


def exported(url):
    """The labels of each metric, by the name of its samples."""
    urllib.request.urlopen(url + "/health").read()  # so that there is a status to count
    text = urllib.request.urlopen(url + "/metrics").read().decode()
    labels = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, inside = re.match(r"([\w:]+)(?:\{(.*)\})? ", line).groups()
            labels.setdefault(name, set()).update(re.findall(r'(\w+)="', inside or ""))
    return labels


def check_dashboard(url):
    dashboard = json.loads((ROOT / "contrib/grafana.json").read_text())
    known = exported(url)
    asked = set()
    ids = [p["id"] for p in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            expr = target["expr"]
            assert expr.count("(") == expr.count(")") and expr.count("{") == expr.count("}"), expr
            for name, inside in re.findall(r"((?:linnet:|process_)\w+)(?:\{([^}]*)\})?", expr):
                assert name in known, f"{panel['title']}: /metrics has no {name}"
                wanted = set(re.findall(r"(\w+)=", inside)) - {"job", "instance"}  # Prometheus' own
                assert wanted <= known[name], f"{panel['title']}: {name} has no label {wanted - known[name]}"
                asked.add(name)
            for label in re.findall(r"\b(?:by|without) \((\w+)\)", expr):
                assert any(label in known[n] for n in asked), label
    for variable in dashboard["templating"]["list"]:
        for name in re.findall(r"label_values\(([\w:]+),", variable["query"]):
            assert name in known, name
    print(f"the dashboard asks for {len(asked)} metrics, all of them there")


def instructions():
    text = (ROOT / "contrib/Dockerfile").read_text().replace("\\\n", "")
    return [line.split(None, 1) for line in text.splitlines() if line.strip() and not line.startswith("#")]


def needed_packages(program):
    dynamic = subprocess.check_output(["readelf", "-d", program], text=True)
    names = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    found = subprocess.check_output(["dpkg", "-S"] + ["*/" + n for n in names], text=True)
    return {p for p in (line.split(":")[0] for line in found.splitlines()) if not p.startswith("libc6")}


def check_image(url, program):
    steps = instructions()
    stages = [i for i, step in enumerate(steps) if step[0] == "FROM"]
    assert len(stages) == 2 and all(steps[i][1].startswith("debian:12-slim") for i in stages)
    runs = [value for name, value in steps[:stages[1]] if name == "RUN"]
    readme = (ROOT / "README.md").read_text()
    for command in ("script/bootstrap", "script/build"):
        assert any(run.split()[0] == command for run in runs) and command in readme, command
    for name, value in steps:
        if name == "COPY" and not value.startswith("--from"):
            for source in value.split()[:-1]:
                assert (ROOT / source).exists(), source
    last = dict(steps[stages[1]:])
    installed = set(re.search(r"--no-install-recommends(.*?)&&", last["RUN"]).group(1).split())
    assert installed == needed_packages(program), installed ^ needed_packages(program)
    assert last["USER"] not in ("0", "root") and last["EXPOSE"] == "8000"
    check = json.loads(last["HEALTHCHECK"].split("CMD ", 1)[1])
    port = url.rsplit(":", 1)[1]
    check[2] = check[2].replace("127.0.0.1/8000", "127.0.0.1/" + port)
    assert subprocess.run(check, timeout=60).returncode == 0
    check[2] = check[2].replace("/health", "/nothing")
    assert subprocess.run(check, timeout=60).returncode != 0
    check[2] = check[2].replace("127.0.0.1/" + port, "127.0.0.1/1")
    assert subprocess.run(check, timeout=60, stderr=subprocess.DEVNULL).returncode != 0
    command = json.loads(last["ENTRYPOINT"])
    usage = subprocess.check_output([program] + command[1:2] + ["--help"], text=True)
    for option in (command + json.loads(last["CMD"])):
        assert not option.startswith("--") or option in usage, option
    print("the Dockerfile is what the program needs")


if __name__ == "__main__":
    check_dashboard(sys.argv[1])
    check_image(*sys.argv[1:3])

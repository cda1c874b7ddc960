#!/usr/bin/python3
"""readme.py SOURCE COMMAND...: the program in README.md is examples/tune.c, which the tests compile; files it names exist;
the lines of examples/two_heads.c that the pages show are among those that COMMAND, which runs it, prints."""
import os
import re
import subprocess
import sys

root = sys.argv[1]
with open(os.path.join(root, "README.md"), encoding="utf-8") as f:
    readme = f.read()
with open(os.path.join(root, "examples/tune.c"), encoding="utf-8") as f:
    program = f.read()
program = program[program.index("#include"):]
indented = "".join("    " + line if line.strip() else line for line in program.splitlines(True))
wrong = [] if indented in readme else ["the program in README.md is not examples/tune.c"]
for name in re.findall(r"`((?:docs|examples|scripts|bench|tests)/[^`*]*|[A-Z]+\.md)`", readme):
    if not os.path.exists(os.path.join(root, name)):
        wrong.append(f"README.md names {name}, which does not exist")
run = subprocess.run(sys.argv[2:], capture_output=True, text=True, timeout=60)
output = (run.stdout + run.stderr).splitlines()
for page in ("README.md", "docs/unused-parameters.md"):
    with open(os.path.join(root, page), encoding="utf-8") as f:
        shown = re.findall(r"^    (\[1\] .*|ddp `TwoHeads`: .*)", f.read(), re.M)
    if not shown:
        wrong.append(f"{page} shows no output of two_heads any more")
    for line in shown:
        if not any(o.endswith(line) for o in output):
            wrong.append(f"{page} shows a line that two_heads does not print: {line}")
print("\n".join(wrong) or "README.md: ok")
sys.exit(1 if wrong else 0)

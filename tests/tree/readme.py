#!/usr/bin/python3
"""readme.py SOURCE: the program in README.md is examples/tune.c, which the tests compile; files it names exist."""
import os
import re
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
print("\n".join(wrong) or "README.md: ok")
sys.exit(1 if wrong else 0)

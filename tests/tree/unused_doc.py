#!/usr/bin/python3
"""unused_doc.py SOURCE: the Python of docs/unused-parameters.md runs and prints what the page says it prints, and what
the page names exists."""
import os
import re
import subprocess
import sys

root = sys.argv[1]
with open(os.path.join(root, "docs/unused-parameters.md"), encoding="utf-8") as f:
    page = f.read()
wrong = []
for name in re.findall(r"`((?:docs|examples)/[^`]*)`", page):
    if not os.path.exists(os.path.join(root, name)):
        wrong.append(f"the page names {name}, which does not exist")
headers = ""
for name in os.listdir(os.path.join(root, "include/muster")):
    with open(os.path.join(root, "include/muster", name), encoding="utf-8") as f:
        headers += f.read()
for name in sorted(set(re.findall(r"\b(?:mu_|MU_)[A-Za-z0-9_]+", page))):
    if not re.search(rf"\b{name}\b", headers):
        wrong.append(f"the page names {name}, which no public header has")
programs = re.findall(r"```python\n(.*?)```(.*?)\nTwo traps", page, re.S)
if not programs:
    wrong.append("there is no Python program on the page any more")
for program, printed in programs:
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    if run.returncode != 0 or run.stdout.strip() != printed.strip():
        wrong.append(f"the Python program printed {run.stdout!r} {run.stderr[-300:]!r}, the page says {printed.strip()!r}")
print("\n".join(wrong) or "docs/unused-parameters.md: ok")
sys.exit(1 if wrong else 0)

#!/usr/bin/env python3
"""Checks the house rules that a compiler does not: which folder may include which (DEVELOPERS.md, "Structure"),
unique base names, lengths of files and functions, and a few forbidden calls. Prints each breach; exit 1 if any.

    check_floors.py [ROOT]           the tree (default: where this script is)
    check_floors.py --self-test      proves on a made-up tree that each rule can fail
"""
import os
import re
import subprocess
import sys
import tempfile

FLOOR = {"base": 0, "dev": 1, "kern": 2, "tensor": 3, "comm": 3, "tape": 4, "nn": 5, "optim": 5, "data": 5, "ddp": 6,
         "io": 6}
# Which folder a public header speaks for. base.h and tensor.h hold the words everybody needs (status, shape, dtype):
# any floor may include them.
PUBLIC = {"group": "comm", "tape": "tape", "ops": "tape", "module": "nn", "layers": "nn", "data_parallel": "nn", "optim": "optim",
          "data": "data", "ddp": "ddp", "hooks": "ddp", "reducer": "ddp", "checkpoint": "io", "profile": "base",
          "trace": "comm"}
WORDS = {"base", "tensor"}
# Foreign headers and the folders that may know them.
FOREIGN = {"dnnl": {"kern"}, "oneapi": {"kern"}, "turbojpeg.h": {"data"}, "spng.h": {"data"}, "png.h": {"data"},
           "zlib.h": {"data", "io"}, "jansson.h": {"io"}, "libdeflate.h": {"io"}, "mpi.h": {"comm"}}
TOP = {"cli", "examples", "bench"}
MAX_FILE, MAX_FUNCTION, MAX_KERNEL = 1000, 80, 150
FORBIDDEN = re.compile(r"(?<![>.\w])(exit|abort|assert|printf|puts|alloca|rand|srand)\s*\(")
ALLOCATION = re.compile(r"(?<![>.\w])(malloc|calloc|realloc|free|strdup)\s*\(")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def sources(root):
    try:
        out = subprocess.run(["git", "-C", root, "ls-files", "-co", "--exclude-standard"], check=True,
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout.decode().split("\n")
    except (OSError, subprocess.CalledProcessError):  # an unpacked release has no git
        out = [os.path.relpath(os.path.join(d, f), root) for d, _, fs in os.walk(root) for f in fs]
        out = [f for f in out if not f.startswith("build")]
    return sorted(f for f in out if f.endswith((".c", ".h")) and os.path.exists(os.path.join(root, f)))


def code_only(text):
    """The text without comments and string contents, lines kept."""
    def blank(m):
        s = m.group(0)
        return ('""' if s[0] == '"' else "' '" if s[0] == "'" else " ") + "\n" * s.count("\n")
    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', blank, text, flags=re.S)


def check_include(path, line, quote, name):
    parts = path.split("/")
    where = f"{path}:{line}: "
    inner = name.split("/")
    if parts[0] in TOP:
        if inner[0] == "muster" and quote == "<":
            return None
        if quote == "<":  # the system's, not another copy of ours
            return where + f"{parts[0]}/ reaches a private header <{name}>" if inner[0] in FLOOR else None
        if len(inner) == 1:  # its own folder
            return None
        return where + f'{parts[0]}/ may include only <muster/*.h> and its own files, not "{name}"'
    if parts[0] == "include":
        if quote == '"':
            return where + "public headers include only <...>"
        if inner[0] != "muster":
            return None if name.startswith("std") else where + f"<{name}> in a public header"
        own, other = os.path.splitext(parts[-1])[0], os.path.splitext(inner[1])[0]
        if own == "muster" or other in WORDS:
            return None
        if own in WORDS or FLOOR[PUBLIC[other]] > FLOOR[PUBLIC[own]]:
            return where + f"<{name}> is of a higher floor"
        return None
    if parts[0] != "src":
        return None
    folder = parts[1]
    floor = FLOOR[folder]
    if quote == "<" and inner[0] != "muster":
        for foreign, allowed in FOREIGN.items():
            if name.startswith(foreign) and folder not in allowed:
                return where + f"<{name}> belongs to {'/, '.join(sorted(allowed))}/ only"
        return None
    if inner[0] == "muster":
        other = os.path.splitext(inner[1])[0]
        if other in WORDS:
            return None
        if other == "muster" or other not in PUBLIC:
            return where + f"<{name}>: include the header that is meant"
        target = PUBLIC[other]
    elif len(inner) == 1:
        return where + f'"{name}": give the folder, "{folder}/{name}"'
    else:
        target = inner[0]
        if target not in FLOOR:
            return where + f'"{name}" is in no known folder'
    if target == folder or FLOOR[target] < floor:
        return None
    how = "a sibling" if FLOOR[target] == floor else "a higher floor"
    return where + f"{folder}/ (floor {floor}) includes {name} of {target}/ (floor {FLOOR[target]}), {how}"


def check_lengths(path, text):
    found = []
    lines = text.split("\n")
    if len(lines) - 1 > MAX_FILE:
        found.append(f"{path}: {len(lines) - 1} lines, the limit is {MAX_FILE}")
    limit = MAX_KERNEL if path.startswith("src/kern/") else MAX_FUNCTION
    start = None
    for n, line in enumerate(lines, 1):
        if line.startswith("{"):
            start = n
        elif line.startswith("}") and start is not None:
            if n - start - 1 > limit:
                found.append(f"{path}:{start}: a function of {n - start - 1} lines, the limit is {limit}")
            start = None
    return found


def check(root):
    found, names = [], {}
    for path in sources(root):
        with open(os.path.join(root, path), encoding="utf-8") as f:
            text = f.read()
        found += check_lengths(path, text)
        if not path.startswith("include/"):  # those are always named with muster/ before
            base = os.path.basename(path)
            if base in names:
                found.append(f"{path}: {names[base]} has the same base name")
            names[base] = path
        for n, line in enumerate(text.split("\n"), 1):
            m = INCLUDE.match(line)
            if m:
                breach = check_include(path, n, m.group(1), m.group(2))
                if breach:
                    found.append(breach)
        if path.startswith("src/") and path.endswith(".c"):
            for n, line in enumerate(code_only(text).split("\n"), 1):
                m = FORBIDDEN.search(line)
                if m and not (m.group(1) == "exit" and path == "src/base/context.c"):  # mu_die, public and optional
                    found.append(f"{path}:{n}: {m.group(1)}() in the library")
                m = ALLOCATION.search(line)
                # mpi_smpi.c is a plug-in of the simulation, with nothing of the library in it.
                if m and not path.startswith("src/base/") and path != "src/comm/mpi_smpi.c":
                    found.append(f"{path}:{n}: {m.group(1)}() outside base/alloc")
                if "getenv" in line and path not in ("src/base/context.c",) and not path.startswith("src/comm/"):
                    found.append(f"{path}:{n}: getenv outside context_open and group bootstrap")
    return found


BAD = {  # path: (content, what must be said about it)
    "src/tape/a.c": ('#include "nn/x.h"\n', "a higher floor"),
    "src/tensor/b.c": ('#include "comm/x.h"\n', "a sibling"),
    "src/kern/c.c": ("#include <muster/tape.h>\n", "a higher floor"),
    "src/nn/d.c": ("#include <muster/optim.h>\n", "a sibling"),
    "src/nn/e.c": ("#include <dnnl.h>\n", "only"),
    "src/nn/f.c": ("#include <muster/muster.h>\n", "the header that is meant"),
    "cli/g.c": ('#include "../src/nn/x.h"\n', "may include only"),
    "examples/h.c": ("#include <nn/x.h>\n", "private header"),
    "include/muster/tape.h": ("#include <muster/ddp.h>\n", "higher floor"),
    "include/muster/group.h": ("#include <pthread.h>\n", "public header"),
    "src/base/same.c": ("", None),
    "src/dev/same.c": ("", "same base name"),
    "src/io/long.c": ("\n" * 1001, "1001 lines"),
    "src/io/func.c": ("void f(void)\n{\n" + "    ;\n" * 81 + "}\n", "a function of 81 lines"),
    "src/io/out.c": ('void f(void)\n{\n    printf("x");\n}\n', "printf() in the library"),
    "src/io/heap.c": ("void f(void *p)\n{\n    free(p);\n}\n", "free() outside"),
    "src/io/env.c": ('void f(void)\n{\n    getenv("X");\n}\n', "getenv outside"),
}
GOOD = {
    "src/ddp/ok.c": '#include "comm/group2.h"\n#include <muster/module.h>\n/* printf(x), free(p) */ // exit(1)\n'
                    "void f(void)\n{\n    g->ops->free(g, p);\n}\n",
    "src/kern/ok2.c": "#include <dnnl.h>\n#include <muster/tensor.h>\n",
    "cli/ok3.c": '#include <muster/muster.h>\n#include "own.h"\n#include <stdio.h>\n',
}


def self_test():
    with tempfile.TemporaryDirectory() as root:
        for path, text in list(GOOD.items()) + [(p, t) for p, (t, _) in BAD.items()]:
            os.makedirs(os.path.dirname(os.path.join(root, path)), exist_ok=True)
            with open(os.path.join(root, path), "w", encoding="utf-8") as f:
                f.write(text)
        found = check(root)
    wrong = [f"not found: {p}: {s}" for p, (_, s) in BAD.items()
             if s and not any(x.startswith(p) and s in x for x in found)]
    wrong += [f"false: {x}" for x in found if x.split(":")[0] in GOOD]
    print("\n".join(wrong + found))
    return 1 if wrong else 0


def main():
    if "--self-test" in sys.argv[1:]:
        return self_test()
    root = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
    found = check(os.path.abspath(root))
    print("\n".join(found))
    print(f"{len(sources(root))} files, {len(found)} breaches")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

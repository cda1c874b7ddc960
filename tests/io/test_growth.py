"""Reading n bytes takes time and memory in proportion to n, whatever the bytes say. Each family of hostile inputs is made
in three sizes, 1, 4 and 16; the processor time of the largest stays within 3 times what proportion asks for, and its
memory within FACTOR times the bytes of the file and its inflated pickle. No file is loaded by Python."""
import os
import struct
import subprocess
import sys

from hostile_files import Member, Pickle, legacy, torch_members, torch_zip, zip_bytes
from io_lib import check, finish, own_folder, MUSTER

os.chdir(own_folder())
DATA = struct.pack("<4f", 1, 2, 3, 4)
# Bytes of memory for each byte of file and pickle; docs/checkpoints.md says so too.
FACTOR = 512
FLOOR_SECONDS = 0.05


def put(i):
    return b"r" + struct.pack("<I", i)


def get(i):
    return b"j" + struct.pack("<I", i)


def text(s):
    return b"X" + struct.pack("<I", len(s)) + s


def shared_tensor(memo=0):
    """Puts the constructor into memo, its arguments into memo + 1; TENSOR is then 7 bytes a tensor."""
    return bytes(Pickle(None).glob("torch._utils", "_rebuild_tensor_v2").raw(put(memo)).raw(b"0(").storage("0", 4).any(0).any((4,)).any((1,))
                 .raw(b"\x89}t").raw(put(memo + 1)).raw(b"0").out)


TENSOR = b"h\x00h\x01R"


def plain(body, storages=None):
    return torch_zip(b"\x80\x02" + body + b".", {"0": DATA} if storages is None else storages)


def several(n, item):
    return b"](" + b"".join(item(i) for i in range(n)) + b"e"


FAMILIES = {
    "nested lists": (20000, lambda n: plain(b"](" * n + b"e" * n)),
    "nested tuples": (50000, lambda n: plain(b")" + b"\x85" * n)),
    "nested dicts": (20000, lambda n: plain(b"}" + b"K\x01}" * (n - 1) + b"s" * (n - 1))),
    "nested calls": (20000, lambda n: plain(b"ca\nb\n" + b")R" * n)),
    "gets of a long list": (5000, lambda n: plain(b"]" + put(0) + b"(" + b"N" * n + b"e" + several(n, lambda i: get(0)) + b"\x86")),
    "keys with a common prefix": (1500, lambda n: plain(shared_tensor() + b"}(" + b"".join(text(b"p" * 200 + b"%d" % i) + TENSOR for i in range(n)) + b"u")),
    "tensors on one storage": (4000, lambda n: plain(shared_tensor() + several(n, lambda i: TENSOR))),
    "the same tensor": (4000, lambda n: plain(shared_tensor() + TENSOR + put(2) + b"0" + several(n, lambda i: get(2)))),
    "persistent ids": (3000, lambda n: plain(id_tuple() + several(n, lambda i: b"h\x00Q"))),
    "globals": (4000, lambda n: plain(several(n, lambda i: b"cm%d\nn%d\n" % (i * 7919 % n, i)))),
    "globals with one long module": (2000, lambda n: plain(text(b"m" * 20 * n) + put(0) + b"0" + text(b"n") + put(1) + b"0" +
                                                           several(n, lambda i: get(0) + get(1) + b"\x93"))),
    "members": (1500, lambda n: zip_bytes(torch_members(b"\x80\x02N.", {}) + [Member("archive/data/%d" % i, b"") for i in range(n)])),
    "members with long names": (10, lambda n: zip_bytes(torch_members(b"\x80\x02N.", {}) + [Member("archive/data/" + "k" * 60000 + str(i), b"") for i in range(n)])),
    "integers in a dict": (40000, lambda n: plain(b"}(" + b"".join(b"J" + struct.pack("<i", i) + b"N" for i in range(n)) + b"u")),
    "cycles": (4000, lambda n: plain(b"](" + b"".join(b"]" + put(i) + b"(" + get(0) + get(i // 2) + b"e" for i in range(n)) + b"e")),
    "one state of many objects": (2000, lambda n: plain(b"}(" + b"".join(text(b"%d" % i) + b"]" for i in range(n)) + b"u" + put(0) + b"0ca\nb\n" + put(1) + b"0" +
                                                        several(n, lambda i: get(1) + b")R" + get(0) + b"b"))),
    "one state of many modules": (2000, lambda n: plain(b"}(" + text(b"_modules") + b"}(" + b"".join(text(b"%d" % i) + b"]" for i in range(n)) + b"u" +
                                                        text(b"_parameters") + b"}" + text(b"_buffers") + b"}u" + put(0) + b"0ca\nb\n" + put(1) + b"0" +
                                                        several(n, lambda i: get(1) + b")R" + get(0) + b"b"))),
    "one list of arguments": (2000, lambda n: plain(b"(" + b"]" * n + b"t" + put(0) + b"0ca\nb\n" + put(1) + b"0" + several(n, lambda i: get(1) + get(0) + b"R"))),
    "appends from many places": (20000, lambda n: plain(b"]" + put(0) + b"0" + several(n, lambda i: get(0) + b"Na"))),
    "branches shared": (40, lambda n: plain(shared_tensor() + b"](" + TENSOR * n + b"e" + put(2) + b"0" + several(n, lambda i: get(2)))),
    "branches shared deeply": (1000, lambda n: plain(b"]" + put(0) + b"0" + b"".join(b"](" + get(i) + get(i) + b"e" + put(i + 1) + b"0" for i in range(n)) + get(n))),
    "metadata shared": (1500, lambda n: plain(b"}(" + b"".join(text(b"%d" % i) + b"\x88" for i in range(n)) + b"u" + put(2) + b"0" + with_metadata() +
                                              several(n, lambda i: TENSOR))),
    "one long key": (2000, lambda n: plain(b"(" + text(b"storage") + b"ctorch\nFloatStorage\n" + text(b"k" * 20 * n) + text(b"cpu") + b"K\x04t" + put(0) + b"0" +
                                           several(n, lambda i: get(0) + b"Q"))),
    "one long location": (2000, lambda n: plain(text(b"l" * 20 * n) + put(0) + b"0" + several(n, lambda i: b"(" + text(b"storage") + b"ctorch\nFloatStorage\n" +
                                                text(b"0") + get(0) + b"K\x04tQ"))),
    "one text of many arrays": (1500, lambda n: plain(text(b"\xc3\xbf" * 8 * n) + put(2) + b"0" + array_parts(8 * n) + several(n, lambda i: array(i)))),
    "buffers left out": (1000, lambda n: plain(b"ca\nb\n)R}(" + text(b"_parameters") + b"}" + text(b"_modules") + b"}" + text(b"_non_persistent_buffers_set") + b"c__builtin__\nset\n](" +
                                               b"".join(text(b"b%06d" % i) for i in range(n)) + b"e\x85R" + text(b"_buffers") + shared_tensor() + b"}(" +
                                               b"".join(text(b"b%06d" % (i * 2)) + TENSOR for i in range(n)) + b"uub")),
    "keys of a legacy file": (3000, lambda n: legacy(bytes(Pickle().raw(several(n, lambda i: bytes(Pickle(None).storage(str(i), 1, view=None).out))).stop()),
                                                     [(str(i), 1, b"abcd") for i in range(n)])),
    "turns between two inflated storages": (100, lambda n: turns(n)),
    "long text as lines": (20000, lambda n: plain(several(n, lambda i: b"V\\u0041\\u0042\nS'\\x41\\n'\nI12345678901234567890123\n"))),
    "marks": (50000, lambda n: plain(b"N" + b"(" * n + b"1" * n)),
}


def id_tuple():
    return b"(" + text(b"storage") + b"ctorch\nFloatStorage\n" + text(b"0") + text(b"cpu") + b"K\x04t" + b"q\x000"


def with_metadata():
    return bytes(Pickle(None).glob("torch._utils", "_rebuild_tensor_v2").raw(put(0)).raw(b"0(").storage("0", 4).any(0).any((4,)).any((1,))
                 .raw(b"\x89}").raw(get(2)).raw(b"t").raw(put(1)).raw(b"0").out)


def array_parts(n):
    dtype = Pickle(None).glob("numpy", "dtype").tuple("u1", False, True).raw(b"R").tuple(3, "|", None, None, None, -1, -1, 0).raw(b"b").out
    return (bytes(dtype) + put(3) + b"0c_codecs\nencode\n" + put(4) + b"0" + text(b"latin1") + put(5) + b"0cnumpy.core.multiarray\n_reconstruct\n" + put(6) +
            b"0" + bytes(Pickle(None).any((n,)).out) + put(7) + b"0")


def array(i):
    return get(6) + b")R(K\x01" + get(7) + get(3) + b"\x89" + get(4) + get(2) + get(5) + b"\x86Rtb"


def turns(n):
    """n tensors of one element, in turns on two storages that inflate to 4 MB each for the largest n, less for others."""
    size = n * 655
    p = Pickle().raw(b"](")
    for i in range(n):
        p.tensor(str(i % 2), size, i, (1,), (1,))
    members = torch_members(p.raw(b"e").stop(), {})
    return zip_bytes(members + [Member("archive/data/%d" % i, bytes(4 * size), True) for i in range(2)])


def measure(data):
    with open("x.pt", "wb") as f:
        f.write(data)
    # A process is charged for the memory of the one it came from until it runs its own program: a small one goes between.
    between = ("import os, sys\npid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)\n_, status, use = os.wait4(pid, 0)\n"
               "print(use.ru_utime + use.ru_stime, use.ru_maxrss * 1024, os.waitstatus_to_exitcode(status), file=sys.stderr)")
    r = subprocess.run([sys.executable, "-S", "-E", "-c", between, MUSTER, "inspect", "--hash", "--json", "x.pt"],
                       stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=120)
    *message, last = r.stderr.decode(errors="replace").strip().split("\n")
    seconds, memory, code = last.split()
    return float(seconds), int(memory), int(code), "\n".join(message)


def growth(names):
    empty = measure(plain(b"N"))[1]
    sanitized = "san" in MUSTER
    print("%-38s %9s %9s %8s %8s %7s  %s" % ("family", "bytes 1x", "bytes 16x", "ms 1x", "ms 16x", "mem/B", "outcome"))
    worst = 0
    for name in names or FAMILIES:
        n, make = FAMILIES[name]
        runs = []
        for times in (1, 4, 16):
            data = make(n * times)
            seconds, memory, code, message = measure(data)
            runs.append((len(data), seconds, max(0, memory - empty - (2 << 20))))
            check(code in (0, 1), "%s, %dx: exit %d: %s" % (name, times, code, message[:200]))
        small, large = runs[0], runs[2]
        ratio = max(16, large[0] / small[0])
        declared = 16 * n * 655 * 8 if "inflated" in name else 0 # bytes that are inflated are the file's too
        limit = 3 * ratio * max(small[1], FLOOR_SECONDS)
        factor = large[2] / (large[0] + declared)
        worst = max(worst, factor)
        print("%-38s %9d %9d %8.0f %8.0f %7.1f  %s" % (name, small[0], large[0], 1e3 * small[1], 1e3 * large[1], factor,
                                                       message[len("muster inspect: x.pt: "):][:60] if code else "read"))
        check(large[1] < limit, "%s: %.2f s for 1x, %.2f s for 16x" % (name, small[1], large[1]))
        check(sanitized or factor < FACTOR, "%s: %.0f bytes of memory for each of the file" % (name, factor))
    print("most memory for a byte of file: %.0f" % worst)


growth(sys.argv[1:])
finish()

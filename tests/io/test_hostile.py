"""Limits, and every row of hostile inputs: files made here, what the command says of each, within bounded memory and
time. No file is loaded by Python."""
import os
import struct
import subprocess
import sys
import time
import zipfile
import zlib

from hostile_files import Member, Pickle, legacy, torch_members, torch_zip, zip_bytes
from io_lib import check, finish, own_folder, run, MUSTER

os.chdir(own_folder())


def words(name, want, *flags, code=1):
    r = run(MUSTER, "inspect", "--hash", name, *flags)
    good = r.returncode == code and (want in r.stderr if want else r.stderr == "")
    check(good, "%s %s: exit %d: %s" % (name, " ".join(flags), r.returncode, r.stderr.strip()))


def limits():
    """Each limit refuses one more than it says and takes what it says."""
    import torch
    torch.save({"a": torch.arange(1000.), "b": torch.ones(3), "c": torch.ones(1).expand(5000)}, "t.pt")
    with zipfile.ZipFile("t.pt") as z:
        members, pickle = len(z.infolist()), z.getinfo("t/data.pkl").file_size
    for flag, most, want in (("members", members, "a zip of %d members, more than the limit of %d"),
                             ("pickle", pickle, "data.pkl has %d bytes, more than the limit of %d"),
                             ("tensor", 20000, "tensor 'c' would take %d bytes")):
        words("t.pt", None, "--limit", "%s=%d" % (flag, most), code=0)
        words("t.pt", want % ((most, most - 1)[:want.count("%d")]), "--limit=%s=%d" % (flag, most - 1))
    torch.save({"a": torch.ones(3)}, "l.pt", _use_new_zipfile_serialization=False)
    words("l.pt", None, "--limit", "pickle=1K", code=0)
    words("l.pt", "the pickle is longer than the limit of 40 bytes", "--limit", "pickle=40")
    for bad in ("pickle", "pickle=", "pickle=x", "pickle=0", "pickle=-1", "pickle=1X", "pickle=99999999T", "what=1", "=1"):
        words("t.pt", "--limit", "--limit", bad, code=2)
    words("t.pt", "--limit needs", "--limit", code=2)



DATA = struct.pack("<4f", 1, 2, 3, 4)


def weights(*tensor, **more):
    """A state dict with one tensor w over storage 0, which is of four floats."""
    return Pickle().dict().key("w").tensor(*tensor, **more).set().stop()


GOOD = weights("0", 4, 0, (2, 2), (2, 1))


def plain(pickle, **more):
    return torch_zip(pickle, {"0": DATA}, **more)


def member(name, **lies):
    """A good file in which one member lies."""
    members = torch_members(GOOD, {"0": DATA})
    for m in members:
        if m.name.decode().endswith(name):
            m.lies = lies
    return zip_bytes(members)


def renamed(name, local=None):
    m = torch_members(GOOD, {"0": DATA})
    return zip_bytes(m + [Member(name, b"x", **({"local_name": local} if local else {}))])


def old(pickle=None, storages=None, **more):
    pickle = pickle or weights("0", 4, 0, (2, 2), (2, 1), view=None)
    return legacy(pickle, [("0", 4, DATA)] if storages is None else storages, **more)


def zip64(data, **lies):
    """Replaces the end record by one with zip64 records before it."""
    end = data.rindex(b"PK\5\6")
    count, size, offset = struct.unpack("<HII", data[end + 10:end + 20])
    e = {"count": count, "size": size, "offset": offset, "disks": 1, "record": end, "length": 44}
    e.update(lies)
    record = struct.pack("<IQHHIIQQQQ", 0x06064b50, e["length"], 45, 45, 0, 0, e["count"], e["count"], e["size"], e["offset"])
    locator = struct.pack("<IIQI", 0x07064b50, 0, e["record"], e["disks"])
    return data[:end] + record + locator + data[end:]


def bomb(name, size):
    members = torch_members(GOOD, {"0": DATA})
    made = Member(name, b"", True)
    c = zlib.compressobj(9, zlib.DEFLATED, -15)
    made.packed = b"".join(c.compress(bytes(1 << 20)) for _ in range(size >> 20)) + c.flush()
    made.lies = {"bytes": size, "crc": 0}
    return zip_bytes([m for m in members if m.name.decode() != name] + [made])


def shared(count, last):
    """x = []; count times x = [x, x]: 2^count paths to what is inside."""
    p = Pickle().dict().key("a").raw(last).raw(b"q\x00")
    for i in range(count):
        p.raw(b"0](h%ch%ceq%c" % (i % 200, i % 200, (i + 1) % 200))
    return p.set().stop()


TENSOR = Pickle(None).tensor("0", 4, 0, (4,), (1,)).out
OK = None


def rows():
    """Name, the file's bytes, words the error must have (OK: none; "!words": a warning), more flags."""
    w = weights
    good = plain(GOOD)
    yield "ok", good, OK
    yield "ok_zip64", zip64(good), OK
    yield "ok_comment", plain(GOOD, comment=b"a comment"), OK
    yield "ok_legacy", old(), OK
    # sizes, strides, storages: one clear error each, naming the tensor or the storage
    yield "storage_short", torch_zip(GOOD, {"0": DATA[:4]}), "storage data/0 holds 4 bytes, its 4 elements of float32 need 16"
    yield "storage_long", torch_zip(GOOD, {"0": DATA * 2}), "storage data/0 holds 32 bytes, its 4 elements of float32 need 16"
    yield "numel_lies_big", plain(w("0", 1 << 20, 0, (1 << 20,), (1,))), "holds 16 bytes"
    yield "numel_2_62", plain(w("0", 1 << 62, 0, (4,), (1,))), "storage '0' is said to have 4611686018427387904 elements"
    yield "numel_neg", plain(w("0", -4, 0, (4,), (1,))), "storage '0' is said to have -4 elements"
    yield "size_neg", plain(w("0", 4, 0, (-2, 2), (2, 1))), "tensor 'w': its shape is -2 at 0"
    yield "stride_neg", plain(w("0", 4, 0, (2, 2), (2, -1))), "tensor 'w': its stride is -1 at 1"
    yield "offset_neg", plain(w("0", 4, -1, (2,), (1,))), "tensor 'w': its offset is negative"
    yield "offset_oob", plain(w("0", 4, 3, (2,), (1,))), "tensor 'w': it reaches element 4 of storage '0', which has 4"
    yield "rank_mismatch", plain(w("0", 4, 0, (2, 2), (1,))), "its shape has 2 dimensions and its stride 1"
    yield "stride_overflow", plain(w("0", 4, 0, (4, 4), (1 << 62, 1 << 62))), "tensor 'w': its shape or strides overflow"
    yield "size_overflow", plain(w("0", 4, 0, (1 << 40, 1 << 40), (0, 0))), "tensor 'w': its shape or strides overflow"
    yield "size_bigint", plain(w("0", 4, 0, (1 << 80,), (1,))), "tensor 'w': its shape has a int of more than 64 bits at 0"
    yield "size_text", plain(w("0", 4, 0, ("x",), (1,))), "tensor 'w': its shape has a str at 0"
    yield "dims_65", plain(w("0", 4, 0, (1,) * 65, (1,) * 65)), "its shape has 65 dimensions, more than 64"
    yield "expand_bomb", plain(w("0", 4, 0, (1 << 40,), (0,))), "tensor 'w' would take 4398046511104 bytes"
    yield "missing_storage", torch_zip(GOOD, {}), "storage '0' (4 elements of float32) are not in the file"
    yield "key_traversal", plain(w("../../etc/passwd", 4, 0, (4,), (1,))), "'../../etc/passwd'"
    yield "unknown_storage", plain(w("0", 4, 0, (4,), (1,), kind="EvilStorage")), "torch.EvilStorage, which is no storage"
    yield "two_types", plain(Pickle().dict().key("a").tensor("0", 4, 0, (4,), (1,)).set().key("b").tensor(
        "0", 4, 0, (4,), (1,), kind="IntStorage").set().stop()), "storage '0' is 4 elements of float32 in one place and 4 of int32"
    yield "pid_not_storage", plain(Pickle().key("hello").raw(b"Q").stop()), "a persistent id is a str"
    yield "no_constructor_args", plain(Pickle().dict().key("w").glob("torch._utils", "_rebuild_tensor_v2").raw(b")R").set().stop()), \
        "tensor 'w': its constructor has 0 arguments"
    yield "array_short", plain(Pickle().dict().key("w").raw(bytes(numpy_of()).replace(b"B\x10\0\0\0" + DATA, b"B\x04\0\0\0" + DATA[:4])).set().stop()), \
        "tensor 'w': a NumPy array of 4 elements of float32 needs 16 bytes and has 4"
    # what would run code: inert, and reported
    yield "os_system", plain(Pickle().glob("posix", "system").raw(b"(").key("touch PWNED").raw(b"tR.").stop()[:-1]), "<posix.system"
    yield "builtin_eval", plain(Pickle().glob("builtins", "eval").raw(b"(").key("1").raw(b"tR").stop()), "<builtins.eval"
    yield "stack_global", plain(Pickle(4).raw(b"\x8c\x05runpy\x8c\x0arun_module\x93)R").stop()), "<runpy.run_module"
    # the zip's members
    yield "no_root", zip_bytes([Member("data.pkl", GOOD), Member("data/0", DATA), Member("version", b"3\n")]), "not a PyTorch checkpoint"
    yield "mixed_root", zip_bytes(torch_members(GOOD, {}) + [Member("other/data/0", DATA)]), "other/data/0"
    yield "no_version", zip_bytes(torch_members(GOOD, {"0": DATA})[:-1]), "'archive/version' is missing"
    for text, want in ((b"99\n", "version 99"), (b"x\n", "not a version number"), (b"", "not a version number"), (b"9" * 40, "40 bytes")):
        yield "version_%s" % text.decode().strip()[:3], zip_bytes(torch_members(GOOD, {"0": DATA})[:-1] + [Member("archive/version", text)]), want
    yield "byteorder_middle", zip_bytes(torch_members(GOOD, {"0": DATA}) + [Member("archive/byteorder", b"middle")]), "'middle'"
    yield "dup_names", zip_bytes(torch_members(GOOD, {"0": DATA}) + [Member("archive/data/0", DATA)]), "two members are named 'archive/data/0'"
    yield "dup_pkl", zip_bytes(torch_members(GOOD, {"0": DATA}) + [Member("archive/data.pkl", GOOD)]), "two members are named"
    yield "crc_bad", member("data/0", crc=12345), "'archive/data/0' is damaged: its checksum is"
    yield "crc_bad_taken", member("data/0", crc=12345), OK, "--no-checksum"
    yield "crc_none", member("data/0", crc=0), "!'archive/data/0' has no checksum"
    yield "encrypted_flag", member("data/0", flags=1), "'archive/data/0' is encrypted"
    for bit in (5, 6, 13):
        yield "flag_%d" % bit, member("data/0", flags=1 << bit), "'archive/data/0' is "
    yield "local_flags", member("data/0", local_flags=1), "'archive/data/0' has another name, method or flags"
    yield "method_99", member("data/0", method=99), "method 99"
    yield "local_method", member("data/0", local_method=8), "another name, method or flags"
    yield "local_name", member("data/0", local_name=b"archive/data/1"), "another name, method or flags"
    yield "local_name_long", member("data/0", local_name=b"archive/data/0" * 9), "'archive/data/0'"
    yield "stored_sizes", member("data/0", packed=8), "'archive/data/0' is stored, but said to be 16 bytes from 8"
    yield "cd_size_lies", member("data/0", packed=1 << 30, bytes=1 << 30), "'archive/data/0': 1073741824 bytes at"
    yield "lofs_oob", member("data/0", header=1 << 30), "begin at byte 1073741824, outside"
    yield "lofs_wrong", member("data/0", header=3), "no member begins at byte 3"
    yield "disk_start", member("data/0", disk=1), "'archive/data/0' is said to be on disk 1"
    yield "extra_cut", member("data/0", extra=b"\x01\x00\xff\x00"), "'archive/data/0'"
    yield "zip64_member_missing", member("data/0", bytes=0xffffffff, packed=0xffffffff), "'archive/data/0'"
    yield "overlap", zip_bytes(torch_members(GOOD, {"0": DATA}) + [Member("archive/data/1", DATA, at=0, local_name=b"")]), "'archive/data/1'"
    inner = zip_bytes([Member("archive/data/1", b"")])[:44]
    yield "overlap_inside", zip_bytes([Member("archive/data/0", inner + DATA)] + torch_members(GOOD, {}) + [Member("archive/data/1", b"", at=44)]), \
        "'archive/data/0' and 'archive/data/1' overlap"
    for name, want in ((b"", "an empty name"), (b"archive/\0x", "a NUL or backslash"), (b"archive\\x", "a NUL or backslash"),
                       (b"/etc/passwd", "an absolute path"), (b"archive/../x", "'..' in its name"), (b"..", "'..' in its name")):
        yield "name_%s" % name.hex()[:20], renamed(name), want
    # the zip as a whole
    yield "truncated", good[:-40], "the file ends early, at byte %d: a zip without its directory" % (len(good) - 40)
    yield "truncated_members", good[:len(good) // 2], "members begin in what is there"
    yield "prepended", b"x" * 40 + good, "x.pt"
    yield "prepended_zip", good[:len(good) // 2] + good, "directory"
    yield "trailing", good + b"x" * 40, "!40 bytes follow the end of the zip"
    yield "concat_two", good + good, "are two files joined here?"
    yield "two_eocds", plain(GOOD, comment=b"PK\5\6" + bytes(18)), "directory"
    yield "two_eocds_gap", plain(GOOD, end={"between": b"PK\5\6" + bytes(18)}), "directory"
    yield "eocd_count_lies", plain(GOOD, end={"count": 60000, "total": 60000}), "60000 members cannot be in a directory"
    yield "eocd_count_less", plain(GOOD, end={"count": 2, "total": 2}), "2 members take"
    yield "eocd_counts_differ", plain(GOOD, end={"total": 4}), "contradicts itself"
    yield "eocd_disk", plain(GOOD, end={"disk": 1}), "several disks"
    yield "eocd_directory_disk", plain(GOOD, end={"directory_disk": 1}), "several disks"
    yield "eocd_offset", plain(GOOD, end={"offset": 1}), "directory should end at byte"
    yield "eocd_bytes", plain(GOOD, end={"bytes": 0xfffffff0}), "directory should end at byte"
    yield "directory_garbage", plain(GOOD, directory=lambda d: b"x" * len(d)), "directory entry 1 of 3"
    for what, lie in (("count", 9), ("size", 1), ("offset", 1), ("record", 1), ("record", 1 << 60), ("length", 45)):
        yield "zip64_%s_%x" % (what, lie), zip64(good, **{what: lie}), "zip"
    yield "zip64_disks", zip64(good, disks=2), "several disks"
    yield "empty_zip", zip_bytes([]), "x.pt"
    # bombs
    yield "bomb_storage", bomb("archive/data/9", 320 << 20), OK  # nothing refers to it: never inflated
    yield "bomb_used", bomb("archive/data/0", 320 << 20), "holds 335544320 bytes"
    yield "bomb_pickle", bomb("archive/data.pkl", 420 << 20), "refused as a decompression bomb"
    yield "bomb_pickle_small", bomb("archive/data.pkl", 60 << 20), "refused as a decompression bomb"
    deflated = [Member("archive/data.pkl", GOOD, True)] + torch_members(GOOD, {"0": DATA})[1:]
    yield "ok_deflated", zip_bytes(deflated), OK
    deflated[0].lies = {"bytes": len(GOOD) - 1}
    yield "inflates_more", zip_bytes(deflated), "do not inflate to %d" % (len(GOOD) - 1)
    deflated[0].lies = {"bytes": len(GOOD) + 1}
    yield "inflates_less", zip_bytes(deflated), "do not inflate to %d" % (len(GOOD) + 1)
    deflated[0].lies = {"bytes": 1 << 30}
    yield "inflates_ratio", zip_bytes(deflated), "more than the limit of"
    # the pickle
    pickles = (
        ("empty_pickle", b"", "data.pkl ends early, at byte 0"), ("truncated_pickle", GOOD[:-9], "data.pkl"),
        ("no_stop", GOOD[:-1], "data.pkl ends early, at byte %d, without STOP" % (len(GOOD) - 1)),
        ("trailing_after_stop", GOOD + b"xyz", "!data.pkl has 3 bytes after its end"),
        ("stack_underflow", b"\x80\x02s.", "byte 2, opcode SETITEM"), ("mark_missing", b"\x80\x02u.", "byte 2, opcode SETITEMS: needs a MARK"),
        ("memo_missing", b"\x80\x02h\x07.", "byte 2, opcode BINGET: memo slot 7 was never filled"),
        ("odd_setitems", b"\x80\x02}(K\x01u.", "opcode SETITEMS: a key without a value"),
        ("dict_unhashable", b"\x80\x02}]K\x01s.", "opcode SETITEM: a list as key"), ("bad_opcode", b"\x80\x02\xfe.", "byte 2: 0xfe is no pickle opcode"),
        ("proto_9", b"\x80\x09}.", "byte 0, opcode PROTO: protocol 9"), ("bad_utf8", b"\x80\x02X\2\0\0\0\xff\xfe.", "opcode BINUNICODE: the text is not UTF-8"),
        ("binunicode_4g", b"\x80\x02X\xff\xff\xff\xffabc.", "byte 2, opcode BINUNICODE: 4294967295 bytes should follow, but only 4"),
        ("binunicode8", b"\x80\x04\x8d" + b"\xff" * 8 + b"abc.", "opcode BINUNICODE8: 18446744073709551615 bytes"),
        ("binbytes_4g", b"\x80\x03B\xff\xff\xff\xffabc.", "opcode BINBYTES: 4294967295 bytes"),
        ("long4_neg", b"\x80\x02\x8b\xff\xff\xff\xff.", "opcode LONG4: a negative length"),
        ("binstring_neg", b"\x80\x02T\xff\xff\xff\xff.", "opcode BINSTRING: a negative length"),
        ("long_binput_big", b"\x80\x02Nr\xff\xff\xff\xff.", "byte 3, opcode LONG_BINPUT: memo slot 4294967295 after only 3"),
        ("frame_long", b"\x80\x04\x95\xff\0\0\0\0\0\0\0N.", "opcode FRAME: a frame of 255 bytes"),
        ("ext", b"\x80\x02\x82\x01.", "opcode EXT1: refers to things outside the file"), ("buffer", b"\x80\x05\x97.", "opcode NEXT_BUFFER"),
        ("persid", b"P1\n.", "opcode PERSID: written with pickle protocol 0"), ("build_int", b"\x80\x02K\x01}b.", "opcode BUILD: gives state to a int"),
        ("append_tuple", b"\x80\x02)K\x01a.", "opcode APPEND: adds items to a tuple"), ("call_str", b"\x80\x02X\1\0\0\0a)R.", "opcode REDUCE: calls a str"),
        ("args_list", b"\x80\x02cos\nsystem\n]R.", "the arguments are a list"), ("left_over", b"\x80\x02NN.", "opcode STOP: 1 values are left over"),
        ("stack_global_int", b"\x80\x04K\x01K\x02\x93.", "opcode STACK_GLOBAL: a int and a int"),
        ("pop_under_mark", b"\x80\x02N(t0(00.", "opcode STOP: needs more values"),
        ("deep_nest", b"\x80\x02" + b"](" * 200000 + b"e" * 200000 + b".", OK), ("deep_lists", b"\x80\x02" + b"]" * 200000 + b"a" * 199999 + b".", OK),
        ("deep_tuple", b"\x80\x02)" + b"\x85" * 2000000 + b".", OK), ("deep_mark", b"\x80\x02" + b"(" * 500000 + b".", "opcode STOP"),
        ("deep_reduce", b"\x80\x02ca\nb\n" + b")R" * 300000 + b".", "<a.b"), ("cyc_list", b"\x80\x02]q\x00h\x00a.", OK),
        ("cyc_dict", b"\x80\x02}q\x00X\1\0\0\0ah\x00s.", OK), ("cyc_state", b"\x80\x02ca\nb\n)Rq\x00}X\1\0\0\0ah\x00sb.", "<a.b"),
        ("memo_bomb", shared(60, b"]"), OK), ("memo_bomb_tensors", shared(60, bytes(TENSOR)), "more than 1000000 tensors"),
    )
    for name, pickle, want in pickles:
        yield name, plain(pickle), want
    # deep, with a tensor at the bottom
    yield "deep_tensor", plain(b"\x80\x02" + b"(" * 200000 + TENSOR + b"t" * 200000 + b"."), "nested more than 1000 levels deep"
    yield "long_name", plain(Pickle().dict().key("k" * 100000).raw(TENSOR).set().stop()), "longer than 4096 bytes"
    # legacy streams
    yield "legacy_bad_magic", old(magic=b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x1a."), "x.pt"
    yield "legacy_proto_1002", old(protocol=1002), "legacy protocol 1002; 1001 was expected"
    yield "legacy_truncated", old()[:-4], "the file ends early, at byte"
    yield "legacy_no_data", old()[:-24], "before the data of storage '0' (1 of 1)"
    yield "legacy_cut_pickle", old()[:80], "the object, which begins at byte 7"
    yield "legacy_count_mismatch", old(storages=[("0", 3, DATA)]), "storage '0' has 3 elements at byte"
    yield "legacy_count_huge", old(storages=[("0", 1 << 62, DATA)]), "storage '0' has 4611686018427387904 elements"
    yield "legacy_count_neg", old(storages=[("0", -4, DATA)]), "storage '0' has -4 elements"
    yield "legacy_unknown_key", old(storages=[("0", 4, DATA), ("zzz", 4, DATA)]), "storage 'zzz' has data, but nothing refers to it"
    yield "legacy_missing_key", old(storages=[]), "storage '0' (4 elements of float32) are not in the file"
    yield "legacy_key_twice", old(storages=[("0", 4, DATA), ("0", 4, DATA)]), "storage key '0' is listed twice"
    yield "legacy_trailing", old(after=b"x" * 9), "!9 bytes follow the last storage"
    for name, view in (("offset", ("1", 3, 2)), ("neg", ("1", -1, 2)), ("huge", ("1", 1, (1 << 63) - 1)), ("short", ("1", 0)), ("text", "x")):
        yield "legacy_view_" + name, old(weights("0", 4, 0, (2,), (1,), view=view)), "a view of storage '0' does not lie inside its 4"
    yield "legacy_view_reach", old(weights("0", 4, 1, (2,), (1,), view=("1", 2, 2))), "tensor 'w': it reaches element 2"
    yield "legacy_zip_id", old(weights("0", 4, 0, (4,), (1,))), "persistent id is not"


def numpy_of():
    import numpy
    return Pickle(None).array(numpy.frombuffer(DATA, "<f4")).out


def hostile():
    """Runs each under 1 GiB of address space (not under a sanitizer, which reserves terabytes) and 20 seconds."""
    limit = "" if "asan" in MUSTER or "san" in os.path.basename(os.path.dirname(MUSTER)) else "ulimit -v 1048576; "
    print("%-24s %-8s %s" % ("input", "outcome", "message"))
    count = 0
    for name, data, want, *flags in rows():
        with open("x.pt", "wb") as f:
            f.write(data)
        r = subprocess.run(["bash", "-c", limit + 'exec "$0" "$@"', MUSTER, "inspect", "--hash", "x.pt", *flags], capture_output=True,
                           text=True, errors="replace", timeout=20)
        message, code = r.stderr.strip(), r.returncode
        if want is None:
            good = code == 0 and message == ""
        elif want[0] == "!":
            good = code == 0 and want[1:] in message and message.count("\n") == 0
        elif want[0] == "<":
            good, message = code == 0 and want[1:] in r.stdout, "runs nothing; lists " + want[1:]
        else:
            good = code == 1 and want in message and "x.pt" in message and message.count("\n") == 0
        check(good, "%s: exit %d: %s" % (name, code, message[:400]))
        print("%-24s %-8s %s" % (name, "refused" if code else "warned" if want and want[0] == "!" else "read",
                                 message.replace("muster inspect: ", "").replace("x.pt: ", "")[:150]))
        count += 1
    check(not os.path.exists("PWNED"), "something was run")
    print("%d files" % count)


PARTS = {"limits": limits, "files": hostile}
for part in sys.argv[1:] or PARTS:
    PARTS[part]()
finish()

"""Makes checkpoint files byte by byte: pickles opcode by opcode, zips field by field, legacy streams. For files that no
writer makes."""
import struct
import zlib

CLASSES = {"f4": "FloatStorage"}


class Pickle:
    """Opcodes in order; every method returns self."""

    def __init__(self, protocol=2):
        self.out = bytearray(b"\x80" + bytes([protocol]) if protocol is not None else b"")

    def raw(self, data):
        self.out += data
        return self

    def dict(self):
        return self.raw(b"}")

    def key(self, text):
        data = text.encode() if isinstance(text, str) else text
        return self.raw(b"X" + struct.pack("<I", len(data)) + data)

    def int(self, n):
        size = (n.bit_length() + 8) // 8
        return self.raw(b"K" + bytes([n])) if 0 <= n < 256 else self.raw(b"\x8a" + bytes([size]) + n.to_bytes(size, "little", signed=True))

    def tuple(self, *items):
        self.raw(b"(")
        for i in items:
            self.any(i)
        return self.raw(b"t")

    def any(self, x):
        if isinstance(x, bool):
            return self.raw(b"\x88" if x else b"\x89")
        if isinstance(x, int):
            return self.int(x)
        if isinstance(x, str):
            return self.key(x)
        if isinstance(x, tuple):
            return self.tuple(*x)
        if x is None:
            return self.raw(b"N")
        raise TypeError(x)

    def glob(self, module, name):
        return self.raw(b"c%s\n%s\n" % (module.encode(), name.encode()))

    def set(self):
        return self.raw(b"s")

    def stop(self):
        return bytes(self.out + b".")

    def storage(self, key, numel, kind="FloatStorage", module="torch", view=False, location="cpu"):
        """view: False in a zip; None or a tuple in a legacy stream."""
        self.raw(b"(").key("storage").glob(module, kind).key(key).key(location).any(numel)
        if view is not False:
            self.any(view)
        return self.raw(b"tQ")

    def tensor(self, key, numel, offset, size, stride, kind="FloatStorage", version=2, **more):
        self.glob("torch._utils", "_rebuild_tensor" + ("_v2" if version == 2 else "")).raw(b"(")
        self.storage(key, numel, kind, **more).any(offset).any(size).any(stride)
        if version == 2:
            self.raw(b"\x89ccollections\nOrderedDict\n)R")
        return self.raw(b"tR")

    def tensor_v3(self, key, numel, dtype, offset, size, stride):
        self.glob("torch._utils", "_rebuild_tensor_v3").raw(b"(").storage(key, numel, "UntypedStorage", "torch.storage")
        self.any(offset).any(size).any(stride).raw(b"\x89ccollections\nOrderedDict\n)R").glob("torch", dtype)
        return self.raw(b"tR")

    def array(self, a):
        """A NumPy array, as numpy pickles it."""
        self.glob("numpy.core.multiarray", "_reconstruct").glob("numpy", "ndarray").raw(b"K\x00\x85C\x01b\x87R")
        self.raw(b"(K\x01").any(tuple(a.shape)).glob("numpy", "dtype").tuple(a.dtype.str[1:], False, True).raw(b"R")
        self.tuple(3, "<", None, None, None, -1, -1, 0).raw(b"b\x89")
        return self.raw(b"B" + struct.pack("<I", a.nbytes) + a.tobytes() + b"tb")


class Member:
    """A zip member; every field of its headers can be made to lie."""

    def __init__(self, name, data, deflate=False, **lies):
        self.name = name.encode() if isinstance(name, str) else name
        self.data, self.packed = data, data
        if deflate:
            c = zlib.compressobj(9, zlib.DEFLATED, -15)
            self.packed = c.compress(data) + c.flush()
        self.method = 8 if deflate else 0
        self.lies = lies


def zip_bytes(members, end=None, before=b"", after=b"", comment=b"", directory=None):
    """The bytes of a zip. lies of a member: flags, method, crc, packed, bytes, header, disk, local_name, local_flags,
    local_method, extra. end changes fields of the end record: disk, directory_disk, count, total, bytes, offset.
    directory changes the directory's bytes."""
    out, entries = bytearray(before), bytearray()
    for m in members:
        lie = m.lies
        crc, packed, size = lie.get("crc", zlib.crc32(m.data)), lie.get("packed", len(m.packed)), lie.get("bytes", len(m.data))
        flags, method, at = lie.get("flags", 0), lie.get("method", m.method), lie.get("header", len(out))
        name = lie.get("local_name", m.name)
        if "at" not in lie:  # "at": shares the bytes of what begins there
            out += struct.pack("<IHHHHHIIIHH", 0x04034b50, 20, lie.get("local_flags", flags), lie.get("local_method", method), 0, 0,
                               crc, packed, size, len(name), 0) + name + m.packed
        else:
            at = lie["at"]
        extra = lie.get("extra", b"")
        entries += struct.pack("<IHHHHHHIIIHHHHHII", 0x02014b50, 20, 20, flags, method, 0, 0, crc & 0xffffffff, packed, size, len(m.name),
                               len(extra), 0, lie.get("disk", 0), 0, 0, at) + m.name + extra
    entries = directory(bytes(entries)) if directory else bytes(entries)
    e = {"disk": 0, "directory_disk": 0, "count": len(members), "total": len(members), "bytes": len(entries), "offset": len(out)}
    e.update(end or {})
    out += entries
    out += e.get("between", b"")
    out += struct.pack("<IHHHHIIH", 0x06054b50, e["disk"], e["directory_disk"], e["count"], e["total"], e["bytes"], e["offset"],
                       len(comment)) + comment + after
    return bytes(out)


def torch_members(pickle, storages, root="archive", deflate=False):
    return ([Member(root + "/data.pkl", pickle, deflate)] + [Member("%s/data/%s" % (root, k), d) for k, d in storages.items()] +
            [Member(root + "/version", b"3\n")])


def torch_zip(pickle, storages, **more):
    return zip_bytes(torch_members(pickle, storages), **more)


MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."


def legacy(pickle, storages, little=True, magic=MAGIC, protocol=1001, keys=None, after=b""):
    """storages: (key, elements, bytes), in the order of the key list."""
    system = Pickle().dict().key("protocol_version").int(1001).set().key("little_endian").any(little).set()
    names = Pickle().raw(b"](")
    for k in keys if keys is not None else [s[0] for s in storages]:
        names.key(k)
    out = magic + Pickle().int(protocol).stop() + system.stop() + pickle + names.raw(b"e").stop()
    return out + b"".join(struct.pack("<q", n) + d for _, n, d in storages) + after

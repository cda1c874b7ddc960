"""Makes safetensors files by hand, good and bad, for the scripts beside it."""
import json
import struct

BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32,
        "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64}


def packed(header, data=b"", length=None):
    """A file of this header, a text, bytes or something for json."""
    if not isinstance(header, (str, bytes)):
        header = json.dumps(header, ensure_ascii=False, separators=(",", ":"))
    header = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def tensor(dtype="F32", shape=(4,), begin=0, end=16, **more):
    return dict({"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}, **more)


def stored(tensors, metadata=None, pad=True):
    """A good file of {name: (dtype, shape, bytes)}."""
    header, data = {}, b""
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = tensor(dtype, shape, len(data), len(data) + len(raw))
        data += raw
    text = json.dumps(header, ensure_ascii=False).encode()
    return packed(text + b" " * (-len(text) % 8 if pad else 0), data)


def rules():
    """(name, file, what Muster's error says or None when it is good, whether it is deliberately unlike the reference)."""
    zeros = b"\0" * 16
    one = '"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}'
    good = "{" + one + "}"

    def t(**fields):
        return packed({"a": tensor(**fields)}, zeros)

    def raw(text, data=zeros):
        return packed(text, data)

    ok = None
    yield "basic", raw(good), ok, False
    yield "no tensors", raw("{}", b""), ok, False
    yield "only metadata", raw('{"__metadata__":{"format":"pt"}}', b""), ok, False
    yield "space before", raw(" \t\r\n" + good), ok, False
    yield "space behind", raw(good + " \t\r\n"), ok, False
    yield "space inside", raw(good.replace(":", " : ").replace(",", " ,\n")), ok, False
    yield "escaped name", raw(good.replace('"a"', '"\\u0061\\n\\u20ac\\ud834\\udd1e"')), ok, False
    yield "empty name", raw(good.replace('"a"', '""')), ok, False
    yield "0 dimensions", t(dtype="F64", shape=(), end=8)[:-8], ok, False
    yield "0 elements", packed({"a": tensor(shape=(3, 0), end=0)}), ok, False
    yield "0 elements share a place", packed({"z": tensor(shape=(0,), end=0), "a": tensor(),
                                              "y": tensor(shape=(0, 2), begin=16)}, zeros), ok, False
    yield "64 dimensions", t(shape=(1,) * 63 + (4,)), ok, False
    yield "not in order", packed({"b": tensor(begin=16, end=32), "a": tensor()}, zeros * 2), ok, False
    yield "fields in another order", raw('{"a":{"data_offsets":[0,16],"shape":[4],"dtype":"F32"}}'), ok, False
    yield "unknown field", t(x=1), ok, False
    yield "metadata that names no tensor", packed({"__metadata__": {"b": "c"}, "a": tensor()}, zeros), ok, False

    yield "7 bytes", b"\1" * 7, "only 7 bytes", False
    yield "length alone", struct.pack("<Q", 2), "only 8 bytes", False
    yield "length of 0", packed(good, zeros, 0), "ends at byte 8", False
    yield "length beyond the file", packed(good, zeros, 5000), "it is %d bytes, its header alone needs 5008" % (
        len(good) + 24), False
    yield "length of 100000001", packed(good, zeros, 100000001), "more than the limit of 100000000", False
    yield "length of 2^63", packed(good, zeros, 1 << 63), "a safetensors header of 9223372036854775808 bytes", False
    yield "length of 2^64-1", packed(good, zeros, (1 << 64) - 1), "18446744073709551615", False
    yield "length too short", packed(good, zeros, len(good) - 1), "ends at byte", False
    yield "length too long", packed(good, zeros, len(good) + 1), "has byte 0x00 at byte", False
    yield "array", raw("[]"), "no JSON object", False
    yield "null", raw("null"), "no JSON object", False
    yield "byte order mark", raw("\ufeff" + good), "no JSON object", False
    yield "two objects", raw(good + "{}"), "where its end was expected", False
    yield "NUL behind", raw(good + "\0"), "byte 0x00", False
    yield "letter behind", raw(good + "x"), "'x'", False
    yield "not UTF-8 in a name", packed(good.encode().replace(b'"a"', b'"\xff"'), zeros), "decode byte 0xff", False
    yield "overlong in a name", packed(good.encode().replace(b'"a"', b'"\xc0\xae"'), zeros), "decode byte 0xc0", False
    yield "surrogate in a name", packed(good.encode().replace(b'"a"', b'"\xed\xa0\x80"'), zeros), "decode byte 0xed", False
    yield "control character in a name", raw(good.replace('"a"', '"\1"')), "in a name", False
    yield "lone surrogate", raw(good.replace('"a"', '"\\ud800"')), "invalid Unicode", False
    yield "quote that does not end", raw('{"a'), "in a name", False
    yield "single quotes", raw("{'a':1}"), "'''", False
    yield "comma at the end", raw("{" + one + ",}"), "'}' at byte", False
    yield "comma missing", raw("{" + one + " " + one.replace('"a"', '"b"') + "}"), "',' or '}' was expected", False
    yield "colon missing", raw(good.replace('"a":', '"a"')), "':' was expected", False
    yield "value missing", raw('{"a":}'), "a value was expected", False
    yield "comment", raw(good.replace("{", "{/**/", 1)), "'/'", False
    yield "name that is a number", raw(good.replace('"a"', "1")), "'1'", False
    yield "bracket of another kind", raw(good.replace("[4]", "[4}")), "JSON", False
    yield "tensor twice", packed("{%s,%s}" % (one, one), zeros), "tensor 'a' twice", True
    yield "tensor twice, one escaped", packed("{%s,%s}" % (one, one.replace('"a"', '"\\u0061"')), zeros), "twice", True
    yield "field twice", raw(good.replace('"dtype"', '"dtype":"F32","dtype"')), "duplicate", False
    yield "metadata twice", raw('{"__metadata__":{},"__metadata__":{},%s}' % one), "__metadata__ twice", False
    yield "metadata's key twice", raw('{"__metadata__":{"k":"1","k":"2"},%s}' % one), "'k' twice", True
    for name, text in (("text", '"x"'), ("array", "[]"), ("number", "1")):
        yield "metadata is a " + name, raw('{"__metadata__":%s,%s}' % (text, one)), "__metadata__ has", False
    yield "metadata is null", raw('{"__metadata__":null,%s}' % one), "__metadata__ has 'n'", True
    for name, text in (("number", "1"), ("null", "null"), ("object", "{}"), ("array", "[]")):
        yield "metadata with a " + name, raw('{"__metadata__":{"k":%s},%s}' % (text, one)), "under 'k'", False
    for name, text in (("number", "1"), ("null", "null"), ("array", "[]"), ("text", '"x"')):
        yield "tensor is a " + name, raw('{"a":%s}' % text), "an object was expected", False
    for field in "dtype", "shape", "data_offsets":
        fields = tensor()
        del fields[field]
        yield "no " + field, packed({"a": fields}, zeros), "has no " + field, False
        yield field + " is null", packed({"a": tensor(**{field: None})} if field not in ("shape", "data_offsets") else
                                         good.replace("[4]" if field == "shape" else "[0,16]", "null"), zeros), "null", False
    for dtype in "F33", "f32", "", "float32", "F32 ", "C128", "I4":
        yield "type '%s'" % dtype, t(dtype=dtype), "of type '%s'" % dtype, False
    yield "type is a number", raw(good.replace('"F32"', "32")), "dtype is an integer", False
    for text, want in (("[0]", "1 numbers"), ("[0,16,16]", "3 numbers"), ("[-1,15]", "is -1"), ("[0.0,16]", "a real number"),
                       ("[0,1.6e1]", "a real number"), ("[0,18446744073709551616]", "too big integer"), ('[0,"16"]', "a text"),
                       ("[00,16]", "JSON"), ("[0,+16]", "JSON"), ("[0,0x10]", "JSON"), ("[0,null]", "null"),
                       ("{}", "an object"), ("16", "an integer"), ("[true,16]", "true")):
        yield "offsets " + text, raw(good.replace("[0,16]", text)), want, False
    for text, want in (("[-4]", "shape is -4"), ("[4.0]", "a real number"), ("[[4]]", "an array"), ('["4"]', "a text"),
                       ("4", "an integer"), ("[18446744073709551616]", "too big integer"), ("[3]", "need 12"),
                       ("[5]", "need 20"), ("[]", "need 4"), ("[4,0]", "need 0")):
        yield "shape " + text, raw(good.replace("[4]", text)), want, False
    yield "offset of -0", raw(good.replace("[0,16]", "[-0,16]")), ok, True
    yield "begin behind end", t(begin=16, end=0), "ends before", False
    yield "shape overflows", t(shape=(2 ** 40, 2 ** 40)), "overflows 64 bits", False
    yield "shape overflows, then 0", t(shape=(2 ** 40, 2 ** 40, 0), end=0), "overflows 64 bits", False
    yield "0, then shape overflows", packed({"a": tensor(shape=(0, 2 ** 40, 2 ** 40), end=0)}), "overflows 64 bits", True
    yield "bytes overflow", t(dtype="F64", shape=(2 ** 61,)), "overflows 64 bits", False
    yield "size comes out by wrapping", t(dtype="F32", shape=(2 ** 30, 2 ** 30, 4)), "overflows 64 bits", False
    yield "65 dimensions", t(shape=(1,) * 64 + (4,)), "65 dimensions", True
    yield "100000 dimensions", t(shape=(1,) * 99999 + (4,)), "100000 dimensions", True
    yield "halves of a byte", packed({"a": tensor("F4", (3,), 0, 1)}, b"\0"), "do not fill whole bytes", False
    yield "six bits", packed({"a": tensor("F6_E2M3", (2,), 0, 1)}, b"\0"), "do not fill whole bytes", False
    b = '"b":{"dtype":"F32","shape":[4],"data_offsets":[%d,%d]}'
    for name, begin, want in (("overlap", 0, "inside tensor"), ("partial overlap", 8, "inside tensor 'a'"),
                              ("hole", 20, "belong to no tensor")):
        yield name, raw("{%s,%s}" % (one, b % (begin, begin + 16)), b"\0" * (begin + 16)), want, False
    yield "hole at the start", raw(good.replace("[0,16]", "[4,20]"), b"\0" * 20), "0 were expected", False
    yield "bytes at the end", raw(good, zeros + b"\0" * 8), "8 bytes at the end", False
    yield "data cut off", raw(good, zeros[:-1]), "it is %d bytes, its header describes %d" % (len(good) + 23, len(good) + 24), False
    yield "no data", raw(good, b""), "ends early", False
    yield "bytes and no tensor", raw("{}", b"\0"), "belong to no tensor", False
    yield "200000 deep", raw('{"a":' + "[" * 200000 + "]" * 200000 + "}"), "maximum parsing depth", False
    yield "200000 deep, left open", raw('{"a":' + "[" * 200000), "JSON", False
    yield "1000000 deep objects", raw('{"a":' * 1000000 + "1" + "}" * 1000000), "bytes in tensor 'a'", False
    yield "NUL in a name", raw(good.replace('"a"', '"a\\u0000b"')), "in a name", True
    yield "long name", raw(good.replace('"a"', '"%s"' % ("n" * 4097))), "longer than 4096", True

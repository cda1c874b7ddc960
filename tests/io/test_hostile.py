"""Limits, and every row of hostile inputs: files made here, what the command says of each, within bounded memory and
time. No file is loaded by Python."""
import os
import zipfile

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


limits()
finish()

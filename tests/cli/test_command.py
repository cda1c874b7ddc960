#!/usr/bin/python3
"""The command from outside: help, bad input, what it prints, ranks, the replaced head. test_command.py CASE"""
import json
import os
import re
import subprocess
import sys

import torch

from cli_lib import MUSTER, Work, differences, make_data

COMMANDS = ["train", "eval", "run", "inspect", "diff", "verify", "names", "plan", "trace-merge", "bench"]
BENCH_PARTS = ["step", "allreduce", "load", "machine"]


def help_texts():
    with Work() as w:
        top = w.ok("help")
        assert w.ok("--help") == top
        for c in COMMANDS:
            assert re.search(rf"^  {c} ", top, re.M), top
            text = w.ok(c, "--help")
            assert text.startswith("usage: muster " + c), text
            assert w.ok("help", c) == text
        assert re.fullmatch(r"muster \d+\.\d+\.\d+\n", w.ok("version"))
        assert w.ok("--version") == w.ok("version")
        # Each flag of train and eval is in the man page, and the other way round.
        with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../docs/muster.1"),
                  encoding="utf-8") as f:
            page = f.read().replace("\\-", "-")
        for c in ["train", "eval", "inspect", "diff", "verify", "names", "plan", "trace-merge"] + ["bench " + part for part in BENCH_PARTS]:
            for flag in set(re.findall(r"^  (--[a-z-]+)", w.ok(*c.split(), "--help"), re.M)) - {"--help"}:
                assert flag in page, f"{flag} of {c} is not in docs/muster.1"
    print("help, version, man page")


def bad_input():
    """One clear line, exit 2, nothing written."""
    with Work() as w:
        w.train("--steps", 1, "--save", "../seven.pth")
        w.train("--steps", 1, "--save", "../state.pth", "--checkpoint", "../state.ckpt")
        for name, content in (("junk.pth", b"not a checkpoint"), ("empty.pth", b""), ("cut.pth", None)):
            if content is None:
                with open(os.path.join(w.path, "seven.pth"), "rb") as f:
                    content = f.read()[:3000]
            with open(os.path.join(w.path, name), "wb") as f:
                f.write(content)
        odd = make_data(os.path.join(w.path, "odd"), side=14)
        os.mkdir(os.path.join(w.path, "nothing"))
        good = ["train", "--model", "cnn", "--data", w.data, "--steps", "1", "--save", "out.pth"]
        up = "../"
        table = [  # arguments, and a word that the message must have
            ([], "usage"),
            (["trian"], "trian"),
            (["train"], "--model"),
            (["train", "--model", "cnn"], "--data"),
            (["train", "--model", "alexnet", "--data", w.data], "resnet20"),
            (good + ["--frobnicate"], "--frobnicate"),
            (good + ["--epochs"], "--epochs"),
            (good + ["--epochs", "0"], "--epochs"),
            (good + ["--epochs", "two"], "two"),
            (good + ["--epochs", "2x"], "2x"),
            (good + ["--batch", "-3"], "-3"),
            (good + ["--batch", "99999999999999999999"], "--batch"),
            (good + ["--lr", "nan"], "--lr"),
            (good + ["--lr", "inf"], "--lr"),
            (good + ["--lr", "-1"], "--lr"),
            (good + ["--momentum", "2"], "--momentum"),
            (good + ["--quiet=yes"], "--quiet"),
            (good + ["--optimizer", "sgdm"], "sgd|adam|adamw"),
            (good + ["--optimizer", "adam", "--nesterov"], "sgd"),
            (good + ["--nesterov", "--momentum", "0"], "--nesterov"),
            (good + ["--schedule", ""], "constant"),
            (good + ["--warmup", "1"], "--warmup"),
            (good + ["extra"], "extra"),
            (good + ["--mean", "0.5"], "--std"),
            (good + ["--mean", "0.5,", "--std", "x"], "x"),
            (good + ["--mean", "0.5,0.5,0.5", "--std", "1,1,1"], "channels"),
            (good + ["--mean", "0.5", "--std", "0"], "--std"),
            (good + ["--ranks", "0"], "--ranks"),
            (good + ["--freeze", "layer9.*"], "layer9"),
            (good + ["--recompute", "layer9.*"], "layer9"),
            (good + ["--data-parallel", "0"], "--data-parallel"),
            (good + ["--data-parallel", "2", "--sync-bn"], "--sync-bn"),
            (good + ["--classes", "5"], "--classes"),
            (good + ["--head", "3"], "--head"),
            (good + ["--from", "missing.pth"], "missing.pth"),
            (good + ["--from", "."], "is a directory, a file was expected"),
            (good + ["--from", "/dev/null"], "not a file"),
            (good + ["--from", up + "junk.pth"], "junk.pth"),
            (good + ["--from", up + "empty.pth"], "empty.pth"),
            (good + ["--from", up + "cut.pth"], "cut.pth"),
            (good + ["--classes", "3", "--from", up + "seven.pth"], "fc2"),
            (good + ["--classes", "3", "--from", up + "seven.pth"], "To load what fits: --ignore-mismatched (in C"),
            (good + ["--resume", up + "seven.pth"], "seven.pth"),
            (good + ["--resume", "missing.ckpt"], "missing.ckpt"),
            (good + ["--save", "no/such/folder/x.pth"], "no/such/folder"),
            (good + ["--save", "."], "folder"),
            (good + ["--checkpoint", "no/x.ckpt"], "no/x.ckpt"),
            (good + ["--log", "no/log"], "no"),
            (["train", "--model", "cnn", "--data", "mnist"], "idx:DIR"),
            (["train", "--model", "cnn", "--data", "idx:/nowhere"], "/nowhere"),
            (["train", "--model", "cnn", "--data", "idx:" + os.path.join(w.path, "nothing")], "nothing"),
            (["train", "--model", "cnn", "--data", "cifar:" + os.path.join(w.path, "nothing")], "nothing"),
            (["train", "--model", "cnn", "--data", "folder:" + os.path.join(w.path, "nothing")], "nothing"),
            (["train", "--model", "cnn", "--data", odd, "--save", "out.pth"], "14"),
            (["train", "--model", "resnet20", "--data", w.data, "--from", up + "seven.pth"], "fit"),
            (["eval", "--model", "cnn", "--data", w.data], "--from"),
            (["eval", "--model", "cnn", "--data", w.data, "--from", "missing.pth"], "missing.pth"),
            (["eval", "--model", "cnn", "--data", w.data, "--from", up + "seven.pth", "--head", "9"], "fc2"),
            (["eval", "--model", "cnn", "--data", w.data, "--from", up + "seven.pth", "--save", "x"], "--save"),
            (["version", "now"], "version"),
            (["help", "me"], "me"),
        ]
        wrong = []
        for args, word in table:
            for ranks in ([], ["--ranks", "2"]) if args[:1] == ["train"] and "--ranks" not in args else ([],):
                done = w.run(*args[:1], *ranks, *args[1:])
                lines = [x for x in done.stderr.split("\n") if x and not x.startswith("Try 'muster")]
                if args and (done.returncode != 2 or len(lines) != 1 or word not in lines[0]):
                    wrong.append(f"{args} {ranks}: exit {done.returncode}, wanted {word!r}:\n{done.stderr}{done.stdout}")
                if word == "fc2" and args[0] == "train" and "--head N" not in done.stderr:
                    wrong.append(f"{args} {ranks}: a new head is not offered: {done.stderr}")
                if not args and done.returncode != 2:
                    wrong.append(f"no command: exit {done.returncode}")
                left = os.listdir(w.cwd)
                if left:
                    wrong.append(f"{args} {ranks} left {left}")
                    for name in left:
                        os.remove(w.path_of(name))
    assert not wrong, "\n".join(wrong)
    print(f"{len(table)} kinds of bad input: exit 2, one line, nothing written")


def learns():
    """It learns, prints what it should, logs each step, and eval of the saved file agrees to the last image."""
    with Work() as w:
        out = w.train("--epochs", 4, "--save", "m.pth", "--log", "log.jsonl")
        assert re.search(r"^cnn: [\d,]+ parameters, [\d,]+ trained, 4 outputs$", out, re.M), out
        assert "203 images of 1 x 12 x 12 in 4 classes, 97 for testing" in out, out
        assert len(re.findall(r"^epoch \d/4  loss .*test accuracy", out, re.M)) == 4, out
        final = re.search(r"^test accuracy ([\d.]+) % \((\d+) of 97\), loss ([\d.]+)$", out, re.M)
        assert final and float(final.group(1)) > 90, out
        assert "saved m.pth" in out
        with open(w.path_of("log.jsonl"), encoding="utf-8") as f:
            log = [json.loads(line) for line in f]
        assert [x["step"] for x in log] == list(range(1, 4 * 13 + 1))
        assert sum(x["images"] for x in log) == 4 * 203
        assert log[-1]["loss"] < 0.5 * log[0]["loss"]
        for extra in ([], ["--ranks", 2], ["--ranks", 3, "--batch", 7], ["--batch", 1]):
            again = w.ok("eval", "--model", "cnn", "--data", w.data, "--from", "m.pth", *extra)
            assert f"({final.group(2)} of 97)" in again, again
        quiet = w.train("--steps", 2, "--quiet")
        assert len(quiet.strip().split("\n")) == 1 and quiet.startswith("test accuracy"), quiet
        state = w.load("m.pth")
        assert list(state) == ["conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias", "fc1.weight", "fc1.bias",
                               "fc2.weight", "fc2.bias"], list(state)
    print("learns, logs, evaluates exactly")


def mixed_precision():
    """--bf16 learns as well, on several ranks too, is not float32, and what it saves is."""
    with Work() as w:
        plain = w.train("--epochs", 3, "--log", "plain.jsonl")
        for n in (1, 2):
            out = w.train("--epochs", 3, "--bf16", "--ranks", n, "--save", "m.pth", "--log", "log.jsonl")
            final = re.search(r"^test accuracy ([\d.]+) % \((\d+) of 97\), loss ([\d.]+)$", out, re.M)
            assert final and float(final.group(1)) > 90, out
            again = w.ok("eval", "--model", "cnn", "--data", w.data, "--from", "m.pth", "--bf16", "--ranks", 2)
            assert f"({final.group(2)} of 97)" in again, again
            assert all(v.dtype == torch.float32 for v in w.load("m.pth").values())
        assert "test accuracy" in plain
        with open(w.path_of("plain.jsonl"), encoding="utf-8") as f:
            wide = json.loads(f.readline())["loss"]
        w.train("--epochs", 1, "--bf16", "--log", "one.jsonl")
        with open(w.path_of("one.jsonl"), encoding="utf-8") as f:
            narrow = json.loads(f.readline())["loss"]
        assert 0 < abs(wide - narrow) < 2 ** -8 * wide, (wide, narrow)
    print("--bf16 learns, evaluates exactly, saves float32")


def head():
    """--from with --head: everything but the head comes from the file; --freeze leaves its parameters alone."""
    with Work() as w:
        w.train("--epochs", 2, "--classes", 3, "--save", "three.pth")
        out = w.train("--epochs", 1, "--from", "three.pth", "--head", 4, "--freeze", "conv*", "--save", "four.pth")
        assert "fc2.weight" in out and re.search(r"head fc2: new, for 4 classes", out), out
        assert "4 outputs" in out
        before, after = w.load("three.pth"), w.load("four.pth")
        assert after["fc2.weight"].shape == (4, 128) and before["fc2.weight"].shape == (3, 128)
        for name in before:
            same = not differences(before[name], after[name])
            assert same == name.startswith("conv"), name
        # The head is new even where its shape would fit.
        w.train("--steps", 1, "--lr", 0, "--weight-decay", 0, "--from", "four.pth", "--head", 4, "--save", "new.pth")
        new = w.load("new.pth")
        assert differences(new["fc2.weight"], after["fc2.weight"])
        assert not differences(new["fc1.weight"], after["fc1.weight"])
        # Without --head, and with the same classes, all of it.
        w.train("--steps", 1, "--lr", 0, "--weight-decay", 0, "--from", "four.pth", "--save", "same.pth")
        assert not differences(w.load("same.pth"), after)
        # A DataParallel file: the prefix goes, and it says so.
        torch.save({"state_dict": {"module." + k: v for k, v in after.items()}}, w.path_of("dp.pth"))
        out = w.train("--steps", 1, "--lr", 0, "--weight-decay", 0, "--from", "dp.pth", "--save", "dp2.pth")
        assert "module." in out, out
        assert not differences(w.load("dp2.pth"), after)
        # Activation checkpointing changes nothing of what comes out.
        for name, extra in (("kept.pth", []), ("again.pth", ["--recompute", "*"])):
            out = w.train("--steps", 3, "--seed", 4, "--save", name, *extra)
            assert ("computed again in backward" in out) == (extra != []), out
        assert not differences(w.load("kept.pth"), w.load("again.pth"))
    print("the head is replaced, the rest kept")


def data_parallel():
    """Replicas: the same losses but for rounding, names without "module.", and a resumed run is the unbroken one."""
    with Work() as w:
        def losses(name, *flags, model="cnn"):
            w.train("--steps", 4, "--log", "log", "--save", name, *flags, model=model)
            with open(w.path_of("log"), encoding="utf-8") as f:
                return [json.loads(line)["loss"] for line in f]

        for ranks in (["--ranks", 1], ["--ranks", 2]):
            one, two = losses("one.pth", *ranks), losses("two.pth", "--data-parallel", 2, *ranks)
            assert all(abs(a - b) < 1e-5 * abs(a) for a, b in zip(one, two)) and len(two) == 4, (one, two)
            assert list(w.load("one.pth")) == list(w.load("two.pth")), list(w.load("two.pth"))
        # Batch norm sees parts of the batch: the replicas are really there.
        one, two = losses("one.pth", model="resnet20"), losses("two.pth", "--data-parallel", 2, model="resnet20")
        assert 1e-4 < abs(one[0] - two[0]) < 1, (one, two)
        assert list(w.load("one.pth")) == list(w.load("two.pth"))
        out = w.train("--steps", 1, "--data-parallel", 2)
        assert "2 replicas" in out, out
        # What was saved is found again: by eval, by --from, by --resume with and without replicas.
        out = w.train("--epochs", 2, "--data-parallel", 2, "--threads", 2, "--save", "whole.pth", "--checkpoint",
                      "whole.ckpt", model="resnet20")
        final = out.split("test accuracy")[-1].split(",")[0]
        assert final in w.ok("eval", "--model", "resnet20", "--data", w.data, "--from", "whole.pth"), final
        w.train("--epochs", 2, "--steps", 5, "--data-parallel", 2, "--threads", 2, "--checkpoint", "half.ckpt",
                model="resnet20")
        w.train("--epochs", 2, "--data-parallel", 2, "--threads", 2, "--resume", "half.ckpt", "--checkpoint", "rest.ckpt",
                model="resnet20")
        assert not differences(w.load("rest.ckpt"), w.load("whole.ckpt"))
        out = w.train("--epochs", 2, "--resume", "half.ckpt", "--save", "alone.pth", model="resnet20")
        assert "--data-parallel" in out, out
        assert differences(w.load("alone.pth"), w.load("whole.pth"))
    print("replicas: same losses, same names, resumed")


def from_flags():
    """How --from is read, with train and with eval, one rank and two: what is loaded, and what is printed of it."""
    with Work() as w:
        w.train("--epochs", 2, "--quiet", "--save", "good.pth")
        w.train("--steps", 1, "--quiet", "--seed", 5, "--save", "other.pth")
        good, other = w.load("good.pth"), w.load("other.pth")
        made = 0

        def started(*flags, model="cnn", ranks=()):
            """The report of --from, and the weights before any step."""
            nonlocal made
            made += 1
            out = w.train("--steps", 1, "--lr", 0, "--weight-decay", 0, "--eval-every", 0, "--save", f"{made}.out",
                          *flags, *ranks, model=model)
            return out.split("\ncnn: ")[0] + "\n", w.load(f"{made}.out")

        def evaluated(*flags):
            out = w.ok("eval", "--model", "cnn", "--data", w.data, *flags)
            report, found, result = out.partition("test accuracy")
            assert found, out
            return report, result

        def refused(*flags, warned=0):
            """One line, the same from train and eval and with two ranks, after warnings if any; nothing is written."""
            texts = set()
            for command in (["train", "--steps", "1", "--save", "no.pth"], ["train", "--ranks", "2", "--save", "no.pth"],
                            ["eval"], ["eval", "--ranks", "2"]):
                if command[0] == "eval" and "--strict" in flags:
                    continue
                done = w.run(*command, "--model", "cnn", "--data", w.data, *flags)
                assert done.returncode == 2 and not os.path.exists(w.path_of("no.pth")), (command, flags, done)
                lines = done.stderr.strip().replace("muster eval", "muster train").split("\n")
                lines = [x for x in lines if not x.startswith("Try 'muster")]
                texts.add(lines[-1])
                assert len(lines) == 1 + warned, done.stderr
            assert len(texts) == 1, texts
            return texts.pop()

        want = evaluated("--from", "good.pth")[1]
        assert evaluated("--from", "other.pth")[1] != want

        # --key: of two state dicts that both fit
        torch.save({"net": good, "ema": other}, w.path_of("two.pth"))
        text = refused("--from", "two.pth")
        assert "several state dicts" in text and '"net"' in text and '"ema"' in text, text
        for key, state in (("net", good), ("ema", other)):
            for ranks in ((), ("--ranks", 2)):
                report, got = started("--from", "two.pth", "--key", key, ranks=ranks)
                assert report == f'two.pth: torch zip, state dict "{key}"\n' \
                                 "loaded 8 of 8 tensors, 93188 of 93188 elements\n", report
                assert not differences(got, state)
        assert evaluated("--from", "two.pth", "--key", "net") == (report.replace('"ema"', '"net"'), want)
        assert "nothing" in refused("--from", "two.pth", "--key", "nothing")

        # --rename: in the order given, with groups, each name reported
        torch.save({"body." + k.replace("fc1", "hidden"): v for k, v in good.items()}, w.path_of("named.pth"))
        rules = ["--rename", "^body\\.=", "--rename", "hidden\\.(weight|bias)=fc1.\\1"]
        text = "named.pth: torch zip\nloaded 8 of 8 tensors, 93188 of 93188 elements\nrenamed (8):\n" + \
               "".join(f"  {k}: body.{k.replace('fc1', 'hidden')} in the file\n" for k in good)
        report, got = started("--from", "named.pth", *rules)
        assert report == text, report
        assert not differences(got, good)
        assert evaluated("--from", "named.pth", *rules, "--ranks", 2) == (text, want)
        order = ["--rename", "^hidden=fc1", *rules[:2]]  # the first finds nothing before the second has been applied
        text = refused("--from", "named.pth", *order, warned=1)
        assert "missing in the file: fc1.weight, fc1.bias; not in the model: body.hidden.weight" in text, text
        assert "no regular expression" in refused("--from", "named.pth", "--rename", "(=x")
        assert "FROM=TO" in refused("--from", "named.pth", "--rename", "body")
        done = w.run("eval", "--model", "cnn", "--data", w.data, "--from", "good.pth", "--rename", "gamma=weight")
        assert done.returncode == 0 and want in done.stdout, done
        assert "good.pth: rename 'gamma=weight' matched no name" in done.stderr, done

        # --exact-names: no wrapper's name goes away
        torch.save({"module." + k: v for k, v in good.items()}, w.path_of("wrapped.pth"))
        assert evaluated("--from", "wrapped.pth") == (
            'wrapped.pth: torch zip, "module." removed from the start of names\n'
            "loaded 8 of 8 tensors, 93188 of 93188 elements\n", want)
        assert "none of the model's 8 names" in refused("--from", "wrapped.pth", "--exact-names")
        assert evaluated("--from", "wrapped.pth", "--exact-names", "--rename", "^module\\.=")[1] == want

        # --not-strict, and --strict with --head: names that are missing or too many
        few = {k: v for k, v in good.items() if k != "fc1.bias"}
        torch.save({**few, "more": torch.ones(2)}, w.path_of("few.pth"))
        left = "missing in the file: fc1.bias; not in the model: more"
        assert left in refused("--from", "few.pth")
        text = "few.pth: torch zip\nloaded 7 of 8 tensors, 93060 of 93188 elements\n" \
               "missing in the file (1):\n  fc1.bias\nnot in the model (1):\n  more\n"
        report, got = started("--from", "few.pth", "--not-strict")
        assert report == text, report
        assert not differences({k: got[k] for k in few}, few)
        assert evaluated("--from", "few.pth", "--not-strict")[0] == text
        out = w.train("--steps", 1, "--from", "few.pth", "--head", 4)
        assert text in out and "head fc2: new" in out, out
        assert left in refused("--from", "few.pth", "--head", "4", "--strict")
        w.train("--steps", 1, "--from", "good.pth", "--head", 4, "--strict")

        # --ignore-mismatched: other shapes; names are another matter, and --not-strict is about names
        odd = {**good, "fc2.bias": torch.ones(9)}
        torch.save(odd, w.path_of("odd.pth"))
        left = "size mismatch for fc2.bias: (9,) in the file, (4,) in the model"
        assert left in refused("--from", "odd.pth")
        assert left in refused("--from", "odd.pth", "--not-strict")
        text = "odd.pth: torch zip\nloaded 7 of 8 tensors, 93184 of 93188 elements\n" \
               "shapes differ, left as they were (1):\n  fc2.bias: (9,) in the file, (4,) in the model\n"
        for ranks in ((), ("--ranks", 2)):
            report, got = started("--from", "odd.pth", "--ignore-mismatched", ranks=ranks)
            assert report == text, report
            kept = [k for k in good if k != "fc2.bias"]
            assert not differences({k: got[k] for k in kept}, {k: good[k] for k in kept})
        assert evaluated("--from", "odd.pth", "--ignore-mismatched")[0] == text
        torch.save({**odd, "more": torch.ones(2)}, w.path_of("odd.pth"))
        assert "not in the model: more" in refused("--from", "odd.pth", "--ignore-mismatched")
        started("--from", "odd.pth", "--ignore-mismatched", "--not-strict")

        # what contradicts itself
        done = w.run("train", "--model", "cnn", "--data", w.data, "--from", "good.pth", "--strict", "--not-strict")
        assert done.returncode == 2 and "exclude each other" in done.stderr, done
        for flag in (["--key", "x"], ["--rename", "a=b"], ["--exact-names"], ["--strict"], ["--not-strict"],
                     ["--ignore-mismatched"]):
            done = w.run("train", "--model", "cnn", "--data", w.data, "--steps", 1, *flag)
            assert done.returncode == 2 and f"{flag[0]} says how --from is read" in done.stderr, done
    print("how --from is read")


def ranks():
    """Two ranks of half the batch train what one rank trains, in and out of the launcher, and twice the same."""
    with Work() as w:
        args = ["--epochs", 2, "--no-augment", "--eval-every", 0]
        w.train(*args, "--save", "one.pth")
        two = ["train", "--model", "cnn", "--data", w.data, "--batch", 8, "--lr", 0.02, "--seed", 3, *args]
        w.ok(*two, "--ranks", 2, "--save", "two.pth")
        w.ok(*two, "--ranks", 2, "--save", "two2.pth", "--report", w.path_of("report.json"))
        with open(w.path_of("report.json")) as f:
            report = json.load(f)
        assert report["ranks"] == 2 and report["reductions"] > 0 and not report["absent"], report
        assert all(p["here"] == report["reductions"] for p in report["parameters"]), report
        out = w.ok(*two, "--steps", 1, "--report", "-")
        assert json.loads((out if isinstance(out, str) else out.stdout).splitlines()[-1])["ranks"] == 1, out
        w.ok("run", "-n", 2, "--", MUSTER, *two, "--save", "two3.pth")
        one, first = w.load("one.pth"), w.load("two.pth")
        assert not differences(first, w.load("two2.pth")), "the same run twice differs"
        assert not differences(first, w.load("two3.pth")), "muster run and --ranks differ"
        worst = max(((one[k] - first[k]).norm() / one[k].norm()).item() for k in one)
        assert worst < 1e-4, worst
        done = w.run("run", "-n", 3, "--", MUSTER, *two, "--ranks", 2)
        assert done.returncode == 2 and "--ranks 2" in done.stderr, done
        # With the statistics of all ranks together, batch norm too is that of one rank.
        small = ["--epochs", 2, "--batch", 60, "--no-augment", "--eval-every", 0, "--save"]
        w.train(*small[:3], 240, *small[4:], "bn1.pth", model="resnet20")
        out = w.train(*small, "bn4.pth", "--ranks", 4, "--sync-bn", model="resnet20")
        assert "batch norms" in out, out
        w.train(*small, "bn4not.pth", "--ranks", 4, model="resnet20")
        whole = w.load("bn1.pth")
        apart = [max(((whole[k] - x[k]).norm() / whole[k].norm()).item() for k in whole if "running" in k)
                 for x in (w.load("bn4.pth"), w.load("bn4not.pth"))]
        assert apart[0] < 1e-4 < 1e-3 < apart[1], apart
        # More ranks than the last batch has images.
        w.ok(*two[:-1], 1, "--model", "resnet20", "--ranks", 4, "--batch", 50, "--sync-bn", "--save", "few_bn.pth")
        w.ok(*two[:-1], 1, "--ranks", 4, "--batch", 60, "--save", "few.pth")
        left = [f for f in os.listdir("/dev/shm") if "muster" in f]
        assert not left, left
    print(f"2 ranks x 8 against 1 x 16: {worst:.1e}")


def install_completion():
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../scripts/completion.bash")
    path = os.path.dirname(os.path.abspath(MUSTER)) + ":" + os.environ["PATH"]
    for words, expected in (("muster trai", "train"), ("muster bench st", "step"), ("muster bench step --cifar", "--cifar-stem"),
                            ("muster eval --bf", "--bf16")):
        done = subprocess.run(["bash", "-c", f". {script}; COMP_WORDS=({words}); COMP_CWORD={words.count(' ')}; _muster; "
                               "echo ${COMPREPLY[*]}"], stdout=subprocess.PIPE, text=True, check=True,
                              env=dict(os.environ, PATH=path))
        assert done.stdout == expected + "\n", (words, done.stdout)
    print("completion")


if __name__ == "__main__":
    {"help": help_texts, "bad_input": bad_input, "learns": learns, "mixed_precision": mixed_precision, "head": head,
     "data_parallel": data_parallel, "from_flags": from_flags, "ranks": ranks,
     "completion": install_completion}[sys.argv[1]]()

"""Optimisers' state both ways with PyTorch: ten steps in torch, in files of many programs' forms; twenty in Muster; twenty
more in torch, against torch alone. And from Muster to torch and back. Weights, running statistics and states compared."""
import os
import random
import sys

CURRENT = sys.argv[1] == "current"
PYTHON = os.environ.get("MUSTER_TORCH_PYTHON", "")
if CURRENT and not PYTHON:
    print("MUSTER_TORCH_PYTHON names no Python with current PyTorch")
    sys.exit(77)
if CURRENT and "again" not in sys.argv:
    os.execv(PYTHON, [PYTHON, *sys.argv, "again"])

import torch
from torch import nn

from io_lib import SHARED, check, finish, own_folder, raw, run

TOOL = os.environ["OPTIM_TOOL"]
LIMIT = 5e-6  # of a tensor's largest difference to its largest element; what was found is printed
worst = {}
source = os.path.dirname(os.path.abspath(__file__))
os.chdir(own_folder())
torch.manual_seed(1)
torch.set_num_threads(1)
SPECS = {  # ours, torch's
    "plain": ("sgd:0.05,0,0,0,0", torch.optim.SGD, dict(lr=0.05)),
    "decay": ("sgd:0.05,0,0,0.01,0", torch.optim.SGD, dict(lr=0.05, weight_decay=0.01)),
    "momentum": ("sgd:0.02,0.9,0,0.001,0", torch.optim.SGD, dict(lr=0.02, momentum=0.9, weight_decay=1e-3)),
    "dampening": ("sgd:0.03,0.8,0.3,0,0", torch.optim.SGD, dict(lr=0.03, momentum=0.8, dampening=0.3)),
    "nesterov": ("sgd:0.02,0.9,0,0.001,1", torch.optim.SGD, dict(lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3)),
    "adam": ("adam:0.003,0.9,0.999,1e-8,0.01", torch.optim.Adam, dict(lr=0.003, weight_decay=0.01)),
    "adamw": ("adamw:0.003,0.8,0.99,1e-6,0.05", torch.optim.AdamW, dict(lr=0.003, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.05)),
}


def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(144, 5))


def train(model, o, start, count):
    for s in range(start, start + count):
        x = torch.tensor([((i * 37 + s * 11) % 101 - 50) / 50 for i in range(432)]).view(4, 3, 6, 6)
        o.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), torch.tensor([(i + s) % 5 for i in range(4)])).backward()
        o.step()


def made(spec, groups=False, reverse=False, frozen=False, filtered=False, named=False):
    """A net and its optimiser, ten steps on. groups: the head with twice the rate and no decay."""
    model = net()
    if frozen:
        for p in model[0].parameters():
            p.requires_grad = False
    _, cls, settings = SPECS[spec]
    parameters = [p for p in model.parameters() if p.requires_grad] if filtered else list(model.parameters())
    if groups:
        head = {"params": list(model[4].parameters()), "lr": 2 * settings["lr"], "weight_decay": 0}
        parts = [{"params": [p for p in parameters if all(p is not q for q in head["params"])]}, head]
        parameters = parts[::-1] if reverse else parts
    elif named:
        parameters = list(model.named_parameters())[::-1]
    o = cls(parameters, **settings)
    train(model, o, 0, 10)
    return model, o


def tool(*args, fails=None):
    r = run(TOOL, *[str(a) for a in args])
    if fails is None:
        check(r.returncode == 0, "%s: %s" % (args, r.stderr))
    else:
        check(r.returncode == 1 and fails in r.stderr, "%s: %d %s" % (args, r.returncode, r.stderr))
    return r


def far(a, b):
    a, b = a.double(), b.double()
    return 0.0 if a.numel() == 0 else ((a - b).abs().max() / b.abs().max().clamp(min=1e-12)).item()


def compare(model, optimizer, wanted_model, wanted_optimizer, what):
    """Two state_dicts each; optimisers' states in the order of their groups."""
    found = {k: far(model[k], v) for k, v in wanted_model.items()}
    # Means of values on both sides of zero: their rounding is that of the values.
    means, values = wanted_model["1.running_mean"], wanted_model["1.running_var"].sqrt()
    found["1.running_mean"] = ((model["1.running_mean"] - means).abs() / values).max().item()
    check(list(model) == list(wanted_model), what + ": names")
    mine = [n for g in optimizer["param_groups"] for n in g["params"]]
    theirs = [n for g in wanted_optimizer["param_groups"] for n in g["params"]]
    check(len(mine) == len(theirs), what + ": parameters")
    for a, b in zip(mine, theirs):
        s, t = optimizer["state"].get(a, {}), wanted_optimizer["state"].get(b, {})
        present = {k for k, v in t.items() if v is not None}
        check({k for k, v in s.items() if v is not None} == present, "%s: state of %d is %s" % (what, b, list(s)))
        for k in present & set(s):
            found["%d.%s" % (b, k)] = far(torch.as_tensor(s[k]), torch.as_tensor(t[k]))
    for g, h in zip(optimizer["param_groups"], wanted_optimizer["param_groups"]):
        for k in ("lr", "momentum", "dampening", "weight_decay", "nesterov", "betas", "eps"):
            check(g.get(k) == h.get(k), "%s: %s is %r, not %r" % (what, k, g.get(k), h.get(k)))
    top = max(found, key=found.get)
    kind = what.split(",")[0]
    worst[kind] = max(worst.get(kind, (0, "")), (found[top], top))
    check(found[top] <= LIMIT, "%s: %s is off by %.2e" % (what, top, found[top]))


def load(path):
    try:
        return torch.load(path, weights_only=CURRENT)
    except TypeError:
        return torch.load(path)


def ids(state):
    """As PyTorch had it until 2019: keyed by where Python objects were."""
    shuffled = list(range(47163075480936, 47163075480936 + 8 * len(state["state"]) + 80, 8))
    random.Random(3).shuffle(shuffled)
    state = {"state": dict(state["state"]), "param_groups": [dict(g) for g in state["param_groups"]]}
    new = {}
    for g in state["param_groups"]:
        for n in g["params"]:
            new[n] = shuffled.pop()
        g["params"] = [new[n] for n in g["params"]]
    state["state"] = {new[n]: s for n, s in sorted(state["state"].items(), key=lambda x: new[x[0]])}
    return state


def there_and_back(spec, model, o, flags="", wrap=None, keys=(), what="", **save):
    """Ten steps are done. Muster goes on for twenty, torch with what it wrote for twenty more."""
    wrap = wrap or (lambda m, s: {"model": m, "optimizer": s, "epoch": 3})
    what = "%s, %s" % (spec, what)
    state = o.state_dict()
    torch.save(wrap(model.state_dict(), state), "in.pt", **save)
    r = tool("net", SPECS[spec][0], flags, 10, 20, "in.pt", "out.pt", *keys)
    train(model, o, 10, 20)
    if r.returncode != 0:
        return
    got = load("out.pt")
    compare(got["model"], got["optimizer"], model.state_dict(), o.state_dict(), what)
    again, p = net(), None
    again.load_state_dict(got["model"])
    groups = [[q for q, r in zip(again.parameters(), model.parameters()) if any(r is x for x in g["params"])] for g in o.param_groups]
    for q, r in zip(again.parameters(), model.parameters()):
        q.requires_grad = r.requires_grad
    p = type(o)([{"params": g} for g in groups], lr=1)
    p.load_state_dict(got["optimizer"])
    train(again, p, 30, 20)
    train(model, o, 30, 20)
    compare(again.state_dict(), p.state_dict(), model.state_dict(), o.state_dict(), what + ", and back")


def both_ways():
    for spec in SPECS:
        there_and_back(spec, *made(spec), what="from torch")
        # from Muster: ten steps there, twenty in torch against twenty in Muster
        tool("net", SPECS[spec][0], "", 0, 10, "-", "ten.pt")
        tool("net", SPECS[spec][0], "", 10, 20, "ten.pt", "thirty.pt")
        ten, thirty = load("ten.pt"), load("thirty.pt")
        model = net()
        model.load_state_dict(ten["model"])
        o = SPECS[spec][1](model.parameters(), lr=1)
        o.load_state_dict(ten["optimizer"])
        train(model, o, 10, 20)
        compare(thirty["model"], thirty["optimizer"], model.state_dict(), o.state_dict(), spec + ", from Muster")
        there_and_back(spec, *made(spec), flags="r", what="two ranks")
    for spec in ("momentum", "adam"):
        there_and_back(spec, *made(spec), what="legacy file", _use_new_zipfile_serialization=False)


def zero_worker(rank, spec):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    dist = torch.distributed
    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=rank, world_size=2)
    torch.manual_seed(9)
    model = net()
    _, cls, settings = SPECS[spec]
    o = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=cls, **settings)
    train(model, o, 0, 10)
    o.consolidate_state_dict(0)
    if rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": o.state_dict(), "epoch": 3}, "zero.pt")
    dist.barrier()


def zero():
    """PyTorch's ZeroRedundancyOptimizer over two processes; Muster's sharded optimiser over two ranks goes on from what it
    wrote, and torch from what Muster wrote."""
    for spec in ("nesterov", "adamw"):
        if os.path.exists("store"):
            os.remove("store")
        torch.multiprocessing.start_processes(zero_worker, (spec,), nprocs=2, start_method="fork")
        torch.manual_seed(9)
        model = net()
        o = SPECS[spec][1](model.parameters(), **SPECS[spec][2])
        train(model, o, 0, 10)
        tool("net", SPECS[spec][0], "rs", 10, 20, "zero.pt", "out.pt")
        train(model, o, 10, 20)
        got = load("out.pt")
        compare(got["model"], got["optimizer"], model.state_dict(), o.state_dict(), spec + ", from ZeRO")
        there_and_back(spec, *made(spec, groups=True), flags="rsg", what="sharded")


def layouts():
    forms = {
        "imagenet": (lambda m, s: {"epoch": 4, "arch": "x", "state_dict": {"module." + k: v for k, v in m.items()},
                                   "best_acc1": torch.tensor(5.0), "optimizer": s, "scheduler": {"last_epoch": 3}}, ()),
        "tutorial": (lambda m, s: {"epoch": 4, "model_state_dict": m, "optimizer_state_dict": s, "loss": 0.5}, ()),
        "lightning": (lambda m, s: {"epoch": 4, "global_step": 10, "pytorch-lightning_version": "1.9", "lr_schedulers": [],
                                    "state_dict": {"model." + k: v for k, v in m.items()}, "optimizer_states": [s]}, ()),
        "net": (lambda m, s: {"net": m, "optim": s}, ()),
        "ids": (lambda m, s: {"state_dict": m, "optimizer": ids(s), "epoch": 4}, ()),
        "ema": (lambda m, s: {"net": m, "ema": {k: torch.zeros_like(v) for k, v in m.items()}, "optim": s}, ("net",)),
        "gan": (lambda m, s: {"netG": m, "optimG": s, "optimD": {"state": {}, "param_groups": [{"lr": 1, "params": [0]}]}},
                ("-", "optimG")),
        "steps are ints": (lambda m, s: {"model": m, "optimizer": {"param_groups": s["param_groups"], "state": {
            n: {k: int(v) if k == "step" else v for k, v in x.items()} for n, x in s["state"].items()}}}, ()),
    }
    for name, (form, keys) in forms.items():
        for spec in ("momentum", "adamw"):
            there_and_back(spec, *made(spec), wrap=form, keys=keys, what=name)
    r = tool("net", SPECS["adamw"][0], "", 10, 0, "in.pt", "-")
    check("epoch=0 step=10 seed=5 steps=10" in r.stdout and "\"epoch\"" in r.stderr, "numbers that are missing: " + r.stdout + r.stderr)
    model, o = made("momentum")
    torch.save(forms["lightning"][0](model.state_dict(), o.state_dict()), "in.pt")
    r = tool("net", SPECS["momentum"][0], "", 10, 0, "in.pt", "-")
    check("epoch=4 step=10 seed=5" in r.stdout, "numbers: " + r.stdout)
    # the optimiser alone, into an optimiser alone
    torch.save({"w": model.state_dict(), "o": o.state_dict()}, "in.pt")
    tool("net", SPECS["momentum"][0], "o", 10, 20, "in.pt", "out.optim")
    train(model, o, 10, 20)
    compare(model.state_dict(), load("out.optim"), model.state_dict(), o.state_dict(), "momentum, alone")
    torch.save(o.state_dict(), "alone.pt")
    tool("net", SPECS["momentum"][0], "", 10, 0, "alone.pt", "-", fails="alone.pt")


def groups():
    for spec in ("momentum", "adamw"):
        there_and_back(spec, *made(spec, groups=True), flags="g", what="groups")
        model, o = made(spec, groups=True, reverse=True)
        torch.save({"model": model.state_dict(), "optimizer": o.state_dict()}, "in.pt")
        r = tool("net", SPECS[spec][0], "g", 10, 20, "in.pt", "out.pt")
        check("another order" in r.stderr, "groups in another order are said: " + r.stderr)
        train(model, o, 10, 20)
        state = o.state_dict()
        state["param_groups"].reverse()
        got = load("out.pt")
        compare(got["model"], got["optimizer"], model.state_dict(), state, spec + ", groups in another order")
        there_and_back(spec, *made(spec, frozen=True), flags="z", what="frozen")
        there_and_back(spec, *made(spec, frozen=True, filtered=True), flags="zt", what="frozen left out")
        if CURRENT:
            model, o = made(spec, named=True)
            torch.save({"model": model.state_dict(), "optimizer": o.state_dict()}, "in.pt")
            tool("net", SPECS[spec][0], "", 10, 20, "in.pt", "out.pt")
            train(model, o, 10, 20)
            check(max(far(load("out.pt")["model"][k], v) for k, v in model.state_dict().items()) <= LIMIT, spec + ", by names")
    orders()
    rates()
    # the file's settings, as load_state_dict takes them; the program's, with a warning
    other = "sgd:1,0,0,0,0"
    for spec in ("momentum", "dampening", "nesterov", "plain"):
        model, o = made(spec)
        torch.save({"model": model.state_dict(), "optimizer": o.state_dict()}, "in.pt")
        tool("net", other, "f", 10, 20, "in.pt", "out.pt")
        train(model, o, 10, 20)
        got = load("out.pt")
        compare(got["model"], got["optimizer"], model.state_dict(), o.state_dict(), spec + ", settings taken")
    r = tool("net", SPECS["momentum"][0], "", 10, 0, "in.pt", "-")
    check("momentum was 0 in the file, goes on as 0.9" in r.stderr and "lr=0.05" in r.stdout, "settings differ: " + r.stdout + r.stderr)
    # a rate that is a tensor, parameters that have no state yet
    model, o = made("adam")
    state = o.state_dict()
    state["param_groups"][0]["lr"] = torch.tensor(0.004, dtype=torch.float64)
    del state["state"][0]
    state["state"][1] = {}
    torch.save({"model": model.state_dict(), "optimizer": state}, "in.pt")
    r = tool("net", SPECS["adam"][0], "", 10, 20, "in.pt", "out.pt")
    p = torch.optim.Adam(model.parameters(), lr=0.004, weight_decay=0.01)
    state["param_groups"][0]["lr"] = 0.004
    del state["state"][1]
    p.load_state_dict(state)
    train(model, p, 10, 20)
    compare(load("out.pt")["model"], load("out.pt")["optimizer"], model.state_dict(), p.state_dict(), "adam, some without state")


def orders():
    """Three weights of one shape, which only their order tells apart: that of the file's model, whatever ours is."""
    for order in ("bca", "cba", "acb"):
        theirs, ours = nn.ModuleDict({n: nn.Linear(2, 2, bias=False) for n in order}), {n + ".weight": torch.zeros(2, 2) for n in "abc"}
        o = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
        sum((p * torch.randn(2, 2)).sum() for p in theirs.parameters()).backward()
        o.step()
        torch.save({"state_dict": ours}, "ours.pt")
        torch.save({"state_dict": theirs.state_dict(), "optimizer": o.state_dict()}, "in.pt")
        tool("ours.pt", "sgd:0.1,0.9,0,0,0", "", 0, 0, "in.pt", "out.pt")
        got = load("out.pt")
        check(list(got["model"]) == list(ours), "orders: ours is ours")
        for i, name in enumerate(got["model"]):
            check(raw(got["optimizer"]["state"][i]["momentum_buffer"]) == raw(o.state[theirs[name[0]].weight]["momentum_buffer"]),
                  "momentum of %s, the file's model in the order %s" % (name, order))


def rates():
    """What a schedule makes of the groups' rates after a load: PyTorch's multiply those that groups began with."""
    def follow(rates, factor, initial):
        model = net()
        groups = [{"params": list(model[:4].parameters()), "lr": rates[0]}, {"params": list(model[4].parameters()), "lr": rates[1]}]
        o = torch.optim.SGD(groups, lr=1, momentum=0.9)
        if initial:
            for g, r in zip(o.param_groups, initial):
                g["initial_lr"] = r
        torch.save({"model": model.state_dict(), "optimizer": o.state_dict()}, "in.pt")
        for flag in ("", "o", "r"):
            tool("net", SPECS["momentum"][0], "gl" + flag, 0, 0, "in.pt", "out.pt")
            state = load("out.pt")
            got = [g["lr"] for g in state.get("optimizer", state)["param_groups"]]
            # the program names the first group's rate
            check(got[0] == 0.01 and abs(got[1] - 0.01 * factor) < 1e-12,
                  "rates %s, at first %s: set to 0.01 they are %s, flags '%s'" % (rates, initial, got, flag))
    follow((0.05, 0.15), 3, None)
    model = net()
    o = torch.optim.SGD([{"params": model[:4].parameters(), "lr": 0.02}, {"params": model[4].parameters(), "lr": 0.1}], lr=1)
    schedule = torch.optim.lr_scheduler.LambdaLR(o, [lambda s: 0.5 ** s, lambda s: 0.25 ** s])
    o.step()
    schedule.step()
    now, first = [g["lr"] for g in o.param_groups], [g["initial_lr"] for g in o.param_groups]
    check(now[1] / now[0] != first[1] / first[0], "rates have gone ways of their own")
    follow(now, first[1] / first[0], first)
    follow((0.0, 0.0), 2, None)  # in a warm-up: the program's own factor
    follow((0.0, 0.0), 5, (0.1, 0.5))


def refused():
    def file(cls, change=None, **settings):
        model = net()
        o = cls(model.parameters(), **settings)
        train(model, o, 0, 2)
        d = {"model": model.state_dict(), "optimizer": o.state_dict(), "epoch": 1}
        if change:
            change(d)
        torch.save(d, "no.pt")
    optim = torch.optim
    cases = [(optim.ASGD, {}, "ASGD"), (optim.RMSprop, {}, "RMSprop"), (optim.Adagrad, {}, "Adagrad"), (optim.Adadelta, {}, "Adadelta"),
             (optim.Adamax, {}, "Adamax"), (optim.NAdam, {}, "NAdam"), (optim.RAdam, {}, "RAdam"), (optim.Rprop, {}, "Rprop")]
    for cls, settings, word in cases:
        file(cls, **settings)
        tool("net", SPECS["adam"][0], "", 0, 0, "no.pt", "-", fails=word)
        tool("net", SPECS["momentum"][0], "f", 0, 0, "no.pt", "-", fails=word)
    file(optim.Adam, amsgrad=True)
    tool("net", SPECS["adam"][0], "", 0, 0, "no.pt", "-", fails="amsgrad")
    file(optim.SGD, lr=1e-3, maximize=True)
    tool("net", SPECS["plain"][0], "", 0, 0, "no.pt", "-", fails="maximize")
    file(optim.SGD, lr=1e-3, momentum=0.5)
    tool("net", SPECS["adam"][0], "", 0, 0, "no.pt", "-", fails="SGD")
    def broken(change, word, spec="momentum"):
        file(SPECS[spec][1], change, **SPECS[spec][2])
        tool("net", SPECS[spec][0], "f", 0, 0, "no.pt", "-", fails=word)
    def group(d, **new):
        d["optimizer"]["param_groups"][0].update(new)
    broken(lambda d: group(d, params=[0, 1, 2, 3]), "4 parameters")
    broken(lambda d: group(d, params=[0, 1, 2, 3, 3]), "twice")
    broken(lambda d: group(d, params=list("abcde")), "not numbers")
    broken(lambda d: group(d, params=None), "no list")
    broken(lambda d: group(d, lr=float("nan")), "lr is out of range")
    broken(lambda d: group(d, betas=(0.9, 1.5)), "betas is out of range", "adam")
    broken(lambda d: d["optimizer"]["state"].update({9: {}}), "no group has")
    broken(lambda d: d["optimizer"]["param_groups"].append({"params": [7], "lr": 1.0, "momentum": 0}), "parameter")
    broken(lambda d: d["optimizer"]["state"][1].update(momentum_buffer=torch.ones(7)), "another shape than 1.weight")
    broken(lambda d: d["optimizer"]["state"][1].update(momentum_buffer="x"), "momentum_buffer")
    broken(lambda d: d["optimizer"]["state"][1].update(trust=torch.ones(4)), "'trust'")
    broken(lambda d: d["optimizer"]["state"][1].update(max_exp_avg_sq=torch.ones(4)), "amsgrad", "adam")
    broken(lambda d: d["optimizer"]["state"][1].pop("step"), "step", "adam")
    broken(lambda d: d["optimizer"]["state"][1].update(step=-1), "negative", "adam")
    broken(lambda d: d.update(second=dict(d["optimizer"])), "\"optimizer\" (5 parameters), \"second\" (5 parameters)")
    broken(lambda d: d.pop("optimizer"), "no training checkpoint")
    broken(lambda d: d.pop("model"), "no.pt")


def real():
    """The CGCNN model of 2018, whose optimiser's state is keyed by object ids."""
    path = os.path.join(SHARED, "cases/real/txie-93+cgcnn/pre-trained/band-gap.pth.tar")
    if not os.path.exists(path):
        print("no", path)
        sys.exit(77)
    tool(path, "sgd:1,0.9,0,0,0", "f", 0, 0, path, "out.pt")
    want, got = torch.load(path, map_location="cpu")["optimizer"], torch.load("out.pt")["optimizer"]
    order = [n for g in want["param_groups"] for n in g["params"]]
    mine = [n for g in got["param_groups"] for n in g["params"]]
    check(len(mine) == len(order) and len(want["state"]) > 10, "as many parameters")
    for a, b in zip(mine, order):
        check(raw(got["state"][a]["momentum_buffer"]) == raw(want["state"][b]["momentum_buffer"]), "momentum of %d" % a)
    check(got["param_groups"][0]["lr"] == want["param_groups"][0]["lr"], "its learning rate")


for part in ["both_ways", "zero", "layouts", "groups", "refused", "real"] if CURRENT else sys.argv[1:]:
    globals()[part]()
for kind, (value, where) in sorted(worst.items()):
    print("%-10s largest difference %.1e (%s)" % (kind, value, where))
finish()

"""The workloads of `make bench`: what each runs, how long, and with which peers.

A step workload's flags are those of `muster bench step` and of torch_step.py. Steps are few where a step takes seconds, and so
are rounds: the rounds, not the steps of one round, are what the spread is over. DDP's settings are compared where the
reduction is much of the step (`settings`); elsewhere DDP has its defaults."""

WARM_UP = 2
RANKS = 2
ROUNDS = 5
LEARNING_RATE = 0.001  # small, so that rounding does not grow into different losses within a run
MODELS = {
    "resnet18-224": {"title": "ResNet-18, 8x3x224x224", "model": "resnet18", "channels": 3, "side": 224, "batch": 8,
                     "classes": 1000, "steps": 3, "rounds": 3},
    "resnet18-32": {"title": "ResNet-18, 64x3x32x32", "model": "resnet18", "channels": 3, "side": 32, "batch": 64,
                    "classes": 1000, "steps": 6, "settings": True},
    "resnet18-cifar": {"title": "ResNet-18, CIFAR stem, 32x3x32x32", "model": "resnet18", "channels": 3, "side": 32,
                       "batch": 32, "classes": 10, "cifar_stem": True, "steps": 3, "rounds": 3},
    "resnet20": {"title": "ResNet-20 on Fashion-MNIST, 128x1x28x28", "model": "resnet20", "channels": 1, "side": 28,
                 "batch": 128, "classes": 10, "fashion": True, "steps": 6},
    "cnn": {"title": "small CNN, 64x1x28x28", "model": "cnn", "channels": 1, "side": 28, "batch": 64, "classes": 10,
            "steps": 40},
    "mlp": {"title": "MLP 784-256-128-10, batch 64", "model": "mlp", "channels": 1, "side": 28, "batch": 64, "classes": 10,
            "steps": 600, "settings": True},
}
SIZES = {"4 KiB": (4 << 10, 2000), "1 MiB": (1 << 20, 300), "25 MiB": (25 << 20, 20), "100 MiB": (100 << 20, 8)}
DDP = ("default", "bucket_view", "static_graph", "find_unused")


def select(pattern):
    """Workloads by name: each model alone, with two ranks, what DDP adds, and all-reduce. pattern: names by commas, a * at
    an end for all that begin so; empty for all."""
    everything = {}
    for name, w in MODELS.items():
        everything[name] = dict(w, name=name, kind="step", ranks=1)
    for name, w in MODELS.items():
        everything[name + "-ddp"] = dict(w, name=name + "-ddp", kind="step", ranks=RANKS, title=w["title"] + f", {RANKS} ranks")
    threads = MODELS["resnet18-32"]
    everything["resnet18-32-threads"] = dict(threads, name="resnet18-32-threads", kind="step", ranks=1, threads=2,
                                             title=threads["title"] + ", 2 threads")
    for name, of in (("overhead", "resnet18-224"), ("overhead-mlp", "mlp")):
        everything[name] = dict(MODELS[of], name=name, kind="overhead", ranks=RANKS, rounds=ROUNDS,
                                title=f"{MODELS[of]['title']}, {RANKS} ranks with DDP against {RANKS} apart")
    everything["allreduce"] = {"name": "allreduce", "kind": "allreduce", "ranks": RANKS, "title": "all-reduce in place"}
    if not pattern:
        return list(everything.values())
    wanted = []
    for part in pattern.split(","):
        found = [n for n in everything if n == part or part.endswith("*") and n.startswith(part[:-1])]
        if not found:
            raise SystemExit(f"WORKLOADS: no workload {part}; there are {', '.join(everything)}")
        wanted += [n for n in found if n not in wanted]
    return [everything[n] for n in wanted]


def step_flags(w, folder, quick):
    flags = []
    for key in ("model", "channels", "side", "classes", "batch", "ranks"):
        flags += ["--" + key, str(w[key])]
    flags += ["--cifar-stem"] if w.get("cifar_stem") else []
    flags += ["--threads", str(w.get("threads", 1))]
    return flags + ["--steps", "2" if quick else str(w["steps"]), "--warmup", str(WARM_UP), "--lr", str(LEARNING_RATE),
                    "--from", folder + "/weights.pth", "--batch-from", folder + "/batch.pth", "--json"]


def step_contestants(w, peers, flags):
    """(name, command, environment) of each, Muster first."""
    yield "Muster", peers.muster("step", flags), {}
    if peers.winograd and w["model"] == "resnet18":
        yield "Muster, direct convolutions only", peers.muster("step", flags + ["--no-winograd"]), {}
    convolutions = w["model"] != "mlp"
    for torch in peers.torches:
        stock = torch.command("torch_step.py", flags)
        yield torch.name, stock, {}
        yield f"{torch.name}, pages kept", stock, peers.KEEP_PAGES
        best = stock + ["--channels-last"] if convolutions else stock
        named = f"{torch.name}, pages kept" + (", channels_last" if convolutions else "")
        if convolutions:
            yield named, best, peers.KEEP_PAGES
        if w["ranks"] > 1 and w.get("settings"):
            for setting in DDP[1:]:
                yield f"{named}, {setting}", best + ["--ddp", setting], peers.KEEP_PAGES


def overhead_contestants(w, peers, flags):
    """Pairs: each with DDP, then the same ranks apart."""
    layout, named = ([], "") if w["model"] == "mlp" else (["--channels-last"], ", channels_last")
    for apart, more in (("", []), (", apart", ["--no-ddp"])):
        yield "Muster" + apart, peers.muster("step", flags + more), {}
        for torch in peers.torches:
            command = torch.command("torch_step.py", flags + layout + more)
            yield f"{torch.name}, pages kept{named}{apart}", command, peers.KEEP_PAGES


def allreduce_contestants(w, peers, quick):
    sizes = {k: (b, 2 if quick else n) for k, (b, n) in SIZES.items() if not quick or b <= 1 << 20}
    arguments = [f"{b}:{n}" for b, n in sizes.values()]
    yield "Muster", peers.muster("allreduce", ["--ranks", str(w["ranks"]), "--sizes",
                                               ",".join(str(b) for b, _ in sizes.values())]
                                 + (["--iterations", "2"] if quick else []) + ["--json"]), {}
    for mpi in peers.mpis:
        yield mpi.name, mpi.command(w["ranks"], arguments), mpi.environment
    for torch in peers.torches:
        yield f"gloo of {torch.name}", torch.command("gloo_allreduce.py", ["--ranks", str(w["ranks"])] + arguments), {}

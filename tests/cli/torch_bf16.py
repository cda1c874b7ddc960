#!/usr/bin/python3
"""torch_bf16.py TEN_STEPS MODEL: ten steps with bf16 against the same in PyTorch under torch.autocast, from the same
checkpoint on the same batches. Losses must be within one rounding to bfloat16 of PyTorch's float32, so within two of each
other; and neither they nor the weights may be much farther from float32's than autocast's are."""
import os
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F

import torch_steps as steps

UNIT = 2.0 ** -8  # one rounding


def autocast(model, initial, batches):
    net = steps.build(model)
    net.load_state_dict(initial, strict=True)
    sgd = torch.optim.SGD(net.parameters(), lr=steps.SHAPES[model][3], momentum=steps.MOMENTUM, weight_decay=steps.DECAY)
    losses = []
    for x, y in batches:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(x), y)
        sgd.zero_grad(set_to_none=True)
        loss.backward()
        sgd.step()
        losses.append(loss.item())
    return losses, net.state_dict()


def main():
    program, model = sys.argv[1:3]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        subprocess.run([program, model, work, "bf16"], check=True, timeout=300)
        initial, final = (torch.load(os.path.join(work, name + ".pth")) for name in ("initial", "final"))
        with open(os.path.join(work, "losses.txt"), encoding="utf-8") as f:
            ours = [float(line) for line in f]
        with open(os.path.join(work, "batches.bin"), "rb") as f:
            batches = list(steps.read_batches(f.read(), steps.SHAPES[model]))
    assert len(ours) == len(batches) == 10
    assert all(v.dtype in (torch.float32, torch.int64) for v in final.values()), "the checkpoint is not float32"
    theirs, their_state = autocast(model, initial, batches)
    judge, judge_state = steps.train(model, initial, batches, torch.float32)
    for step, (a, b, j) in enumerate(zip(ours, theirs, judge), 1):
        print(f"step {step:2d}: muster {a:.7f}  autocast {b:.7f}  float32 {j:.7f}")
    def far(a, b):
        return max(abs(x - y) / abs(y) for x, y in zip(a, b))
    apart, mine, its = far(ours, theirs), far(ours, judge), far(theirs, judge)
    moved = steps.distance(initial, judge_state)
    ends = [steps.distance(a, b) / moved for a, b in ((final, judge_state), (their_state, judge_state), (final, their_state))]
    print(f"{model}: losses apart {apart:.1e} relative, from float32's {mine:.1e}, autocast's {its:.1e}; weights end "
          f"{ends[0]:.1e} of their way from float32's, autocast's {ends[1]:.1e}, apart {ends[2]:.1e}")
    assert mine > 1e-6, "this is float32"
    assert apart < 2 * UNIT and mine < UNIT and mine < 2 * its, "losses differ"
    assert ends[0] < 1.5 * ends[1], "weights differ"
    return 0


if __name__ == "__main__":
    sys.exit(main())

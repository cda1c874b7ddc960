"""The networks of `muster bench step` in PyTorch, with the names of Muster's state dicts: ResNet-18 as torchvision defines it
(which is not imported: it would only make PyTorch's start slower), ResNet-20 of torch_train.py, the small CNN, the MLP."""
import torch.nn as nn
import torch.nn.functional as F


class BasicBlock(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.downsample = None
        if stride != 1 or cin != cout:
            self.downsample = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True)))
        y += x if self.downsample is None else self.downsample(x)
        return F.relu(y, inplace=True)


class ResNet18(nn.Module):
    def __init__(self, channels, classes, cifar_stem=False):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 3, 1, 1, bias=False) if cifar_stem else nn.Conv2d(channels, 64, 7, 2, 3,
                                                                                               bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.Identity() if cifar_stem else nn.MaxPool2d(3, 2, 1)
        widths = [64, 64, 128, 256, 512]
        for i in range(1, 5):
            setattr(self, f"layer{i}", nn.Sequential(BasicBlock(widths[i - 1], widths[i], 1 if i == 1 else 2),
                                                     BasicBlock(widths[i], widths[i], 1)))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, classes)

    def forward(self, x):
        x = self.maxpool(F.relu(self.bn1(self.conv1(x)), inplace=True))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


class Cnn(nn.Module):
    def __init__(self, channels, side, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.fc1 = nn.Linear(64 * (side // 4) ** 2, 128)
        self.fc2 = nn.Linear(128, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class Mlp(nn.Sequential):
    def __init__(self, inputs, classes):
        super().__init__(nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, classes))

    def forward(self, x):
        return super().forward(x.flatten(1))


def build(model, channels, side, classes, cifar_stem=False):
    if model == "resnet18":
        return ResNet18(channels, classes, cifar_stem)
    if model == "resnet20":
        from torch_train import ResNet20  # wants NumPy, which not every PyTorch has beside it
        return ResNet20(channels, classes)
    if model == "cnn":
        return Cnn(channels, side, classes)
    if model == "mlp":
        return Mlp(channels * side * side, classes)
    raise SystemExit(f"no model {model} in torch_models.py")

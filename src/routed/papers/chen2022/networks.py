"""Experts that are whole networks on images, of any width (Chen et al. 2022, A.3): a CNN, MobileNetV2 and ResNet18.

Layers are those of the paper's code, which follows kuangliu/pytorch-cifar, for images of 32 x 32: no early stride or
pooling. Its batch normalisation is left out: statistics of those samples that a router sends to an expert would make
what the expert computes for an image depend on the others, and so on the router, and their code takes them over images
of zeros where others are routed elsewhere. Groups of up to 8 channels of one image are normalised instead (Wu and He
2018), so that an expert is a function of an image, in training and at evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import flax.linen as nn
from jaxtyping import Array, Float

from routed.experts.expert import Expert
from routed.papers.chen2022.image_layers import START, Convolution, Depthwise, Norm
from routed.settings.setting import Setting

#: MobileNetV2 for small images: expansion, channels where the first convolution has 32, blocks, stride of the first of
#: them.
INVERTED = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
FIRST, LAST = 32, 1280
#: ResNet18: filters in units of the width, and stride, of each block.
RESIDUAL = ((1, 1), (1, 1), (2, 2), (2, 1), (4, 2), (4, 1), (8, 2), (8, 1))


class Network(nn.Module):
    """Linear in the embedding that `body(width)` makes of an image; width: filters of its first convolution."""

    outputs: int
    width: int
    body: Callable[[int], nn.Module]

    def setup(self):
        self.layers = self.body(self.width)
        self.head = nn.Dense(self.outputs, kernel_init=START)

    def embed(self, x: Float[Array, "T H W C"]) -> Float[Array, "T F"]:
        """Returns the input of the last layer, which is linear."""
        return self.layers(x)

    def __call__(self, x: Float[Array, "T H W C"]) -> Float[Array, "T O"]:
        return self.head(self.embed(x))


class ConvNet(nn.Module):
    """Two convolutions with biases, ReLU and the maximum of 2 x 2 positions; the second has 2 width filters."""

    width: int

    @nn.compact
    def __call__(self, x: Float[Array, "T H W C"]) -> Float[Array, "T F"]:
        for filters in (self.width, 2 * self.width):
            x = nn.relu(Convolution(filters, bias=True)(x))
            samples, high, wide, channels = x.shape
            x = x.reshape(samples, high // 2, 2, wide // 2, 2, channels).max((2, 4))
        return x.reshape(len(x), -1)


class ResNet18(nn.Module):
    """Four stages of two residual blocks (He et al. 2016), each of twice the filters and half the side of the last."""

    width: int

    @nn.compact
    def __call__(self, x: Float[Array, "T H W C"]) -> Float[Array, "T F"]:
        x = nn.relu(Norm()(Convolution(self.width)(x)))
        for factor, stride in RESIDUAL:
            filters = factor * self.width
            y = nn.relu(Norm()(Convolution(filters, stride=stride)(x)))
            y = Norm()(Convolution(filters)(y))
            if stride > 1 or filters != x.shape[-1]:
                x = Norm()(Convolution(filters, 1, stride)(x))
            x = nn.relu(x + y)
        return x.mean((1, 2))


class MobileNetV2(nn.Module):
    """Inverted residual blocks (Sandler et al. 2018); as released, each of stride 1 has a shortcut."""

    width: int

    @nn.compact
    def __call__(self, x: Float[Array, "T H W C"]) -> Float[Array, "T F"]:
        x = nn.relu(Norm()(Convolution(self.width)(x)))
        for expansion, filters, stride in _blocks(self.width):
            y = nn.relu(Norm()(Convolution(expansion * x.shape[-1], 1)(x)))
            y = nn.relu(Norm()(Depthwise(stride)(y)))
            y = Norm()(Convolution(filters, 1)(y))
            if stride == 1:
                y += Norm()(Convolution(filters, 1)(x)) if filters != x.shape[-1] else x
            x = y
        return nn.relu(Norm()(Convolution(scaled(LAST, self.width), 1)(x))).mean((1, 2))


def _blocks(width: int) -> Iterator[tuple[int, int, int]]:
    """Yields expansion, filters and stride of each inverted block."""
    for expansion, channels, blocks, stride in INVERTED:
        for i in range(blocks):
            yield expansion, scaled(channels, width), stride if i == 0 else 1


def scaled(channels: int, width: int) -> int:
    """Returns channels in proportion to those of the first convolution, at least one."""
    return max(1, round(channels * width / FIRST))


def flops_of_conv_net(width: int, side: int, channels: int, outputs: int) -> float:
    """Returns products and sums of an image, forward: 2 for each weight and position that it serves."""
    half, quarter = side // 2, side // 4
    served = side**2 * 9 * channels * width + half**2 * 9 * width * 2 * width + quarter**2 * 2 * width * outputs
    return 2.0 * served


def flops_of_resnet18(width: int, side: int, channels: int, outputs: int) -> float:
    """Returns products and sums of an image through ResNet18, counted as in `flops_of_conv_net`."""
    served, inputs = side**2 * 9 * channels * width, width
    for factor, stride in RESIDUAL:
        filters, side = factor * width, -(-side // stride)
        shortcut = inputs * (stride > 1 or filters != inputs)
        served += side**2 * filters * (9 * inputs + 9 * filters + shortcut)
        inputs = filters
    return 2.0 * (served + inputs * outputs)


def flops_of_mobilenet_v2(width: int, side: int, channels: int, outputs: int) -> float:
    """Returns products and sums of an image through MobileNetV2, counted as in `flops_of_conv_net`."""
    served, inputs = side**2 * 9 * channels * width, width
    for expansion, filters, stride in _blocks(width):
        hidden, after = expansion * inputs, -(-side // stride)
        shortcut = inputs * (stride == 1 and filters != inputs)
        served += side**2 * inputs * hidden + after**2 * (9 * hidden + hidden * filters + shortcut * filters)
        inputs, side = filters, after
    last = scaled(LAST, width)
    return 2.0 * (served + side**2 * inputs * last + last * outputs)


def _expert(body: Callable[[int], nn.Module], flops: Callable[[int, int, int, int], float]) -> Expert:
    """Declares an expert that is a whole network on images."""
    make = lambda node, outputs: Network(outputs, node.width, body)  # noqa: E731
    return Expert(make, tokens=("images",), reads=("width",), flops=flops, embeds=True, settings=EMBEDDINGS)


EMBEDDINGS = {
    "embeddings": Setting(False, "evaluations keep what every expert makes of the first test images (plots `latent`)")
}
CONV_NET = _expert(ConvNet, flops_of_conv_net)
MOBILENET_V2 = _expert(MobileNetV2, flops_of_mobilenet_v2)
RESNET18 = _expert(ResNet18, flops_of_resnet18)
